"""Trials on a GPU, timed by events on its streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from overlap_callbacks.experiments.bench.trials import Call, Range, Trial

# What the host needs to issue a call or a transfer, and clock cycles in that time. The device sleeps meanwhile, so that
# all of a trial is issued before any of it runs.
_ISSUE_US = 40
_CYCLES_A_US = 2_000
# Calls are to last longer than the transfers, whatever each costs the other.
_MORE_CALLS = 2


class CudaTrials:
    """Products run on the current stream, transfers on the stream of their process group.

    A transfer's function issues it and returns its work. Marks of the transfers stand on a stream of their own, which
    waits for each work; so neither side waits for the other's marks.

    Args:
        lead: issues a tiny transfer and returns its work. Products begin when it is done, and the transfers behind it
            begin at the same time.
    """

    def __init__(self, lead: Call) -> None:
        self._lead = lead
        self._side = torch.cuda.Stream()

    def compute(self, call: Call, count: int) -> Sequence[Range]:
        """Calls alone."""
        return self._run(call, count, None, 0).calls

    def transfer(self, transfer: Call, count: int) -> Sequence[Range]:
        """Transfers alone."""
        return self._run(None, 0, transfer, count).transfers

    def both(self, call: Call, transfer: Call, calls: int, transfers: int) -> Trial:
        """Transfers, and beside them twice the calls that would take as long."""
        return self._run(call, _MORE_CALLS * calls + 1, transfer, transfers)

    def _run(self, call: Call | None, calls: int, transfer: Call | None, transfers: int) -> Trial:
        torch.cuda.synchronize()
        current = torch.cuda.current_stream()
        torch.cuda._sleep(_CYCLES_A_US * _ISSUE_US * (calls + transfers + 2))
        origin = _mark(current)
        marks: list[Any] = []
        if transfer is not None:
            lead: Any = self._lead()
            lead.wait()  # of the current stream, on the device
            self._side.wait_stream(current)
            marks.append(_mark(self._side))
            for _ in range(transfers):
                work: Any = transfer()
                with torch.cuda.stream(self._side):
                    work.wait()
                marks.append(_mark(self._side))
        steps = [_mark(current)]
        if call is not None:
            for _ in range(calls):
                call()
                steps.append(_mark(current))
        current.wait_stream(self._side)
        torch.cuda.synchronize()
        return Trial(_ranges(origin, steps), _ranges(origin, marks))


def _mark(stream: torch.cuda.Stream) -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _ranges(origin: Any, marks: Sequence[Any]) -> tuple[Range, ...]:
    times = [round(origin.elapsed_time(mark) * 1e6) for mark in marks]
    return tuple([Range(*pair) for pair in itertools.pairwise(times)])
