"""The waits that make a collective sequential: on streams of a device, or on the host."""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks.gate.step_log import CollectiveCall
from overlap_callbacks.instruments import clocks

logger = logging.getLogger("overlap_callbacks")


class StreamSerialiser:
    """Waits of streams for each other: the host never blocks.

    Args:
        compute: the stream that is serialised with collectives.
    """

    completes = False

    def __init__(self, compute: torch.cuda.Stream) -> None:
        self._compute = compute

    def before(self, call: CollectiveCall, tensor: torch.Tensor | None) -> bool:
        compute = self._compute
        if tensor is None or compute.device != tensor.device or torch.cuda.is_current_stream_capturing():
            return False
        issuing = torch.cuda.current_stream(tensor.device)
        if issuing != compute:
            issuing.wait_stream(compute)  # all compute enqueued so far comes before the collective
        call.start = clocks.stream_mark(issuing)
        return True

    def after(self, call: CollectiveCall, work: dist.Work | None) -> bool:
        compute = self._compute
        issuing = torch.cuda.current_stream(compute.device)
        if work is not None and not call.spec.host_blocking:
            work.wait()  # the issuing stream waits for the communicator's; the host goes on
        call.end = clocks.stream_mark(issuing)
        if issuing != compute:
            compute.wait_stream(issuing)  # compute enqueued from here on comes after the collective
        return True

    def before_batch(self) -> Callable[[], None] | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        compute = self._compute
        issuing = torch.cuda.current_stream(compute.device)
        if issuing == compute:
            return _nothing
        issuing.wait_stream(compute)
        return functools.partial(compute.wait_stream, issuing)


class HostSerialiser:
    """Waits of the host, for collectives on tensors of the CPU.

    Args:
        patience_s: longest time that one collective is waited for.
    """

    completes = True

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._patience = datetime.timedelta(seconds=patience_s)

    def before(self, call: CollectiveCall, tensor: torch.Tensor | None) -> bool:
        call.start = perf_counter_ns()
        return True

    def after(self, call: CollectiveCall, work: dist.Work | None) -> bool:
        if work is not None and not self._wait(work):
            return False
        call.end = perf_counter_ns()
        return True

    def before_batch(self) -> Callable[[], None] | None:
        return _nothing

    def _wait(self, work: dist.Work) -> bool:
        start_ns = perf_counter_ns()
        try:
            work.wait(self._patience)
        except RuntimeError:
            # Our patience is over, which leaves the work as it is; or the collective itself failed (a peer died), and
            # its owner's own wait raises the same error, in the place where the owner expects it.
            logger.debug("the gate's wait for a collective ended with an error", exc_info=True)
            return perf_counter_ns() - start_ns < 1e9 * self._patience_s
        return True


class CompletedWork:
    """Stands for a work that was waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def is_complete(work: dist.Work | None) -> bool:
    """Whether a collective is complete, as far as its issuer can tell; asks, never waits."""
    if work is None:
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:
        # Sends and receives of Gloo have no future, and are complete once their owner has waited for them. Its
        # reduce-scatters have none either, and never say that they are complete.
        return bool(work.is_completed())


def _nothing() -> None:
    """After a batch that was issued on the compute stream itself, or on the host, nothing is left to order."""
