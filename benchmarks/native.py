"""Two independent ways to run DDP sequentially, side by side in one run: the gate, and DDP's own parts.

    python benchmarks/native.py [--rounds 6]

Windows of the two alternate (gate, native, native, gate) on one model in the same two processes, so that a drift of the
machine hits both alike. Where the intervals overlap, two mechanisms that share nothing agree on the number.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from overlap_callbacks import OverlapReport, Sink
from overlap_callbacks.analysis.statistics import pool
from overlap_callbacks.integrations.pytorch import attach

FORMS = ("gate", "native")
FIGURES = ("e2e_sequential_ms", "e2e_overlapped_ms", "speedup_vs_sequential")


class Interval(NamedTuple):
    """A figure over all windows of a form; the unit of its 95 % interval is the window."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class _Kept(Sink):
    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def compare(rank: int, rounds: int, width: int = 256) -> dict[str, dict[str, Interval]]:
    """Measure on this rank of a job with a process group; the figures by form (on rank 0, nothing elsewhere).

    Args:
        rank: of this process.
        rounds: of four windows.
        width: of the model's layers.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(128, width)).square().mean().backward()
            optimizer.step()

    train(10)
    kept = {form: _Kept() for form in FORMS}
    advanced = {"steps_per_block": 4, "warmup_steps": 1, "spread": False}
    options = {"first_step": 1, "repeats": 2, "profiled_steps": 0, "advanced": advanced}
    for form in ("gate", "native", "native", "gate") * rounds:
        sinks = [kept[form]]
        with attach(
            optimizer, model=model, sequential=form, every_n_steps=100, **options,
            max_overhead=None, strict=True, sinks=sinks,
        ) as monitor:  # fmt: skip
            train(2 + monitor.schedule.window_steps)
    if rank:
        return {}
    return {form: {name: _pooled(sink.reports, name) for name in FIGURES} for form, sink in kept.items()}


def _pooled(reports: list[OverlapReport], name: str) -> Interval:
    estimate = pool([getattr(report, name) for report in reports])
    assert estimate is not None
    assert estimate.ci_low is not None
    assert estimate.ci_high is not None
    return Interval(estimate.value, estimate.ci_low, estimate.ci_high)


def _run_rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    intervals = compare(rank, rounds)
    if intervals:
        Path(folder, "intervals.json").write_text(json.dumps(intervals))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run in two Gloo processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="of four windows")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run_rank, args=(folder, arguments.rounds), nprocs=2, start_method="spawn")
        intervals = json.loads(Path(folder, "intervals.json").read_text())
    print(f"{'':24}" + "".join(f"{form:^28}" for form in FORMS))
    for name in FIGURES:
        print(f"{name:24}" + "".join(f"{Interval(*intervals[form][name])!s:^28}" for form in FORMS))
    gate, native = (Interval(*intervals[form]["e2e_sequential_ms"]) for form in FORMS)
    agree = gate.low <= native.high and native.low <= gate.high
    print(f"the intervals of the sequential step time {'overlap' if agree else 'do not overlap'}")
    if arguments.json:
        environment = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "device": "cpu",
                       "python": platform.python_version(), "rounds": arguments.rounds}  # fmt: skip
        arguments.json.write_text(
            json.dumps({"environment": environment, "agree": agree, **intervals}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
