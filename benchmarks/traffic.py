"""What it takes to know who sends what to whom in a job of thousands of ranks.

    python benchmarks/traffic.py [--ranks 4096] [--json FILE]

Ranks of a job in tensor groups of 8 and 8 pipeline stages, and of one with an all-to-all over all ranks, tell what they
send. CPU time of one thread, the least of some rounds: to add up what 64 leaders send to rank 0, to make the totals of
the report, and to make the whole matrix of ranks. The matrix's memory is the highest that Python and NumPy hold at a
time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks.analysis.communication.sums import add_sums, job_messages
from overlap_callbacks.analysis.communication.traffic import dimension_totals, matrix_of
from tests.analysis.communication.layouts import Layout

ROUNDS = 5


def least_s(work: Callable[[], Any]) -> float:
    """CPU time of this thread."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def measured(layout: Layout) -> dict[str, float]:
    """Seconds, bytes and rows of one job."""
    parts = [layout.part(rank) for rank in range(layout.world_size)]
    leaders = [add_sums(parts[at : at + 64]) for at in range(0, layout.world_size, 64)]
    root = add_sums(leaders)
    messages = job_messages(root)
    assert messages is not None
    hosts = layout.hosts()
    times = {
        "rank 0 adds what its leaders send, s": least_s(lambda: add_sums(leaders)),
        "totals by dimension, s": least_s(lambda: dimension_totals(messages, hosts)),
        "whole matrix of ranks, s": least_s(lambda: matrix_of(messages, hosts)),
    }
    tracemalloc.start()
    matrix = matrix_of(messages, hosts)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.isfinite(matrix.sent).all()
    return {
        **times,
        "whole matrix of ranks, peak MB": peak_bytes / 1e6,
        "line of the record, once, bytes": len(msgspec.json.encode(messages)),
        "rows of the record": len(messages.groups),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs = {
        f"tp 8, pp 8, dp {options.ranks // 64}": Layout(8, 8, options.ranks // 64),
        f"the same at {options.ranks // 8} ranks": Layout(8, 8, options.ranks // 512),
        f"dp and all-to-all over {options.ranks}": Layout(1, 1, options.ranks, expert=True),
    }
    results = {name: measured(layout) for name, layout in jobs.items()}
    for name, figures in results.items():
        print(name)
        for figure, value in figures.items():
            print(f"  {figure}: {value:,.4g}")
    if options.json:
        options.json.write_text(json.dumps({"environment": about("numpy"), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
