"""Trials on a CPU, timed by the host's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from overlap_callbacks.experiments.bench.trials import Call, Range, Trial

# Longest wait for a transfer. The process group's own timeout is shorter.
_TIMEOUT_S = 300.0


class HostTrials:
    """Products run on this thread, transfers on one of their own, which waits for each before it begins the next.

    A transfer counts from its issue on this rank. So the ranks begin together, after a barrier.
    """

    def compute(self, call: Call, count: int) -> Sequence[Range]:
        """Calls alone."""
        return [_timed(call) for _ in range(count)]

    def transfer(self, transfer: Call, count: int) -> Sequence[Range]:
        """Transfers alone; on a thread of their own, as beside calls."""
        transfers = _Transfers(transfer, count)
        transfers.begin()
        return transfers.end()

    def both(self, call: Call, transfer: Call, calls: int, transfers: int) -> Trial:
        """Calls until the transfers are done. The last of them ends beside nothing, and does not count."""
        beside = _Transfers(transfer, transfers)
        beside.begin()
        done: list[Range] = []
        while beside.running:
            done.append(_timed(call))
        return Trial(tuple(done), tuple(beside.end()))


class _Transfers:
    """Transfers on a thread."""

    def __init__(self, transfer: Call, count: int) -> None:
        self._transfer, self._count = transfer, count
        self._began = threading.Event()
        self._ranges: list[Range] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="overlap-bench-transfers", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def begin(self) -> None:
        """Start, and wait until the first is about to be issued."""
        self._thread.start()
        self._began.wait(_TIMEOUT_S)

    def end(self) -> list[Range]:
        """Wait for all of them."""
        self._thread.join(_TIMEOUT_S * self._count)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError("a collective has not ended in time")
        return self._ranges

    def _run(self) -> None:
        try:
            self._began.set()
            for _ in range(self._count):
                self._ranges.append(_timed(self._transfer))
        except BaseException as error:
            self._error = error


def _timed(call: Call) -> Range:
    start = time.perf_counter_ns()
    call()
    return Range(start, time.perf_counter_ns())
