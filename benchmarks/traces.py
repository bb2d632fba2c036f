"""How fast trace files are read, against Holistic Trace Analysis and against bare reads, side by side in one run.

    pip install 'HolisticTraceAnalysis==0.5.0' 'pandas<3'      # or, in an environment of its own, --hta PYTHON
    python benchmarks/traces.py [TRACE] [--events 1000000] [--rounds 3] [--hta PYTHON] [--json FILE]

Every method runs in a process of its own that first imports what it needs, then reports the time of its work (wall,
and CPU of all its threads and children) and the peak memory of the whole process. Methods take turns, so that a drift
of the machine hits all alike; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import kineto  # noqa: E402

OURS, HTA, GZIP, TYPED, ANY = "overlap analyze", "HTA 0.5", "gzip", "isal + msgspec, typed", "isal + msgspec, to dicts"

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
        "import io\nfrom rich.console import Console\nfrom overlap_callbacks.report import terminal_traces\n"
        "from overlap_callbacks.traces import analyze, read_trace",
        "Console(file=io.StringIO()).print(terminal_traces.analysis_tables(analyze([read_trace(path)])))",
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
        "import msgspec\nfrom isal import igzip\nfrom overlap_callbacks.traces.events import Event\n"
        "class Document(msgspec.Struct):\n    traceEvents: list[Event]",
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
    print("  ours / bare read through msgspec: typed {:.2f}, to dicts {:.2f}   goal: under 3".format(*bare))
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
    runs: list[list[float]] = [[] for _ in paths]
    for _ in range(rounds):
        for position, path in enumerate(paths):
            runs[position].append(child(OURS, path, sys.executable)["cpu_s"])
    times = [min(round_times) for round_times in runs]
    # Weighted by size, so that the line's distance counts as a fraction of each time.
    slope, start = np.polyfit(sizes, times, 1, w=1 / np.array(times))
    off = [time / (start + slope * size) - 1 for time, size in zip(times, sizes, strict=True)]
    growth = [time / size / (times[-1] / sizes[-1]) for time, size in zip(times, sizes, strict=True)]
    print("\nCost against size")
    for size, seconds, apart, part in zip(sizes, times, off, growth, strict=True):
        print(
            f"  {size:>9} events  {seconds:6.2f} s CPU  {apart:+6.1%} off the line   {part:.2f} of the last's per event"
        )
    print("  goal: within 15 % of a line")
    return {"events": sizes, "bytes": counts, "cpu_s": times, "off_line": off}


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
        files = [options.trace] if options.trace.exists() else []
        if not files:
            print(f"{options.trace} is not there: only a generated trace is measured")
        files.append(generated(folder, options.events))
        for path in files:
            medians = measure(path, methods, options.rounds, options.hta)
            results[path.name] = {"methods": medians, "ratios": show(path.name, medians)}
        results["scaling"] = scaling(folder, max(options.events // 8, 1000), options.rounds)
    if options.json:
        environment = {
            "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": os.cpu_count(),
            "command": f"benchmarks/traces.py --rounds {options.rounds} --events {options.events}",
        }  # fmt: skip
        options.json.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
