"""The harness of the tests of several processes: what happens at a rank's end, it must not miss."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from tests.distributed import RanksFailedError, run_mortal_ranks, run_ranks


def crash_at_exit(rank: int) -> int:
    if rank == 1:
        atexit.register(ctypes.string_at, 0)
    return rank


def leave_a_thread_that_never_ends(rank: int) -> int:
    if rank == 1:
        threading.Thread(target=time.sleep, args=(600.0,)).start()
    return rank


@pytest.mark.parametrize("run", [run_ranks, run_mortal_ranks])
def test_a_rank_that_crashes_while_its_interpreter_ends_is_a_failure(run: Callable[..., object]) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 returned, but its interpreter ended with exit code -11"):
        run(crash_at_exit, 2)


@pytest.mark.parametrize("run", [run_ranks, run_mortal_ranks])
def test_a_rank_that_hangs_while_its_interpreter_ends_is_a_failure(run: Callable[..., object]) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 returned, but did not end"):
        run(leave_a_thread_that_never_ends, 2, timeout_s=1.5)
