"""The waits that make a collective sequential: on device streams, or on the host."""

from __future__ import annotations

import datetime
import enum
import time
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks._log import logger
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.interruptions import is_from_handler
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.valve import Valve

# Maximum collectives per step timed on the device: each takes two events, which live until the report.
MAX_TIMED = 4_000
# Poll interval for a work that must not be given a timeout.
_POLL_S = 50e-6


class NotSerialised(enum.Enum):
    """Why a sequential step does not serialise a collective; each text follows a count."""

    CAPTURE = "a CUDA graph was being captured"
    OTHER_DEVICE = "they were on another device than the one whose steps are timed"
    COALESCING_BLOCK = "they were in a coalescing block, and start when it ends"
    UNKNOWN_GROUP = "their process group is not registered with torch.distributed, so that its ranks are not known"
    SINGLE_MESSAGE = "they were sent or received singly, and waiting for one could hang a pipeline"


# Reasons for which a collective still has its place in the checked order, as if the job waited for it at once.
IN_CHECKED_ORDER = (NotSerialised.COALESCING_BLOCK, NotSerialised.SINGLE_MESSAGE)


class Serialiser:
    """Interface: puts a collective between two waits. ``completes``: it is complete once ``after`` returned True."""

    completes: bool

    def obstacle(self, tensor: torch.Tensor | None) -> NotSerialised | None:
        """Why a collective issued now with this first tensor (None: not known) cannot be serialised; None if it can."""
        return None

    def before(self, call: Collective) -> None:
        """Order what came before the call."""
        raise NotImplementedError

    def after(self, call: Collective, work: dist.Work | None) -> bool:
        """Order what comes after the call; False if the collective did not finish in time."""
        raise NotImplementedError

    def before_batch(self) -> Callable[[], None]:
        """Order what came before a batch of sends and receives. Returns a function to call after their wait."""
        return lambda: None


class StreamSerialiser(Serialiser):
    """Makes streams wait for each other within one step: the host never blocks.

    It orders the compute stream, ``others`` that compute, and all streams on which the step has issued collectives so
    far: frameworks compute there too (FSDP2 accumulates gradients on its reduce-scatter stream). A collective runs
    after everything enqueued on these streams before it, and before everything enqueued there after it. Streams only
    wait for events that are already recorded, so no two can wait for each other; but ranks can. With ``valve`` the host
    can end all waits.
    """

    completes = False

    def __init__(
        self, compute: device.Stream, others: Iterable[device.Stream] = (), valve: Valve | None = None
    ) -> None:
        self._compute, self._accelerator, self._valve = compute, device.accelerator(), valve
        self._num_timed = 0
        self._known = [compute, *[stream for stream in others if stream.device == compute.device]]

    def obstacle(self, tensor: torch.Tensor | None) -> NotSerialised | None:
        if tensor is not None and self._compute.device != tensor.device:
            return NotSerialised.OTHER_DEVICE
        return NotSerialised.CAPTURE if self._accelerator.is_capturing() else None

    def before(self, call: Collective) -> None:
        call.stream = issuing = self._wait_for_known(call)
        if self._num_timed < MAX_TIMED:
            self._num_timed += 1
            call.start = self._accelerator.mark(issuing)

    def after(self, call: Collective, work: dist.Work | None) -> bool:
        issuing, call.stream = call.stream, None
        assert issuing is not None
        # Waiting for a barrier blocks the host on CUDA too.
        if work is not None and "barrier" not in call.operator:
            self._wait_for_work(work, issuing, call)
        call.end = mark = None if call.start is None else self._accelerator.mark(issuing)
        self._make_known_wait(issuing, call, mark)
        return True

    def before_batch(self) -> Callable[[], None]:
        issuing = self._wait_for_known("a batch of sends and receives")
        return lambda: self._make_known_wait(issuing, "a batch of sends and receives")

    def skip(self, tensor: torch.Tensor | None) -> None:
        """Do not serialise what is issued now, which must be ``IN_CHECKED_ORDER``: then this cannot deadlock.

        Everything else on its stream is ordered with later collectives.
        """
        if self.obstacle(tensor) is None:
            self._track_current_stream()

    def _track_current_stream(self) -> device.Stream:
        """The current stream, which is ordered from now on."""
        issuing = self._accelerator.current_stream(self._compute.device)
        if issuing not in self._known:
            self._known.append(issuing)
        return issuing

    def _wait_for_known(self, what: object) -> device.Stream:
        """Make the current stream wait for everything enqueued on the known streams, and return it."""
        issuing = self._track_current_stream()
        others = [stream for stream in self._known if stream != issuing]

        def make_wait(later: device.Stream) -> None:
            for stream in others:
                later.wait_stream(stream)

        if others:
            self._order(make_wait, [issuing], what)
        return issuing

    def _wait_for_work(self, work: dist.Work, issuing: device.Stream, what: object) -> None:
        """Make the issuing stream wait for the communicator's; the host continues."""
        future = None if self._valve is None else _future_of(work)
        if future is None:
            work.wait()
            return

        # The work's own wait would free tensors for the issuing stream, which the host may let go on before the end.
        def make_wait(later: Any) -> None:
            with device.on_stream(later):
                future.wait()

        self._order(make_wait, [issuing], what)

    def _make_known_wait(self, issuing: device.Stream, what: object, mark: device.Event | None = None) -> None:
        """Make the other known streams wait for the issuing one: one event, however many there are."""
        others = [stream for stream in self._known if stream != issuing]
        if not others:
            return
        passed = issuing.record_event() if mark is None else mark

        def make_wait(later: device.Stream) -> None:
            later.wait_event(passed)

        self._order(make_wait, others, what)

    def _order(self, make_wait: Callable[[Any], None], later: Iterable[device.Stream], what: object) -> None:
        """Make streams wait, as ``make_wait`` does with one, for what is part of ``what``."""
        if self._valve is not None:
            self._valve.order(make_wait, later, what)
            return
        for stream in later:
            make_wait(stream)


def _future_of(work: dist.Work) -> Any:
    """The future of a work that streams can wait for already; None if the host would wait."""
    try:
        future = work.get_future()
    except RuntimeError:
        return None
    return future if future.done() else None


class HostSerialiser(Serialiser):
    """Blocks the host, for at most ``patience_s`` per collective on CPU tensors."""

    completes = True

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._patience = datetime.timedelta(seconds=patience_s)

    def before(self, call: Collective) -> None:
        call.start = perf_counter_ns()

    def after(self, call: Collective, work: dist.Work | None) -> bool:
        if work is not None and not self._wait(work):
            return False
        call.end = perf_counter_ns()
        return True

    def _wait(self, work: dist.Work) -> bool:
        start_ns = perf_counter_ns()
        try:
            # With torchcomms a wait with a timeout fails, and its work with it.
            if getattr(dist.distributed_c10d, "_use_torchcomms_enabled", bool)():
                return self._poll(work)
            work.wait(self._patience)
        except RuntimeError as error:
            if is_from_handler(error):
                raise
            # Either the gate's timeout expired, which leaves the work unchanged; or the collective itself failed (a
            # peer died), and its owner's own wait raises the same error where the owner expects it.
            logger.debug("the gate's wait for a collective ended with an error", exc_info=True)
            return perf_counter_ns() - start_ns < 1e9 * self._patience_s
        return True

    def _poll(self, work: dist.Work) -> bool:
        """Wait for a work that must not be given a timeout."""
        deadline_ns = perf_counter_ns() + 1e9 * self._patience_s
        while not work.is_completed():
            if perf_counter_ns() > deadline_ns:
                return False
            time.sleep(_POLL_S)
        work.wait()
        return True


class CompletedWork:
    """Replaces a work that was waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def is_complete(work: dist.Work | None) -> bool:
    """Whether a collective is complete, as far as its issuer can tell; never waits."""
    if work is None:
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:
        # Gloo's sends and receives have no future, and are complete once their owner has waited for them. Its
        # reduce-scatters have none either, and never report completion.
        return bool(work.is_completed())
