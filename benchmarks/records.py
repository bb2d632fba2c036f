"""Records of long runs: their size, and what `overlap show` and `overlap report` take to read them.

    python benchmarks/records.py [--windows 10000] [--from RUN] [--earlier] [--json [FILE]]

Takes the last whole window of a real record (of RUN; else `overlap demo` makes one), varies its numbers, and writes so
many windows of it through the library's own sink, with the lines of their blocks. Each command then runs in a process
of its own, three times: wall time and CPU time of the fastest run, peak memory of the largest. Python's files are
compiled in the first one, as they are where a package is installed. Goals at 10,000 windows of two ranks: show under
2 s and 200 MB, report under 10 s and a page under 5 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from overlap_callbacks.sinks import jsonl

COMMAND = [sys.executable, "-m", "overlap_callbacks"]
# Windows of different numbers; the rest repeat them, renumbered.
VARIANTS = 50
# Every so many windows, one is not valid, for a reason of its own.
INVALID_EVERY = 37
ROUNDS = 3


def real_record(folder: Path) -> Path:
    """A record of the demo with one window."""
    command = [*COMMAND, "demo", "--steps", "150", "--every", "120", "--run-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder.parent)
    return folder


def varied(value: Any, chance: random.Random) -> Any:
    """The same data with every fraction a little different."""
    if isinstance(value, float):
        return round(value * chance.gauss(1, 0.02), 9)
    if isinstance(value, dict):
        return {key: varied(item, chance) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [varied(item, chance) for item in value]
    return value


def write(source: Path, folder: Path, windows: int, *, earlier: bool) -> Path:
    """A record of so many windows.

    Args:
        source: a real record.
        folder: of the new one.
        windows: how many.
        earlier: as an earlier version wrote it, with all details of every window.
    """
    real, chance = record.read(source), random.Random(1)
    window = [window for window in real.windows if window.complete][-1]
    every = real.runs[-1].schedule["every_n_steps"]
    plain = msgspec.to_builtins(window)
    variants = [msgspec.convert(varied(plain, chance), OverlapReport) for _ in range(VARIANTS)]
    os.fsync = lambda _: None  # type: ignore[assignment]  # the time to write is not what is measured here
    sink = jsonl.JsonlSink(folder)
    if earlier:
        sink._details.of = lambda report: report  # type: ignore[method-assign]
    sink.open(real.runs[-1])
    for number in range(windows):
        report = msgspec.structs.replace(
            variants[number % VARIANTS], window=number, first_step=20 + every * number, valid=True
        )
        if number % INVALID_EVERY == 5:
            report = msgspec.structs.replace(report, valid=False, problems=(f"{number} kernels were not matched",))
        for block in report.samples[0].timed:
            sink.block(number, report.first_step, block)
        sink.log(report)
    sink.close()
    return sink.path


def measured(compiled: Path, *arguments: str) -> dict[str, float]:
    """Wall time, CPU time and peak memory of the command `overlap`.

    Args:
        compiled: folder for what Python compiles.
        arguments: of the command.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    runs = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, env=environment)
        _, status, usage = os.wait4(process.pid, 0)  # of this child alone
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f"overlap {' '.join(arguments)} ended with {process.returncode}")
        runs.append((wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6))
    return {
        "wall_s": min(wall for wall, _, _ in runs),
        "cpu_s": min(cpu for _, cpu, _ in runs),
        "peak_mb": max(peak for _, _, peak in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--from", dest="source", type=Path, help="a real record; else the demo makes one")
    parser.add_argument("--earlier", action="store_true", help="all details of every window, as earlier versions")
    parser.add_argument("--json", nargs="?", const="-", help="print JSON, or write it into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap-records-") as name:
        folder = Path(name)
        source = options.source or real_record(folder / "demo")
        path = write(source, folder / "long", options.windows, earlier=options.earlier)
        page, compiled = folder / "report.html", folder / "compiled"
        results: dict[str, Any] = {
            "record_bytes": path.stat().st_size,
            "start": measured(compiled, "--version"),
            "show": measured(compiled, "show", str(path)),
            "report": measured(compiled, "report", str(path), "--output", str(page)),
            "page_bytes": page.stat().st_size,
        }
    found = {
        "environment": about(windows=options.windows, all_details=options.earlier),
        "results": results,
    }  # fmt: skip
    if options.json != "-":
        print(f"{options.windows:,} windows: a record of {results['record_bytes'] / 1e6:.0f} MB")
        for what in ("start", "show", "report"):
            of = results[what]
            print(f"{what:>7}: {of['wall_s']:.2f} s, of CPU {of['cpu_s']:.2f} s, at most {of['peak_mb']:.0f} MB")
        print(f"   page: {results['page_bytes'] / 1e6:.2f} MB")
    if options.json:
        text = json.dumps(found, indent=2) + "\n"
        if options.json == "-":
            print(text, end="")
        else:
            Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
