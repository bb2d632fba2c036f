"""The five screens that a change of the page is looked at on: records of jobs as they are, each with its name."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime, TimedBlock
from overlap_callbacks.report.record import Record, read
from tests.report.runs import KERNELS, OSSO, OV, PAIRS, SEQ, rank_window, run_info, window, write

# FSDP on two ranks has data parallelism alone, and no bubble.
_OF_FSDP: dict[str, Any] = {
    "dimensions": (DimensionTime("data", 24, 6_039_797_760, 132.0, 36.0, 132.0, 112.0),),
    "dimension_pairs": (),
    "collectives": (
        CollectiveTime("_reduce_scatter_base_", "fsdp", 2, "nccl", 12, 5_368_709_120, 2_684_354_560, 60.0, "data",
                       5_368_709_120.0),
        CollectiveTime("_allgather_base_", "fsdp", 2, "nccl", 12, 671_088_640, 1_342_177_280, 52.0, "data",
                       671_088_640.0),
    ),
    "kernels": tuple(kernel for kernel in KERNELS if "AllReduce" not in kernel.name),
    "pairs": tuple(pair for pair in PAIRS if "all_reduce" not in (pair.concurrent_with, pair.kernel_family)),
}  # fmt: skip
_CONFIGURATION = {"model": "GPT", "parameters": 1_300_000_000, "shapes": "7f3ab1c2d4e5", "fsdp_units": 25}


@functools.lru_cache(maxsize=64)
def fsdp_window(number: int, *, power: bool = False, slowdown: float = 0.14, escaped: bool = False) -> OverlapReport:
    """A window of a job with FSDP.

    Args:
        number: of the window.
        power: whether power was measured.
        slowdown: of compute.
        escaped: whether communication ran beside compute in sequential steps, so that the window is not valid.
    """
    profiled = tuple(
        msgspec.structs.replace(
            block, bubble_ms=None, p2p_ms=0.0,
            **({"covered_compute_ms": 98.0, "hidden_comm_ms": 88.0} if escaped and block.mode is SEQ else {}),
        )
        for block in rank_window(number, slowdown=slowdown).profiled
    )  # fmt: skip
    # What compute loses less, a step is shorter.
    chance, overlapped_ms = random.Random(number), 412.0 - 325.0 * (0.14 - slowdown)
    timed = tuple(
        TimedBlock(arm, i, tuple((overlapped_ms if arm is OV else 468.0) * chance.gauss(1, 0.004) for _ in range(2)))
        for i, arm in enumerate(OSSO * 4)
    )
    return window(number, power=power, slowdown=slowdown, profiled=profiled, timed=timed, **_OF_FSDP)


def _run(folder: Path, name: str, *windows: OverlapReport, **configuration: Any) -> Record:
    run = run_info(framework="pytorch 2.13.0+cu130", configuration={**_CONFIGURATION, **configuration})
    return read(write(folder / name, *windows, run=run))


def _demo(folder: Path) -> list[Record]:
    return [_run(folder, "demo", *[fsdp_window(i) for i in range(6)])]


def _two_runs(folder: Path) -> list[Record]:
    found = (("reduce-in-32-bits", 0.14, "torch.float32"), ("reduce-in-16-bits", 0.05, "torch.bfloat16"))
    return [
        _run(folder, name, *[fsdp_window(i, slowdown=slowdown) for i in range(6)], fsdp_reduce_dtype=dtype)
        for name, slowdown, dtype in found
    ]


def _with_power(folder: Path) -> list[Record]:
    return [_run(folder, "with-power", *[fsdp_window(i, power=True) for i in range(6)])]


def _invalid(folder: Path) -> list[Record]:
    return [_run(folder, "invalid", *[fsdp_window(i, escaped=True) for i in range(3)])]


def _one_window(folder: Path) -> list[Record]:
    return [_run(folder, "one-window", fsdp_window(0))]


SCREENS: dict[str, Callable[[Path], list[Record]]] = {
    "demo": _demo, "two-runs": _two_runs, "with-power": _with_power, "invalid": _invalid, "one-window": _one_window,
}  # fmt: skip
