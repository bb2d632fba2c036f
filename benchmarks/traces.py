"""How fast trace files are read, against Holistic Trace Analysis and against bare reads, side by side in one run.

    pip install 'HolisticTraceAnalysis==0.5.0' 'pandas<3'      # or, in an environment of its own, --hta PYTHON
    python benchmarks/traces.py [TRACE] [--events 1000000] [--rounds 3] [--hta PYTHON] [--json FILE]

Every method runs in a process of its own that first imports what it needs, then reports the time of its work (wall,
and CPU of all its threads and children) and the peak memory of the whole process. Methods take turns, so that a drift
of the machine hits all alike; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.about import about  # noqa: E402
from tests import kineto  # noqa: E402

# Times that the real trace lies in a long file: some two gigabytes.
LONG_TIMES = 40
COMPARE = "overlap compare, with itself"
OURS, HTA, GZIP, TYPED, ANY = "overlap analyze", "HTA 0.5", "gzip", "isal + msgspec, typed", "isal + msgspec, to dicts"
MAX_TYPED, MAX_MB, MAX_LONG_MB, MAX_START_S = 1.2, 100, 300, 0.25  # the goals

# The bare typed read: every event with what an analysis needs of it, in the types of the file, and no analysis. It is
# written out here, so that what ours is held against stays the same when ours reads in another way.
_TYPED_RECORDS = """
import msgspec
from isal import igzip
from typing import Any, Union
class Args(msgspec.Struct, gc=False):
    correlation: Any = None
    device: Any = None
    grid: msgspec.Raw = msgspec.Raw()
    block: msgspec.Raw = msgspec.Raw()
    registers: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="registers per thread")
    shared_memory: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="shared memory")
    blocks_per_sm: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="blocks per SM")
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")
    input_dims: Any = msgspec.field(default=None, name="Input Dims")
    input_type: Any = msgspec.field(default=None, name="Input type")
class Event(msgspec.Struct, gc=False):
    ph: Union[str, None] = None
    cat: Union[str, None] = None
    name: Union[str, None] = None
    pid: Any = None
    tid: Any = None
    ts: Union[int, float, str, None] = None
    dur: Union[int, float, str, None] = None
    args: Union[Args, None] = None
class Document(msgspec.Struct):
    traceEvents: list[Event]
"""

# What each child runs: imports before READY, its work after.
_CHILD = """
import json, os, re, sys, time
path = sys.argv[1]
{imports}
start, cpu = time.perf_counter(), os.times()
{work}
wall, end = time.perf_counter() - start, os.times()
used = sum(end[:4]) - sum(cpu[:4])
# Not ru_maxrss, which a process takes over from the one that forked it.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1))
print(json.dumps(dict(wall_s=wall, cpu_s=used, peak_mb=peak / 1024)))
"""

_WORK = {
    OURS: (
        "import io\nfrom rich.console import Console\nfrom overlap_callbacks.report.terminal import drawn\n"
        "from overlap_callbacks.report.views.traces import trace_document\n"
        "from overlap_callbacks.traces import analyze_files",
        "Console(file=io.StringIO()).print(drawn(trace_document(analyze_files([path]))))",
    ),
    COMPARE: (
        "import io\nfrom rich.console import Console\nfrom overlap_callbacks.report.terminal import drawn\n"
        "from overlap_callbacks.report.views.traces import comparison_document\n"
        "from overlap_callbacks.traces import compare_files",
        "Console(file=io.StringIO()).print(drawn(comparison_document(compare_files(path, path))))",
    ),
    HTA: (
        "from hta.trace_analysis import TraceAnalysis\nimport logging; logging.disable(logging.CRITICAL)",
        "analysis = TraceAnalysis(trace_files={0: path})\n"
        "analysis.get_comm_comp_overlap(visualize=False)\nanalysis.get_temporal_breakdown(visualize=False)",
    ),
    GZIP: (
        "import gzip",
        "with gzip.open(path) as file:\n    while file.read(2**22): pass",
    ),
    TYPED: (
        _TYPED_RECORDS,
        "msgspec.json.decode(igzip.open(path).read(), type=Document)",
    ),
    ANY: (
        "import msgspec\nfrom isal import igzip",
        "msgspec.json.decode(igzip.open(path).read())",
    ),
}


def child(method: str, path: Path, python: str) -> dict[str, float]:
    imports, work = _WORK[method]
    code = _CHILD.format(imports=imports, work=work)
    environment = {**os.environ, "PYTHONPATH": str(ROOT) if method != HTA else ""}
    with tempfile.TemporaryDirectory() as folder:  # HTA writes into the folder that it runs in
        done = subprocess.run(
            [python, "-c", code, str(path)], capture_output=True, text=True, check=False, env=environment, cwd=folder
        )
    if done.returncode:
        raise SystemExit(f"{method} failed on {path.name}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(path: Path, methods: list[str], rounds: int, hta_python: str) -> dict[str, dict[str, float]]:
    measured: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            measured[method].append(child(method, path, hta_python if method == HTA else sys.executable))
    return {
        method: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for method, runs in measured.items()
    }


def generated(folder: Path, events: int) -> Path:
    """A trace of about so many events: 33 to a layer, as ``kineto.training`` makes them."""
    path = folder / f"generated-{events}.json.gz"
    layers = 100
    steps = max(1, round(events / (layers * 33)))
    return kineto.write(path, kineto.training(steps, layers, slowdown=0.1), **kineto.job())


def repeated(folder: Path, path: Path, times: int) -> Path:
    """A file with the events of a trace several times, one after the other, for files larger than the real ones."""
    text = gzip.decompress(path.read_bytes())
    begin, end = text.index(b'"traceEvents": [') + len(b'"traceEvents": ['), text.rindex(b"]")
    starts = sorted(map(int, re.findall(rb'"ts": (\d+)', text[begin:end])))
    span_us = starts[-1] - starts[len(starts) // 100] + 1_000_000
    parts = []
    for number in range(times):

        def later(match: re.Match[bytes], by: int) -> bytes:
            return b"%s%d" % (match.group(1), int(match.group(2)) + by)

        part = text[begin:end].rstrip()
        for pattern, by in (
            (rb'("ts": )(\d+)', span_us), (rb'("correlation": )(\d+)', 10**8), (rb"(ProfilerStep#)(\d+)", 100)
        ):  # fmt: skip
            part = re.sub(pattern, functools.partial(later, by=number * by), part)
        parts.append(part)
    file = folder / f"{path.name.split('.')[0]}-{times}-times.json.gz"
    file.write_bytes(gzip.compress(text[:begin] + b",\n".join(parts) + b"\n" + text[end:], compresslevel=6))
    return file


def show(name: str, measured: dict[str, dict[str, float]]) -> dict[str, float]:
    ours = measured[OURS]
    print(f"\n{name}")
    for method, figures in measured.items():
        ratios = f"{figures['cpu_s'] / ours['cpu_s']:7.2f} {figures['wall_s'] / ours['wall_s']:7.2f}"
        times = f"CPU {figures['cpu_s']:7.2f} s  wall {figures['wall_s']:7.2f} s  peak {figures['peak_mb']:6.0f} MB"
        print(f"  {method:26} {times}   CPU, wall in ours: {ratios}")
    ratios = {
        "ours / typed read, CPU": ours["cpu_s"] / measured[TYPED]["cpu_s"],
        "ours / read to dicts, CPU": ours["cpu_s"] / measured[ANY]["cpu_s"],
        "ours / gzip, CPU": ours["cpu_s"] / measured[GZIP]["cpu_s"],
    }
    bare = (ratios[key] for key in ("ours / typed read, CPU", "ours / read to dicts, CPU"))
    print(
        f"  ours / bare read through msgspec: typed {{:.2f}} (goal: at most {MAX_TYPED}), to dicts {{:.2f}}".format(
            *bare
        )
    )
    if HTA in measured:
        ratios["HTA / ours, CPU"] = measured[HTA]["cpu_s"] / ours["cpu_s"]
        ratios["HTA / ours, wall"] = measured[HTA]["wall_s"] / ours["wall_s"]
        ratios["HTA / ours, peak memory"] = measured[HTA]["peak_mb"] / ours["peak_mb"]
        shown = (ratios[f"HTA / ours, {key}"] for key in ("CPU", "wall", "peak memory"))
        print(
            "  HTA / ours: CPU {:.1f}, wall {:.1f} (goal: at least 10), peak memory {:.1f} (at least 5)".format(*shown)
        )
    return ratios


def scaling(folder: Path, events: int, rounds: int) -> dict[str, Any]:
    """CPU time at 1, 2, 4 and 8 times the events, the least of some runs, and how far from a line."""
    sizes = [events * factor for factor in (1, 2, 4, 8)]
    paths = [generated(folder, size) for size in sizes]
    counts = [path.stat().st_size for path in paths]
    runs: list[list[dict[str, float]]] = [[] for _ in paths]
    for _ in range(rounds):
        for position, path in enumerate(paths):
            runs[position].append(child(OURS, path, sys.executable))
    times = [min(run["cpu_s"] for run in of_path) for of_path in runs]
    peaks = [max(run["peak_mb"] for run in of_path) for of_path in runs]
    # Weighted by size, so that the line's distance counts as a fraction of each time.
    slope, start = np.polyfit(sizes, times, 1, w=1 / np.array(times))
    off = [time / (start + slope * size) - 1 for time, size in zip(times, sizes, strict=True)]
    growth = [time / size / (times[-1] / sizes[-1]) for time, size in zip(times, sizes, strict=True)]
    print("\nCost against size")
    for size, seconds, apart, part, peak in zip(sizes, times, off, growth, peaks, strict=True):
        print(
            f"  {size:>9} events  {seconds:6.2f} s CPU  {apart:+6.1%} off the line   {part:.2f} of the last's per event"
            f"   peak {peak:.0f} MB"
        )
    print(f"  goal: within 15 % of a line; under {MAX_MB} MB")
    return {"events": sizes, "bytes": counts, "cpu_s": times, "off_line": off, "peak_mb": peaks}


def long(folder: Path, path: Path) -> dict[str, Any]:
    """A file whose columns lie in temporary files, once."""
    file = repeated(folder, path, LONG_TIMES)
    measured = {method: child(method, file, sys.executable) for method in (OURS, COMPARE, TYPED)}
    ratio = measured[OURS]["cpu_s"] / measured[TYPED]["cpu_s"]
    print(f"\n{file.name}")
    print(f"  ours / bare typed read, CPU {ratio:.2f} (goal: at most {MAX_TYPED})")
    for method in (OURS, COMPARE):
        figures = measured[method]
        print(f"  {method}: CPU {figures['cpu_s']:.1f} s, peak {figures['peak_mb']:.0f} MB (goal: under {MAX_LONG_MB})")
    file.unlink()
    return {"methods": measured, "ours / typed read, CPU": ratio}


def start(folder: Path, rounds: int) -> dict[str, float]:
    """CPU time of the whole command on a small trace, from its start to its end: the median of some runs.

    The package has its bytecode, as an installed one has.
    """
    path = kineto.write(folder / "small.json.gz", kineto.training(2, 10, slowdown=0.1), **kineto.job())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["OPENBLAS_NUM_THREADS"] = "1"  # as the command sets it: NumPy's threads take as long as all else
    commands = {
        "overlap analyze": ["-m", "overlap_callbacks", "analyze", str(path)],
        "import numpy": ["-c", "import numpy"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(max(rounds, 5) + 1):
        for name, command in commands.items():
            before = os.times()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment)
            after = os.times()
            used = after.children_user + after.children_system - before.children_user - before.children_system
            times[name].append(used)
    medians = {name: statistics.median(runs[1:]) for name, runs in times.items()}  # the first writes the bytecode
    print(f"\nA small trace ({path.stat().st_size / 1000:.0f} kB), the whole command")
    for name, seconds in medians.items():
        print(f"  {name:26} CPU {seconds:7.3f} s")
    print(f"  goal: under {MAX_START_S} s")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("OVERLAP_TRACES", ROOT.parent / "shared" / "traces")) / "ddp_v100_x2.json.gz"
    parser.add_argument("trace", nargs="?", type=Path, default=shared, help="a real trace")
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the generated trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hta", default=sys.executable, help="a Python that has HTA")
    parser.add_argument("--no-hta", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = [OURS, GZIP, TYPED, ANY] + ([] if options.no_hta else [HTA])
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [options.trace.resolve()] if options.trace.exists() else []
        if not files:
            print(f"{options.trace} is not there: only a generated trace is measured")
        files += [repeated(folder, path, 4) for path in files]  # more than 100 MB, decompressed
        files.append(generated(folder, options.events))
        for path in files:
            medians = measure(path, methods, options.rounds, options.hta)
            results[path.name] = {"methods": medians, "ratios": show(path.name, medians)}
        if options.trace.exists():
            results["long"] = long(folder, options.trace.resolve())
        results["start"] = start(folder, options.rounds)
        results["scaling"] = scaling(folder, max(options.events // 8, 1000), options.rounds)
    if options.json:
        options.json.write_text(json.dumps({"environment": about(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
