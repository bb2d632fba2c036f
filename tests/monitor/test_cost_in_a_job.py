"""What windows are said to cost, against a clock outside the library: a job with and without it, in turns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROUNDS = 6


def _cost() -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module("cost")


def _run(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = _cost().run(rank, 4.0, ROUNDS)
    return found


def test_a_job_with_the_library_takes_as_much_longer_as_its_windows_are_said_to_cost() -> None:
    found, other = run_ranks(_run, 2, timeout_s=240.0)
    assert other["told_ms"] == []  # rank 0 tells
    took, told = np.array(found["took_ms"]), np.array(found["told_ms"])
    assert len(took) == len(told) == ROUNDS
    assert min(told) > 0.0
    _, low, high = _cost().interval(took - told, 0.999)
    assert low <= 0.0 <= high, (found, low, high)
    # The figure is that cost over the training between two windows.
    assert all(overhead > 0.0 for overhead in found["overhead"])
