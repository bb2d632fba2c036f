"""Delays of known length before single collectives of a step, of which compute takes no part.

Where a device runs a collective on a stream of its communicator (``async_op=True``), it begins once the stream that is
current at its issue gets there. So it is issued while a stream of the library is current, which has waited for the
issuing stream and then sleeps. Where it runs on the issuing stream itself, whatever is enqueued there after it waits
for it anyway, so that stream sleeps. On the host, a collective that its issuer waits for at once is delayed by the
issuing thread; the work of another one is complete later than the collective.

Nothing waits for anything else than without delays, and no tensor is touched: NCCL keeps those of a collective until
its work was waited for, whichever stream was current. So no order of ranks can deadlock, and results have the same
bits.
"""

from __future__ import annotations

import contextlib
import datetime
import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.dimension_rules import UNKNOWN
from overlap_callbacks.analysis.results.causal import DelayedCall
from overlap_callbacks.gate.collectives import Collective, OperatorSpec, operator_specs
from overlap_callbacks.gate.names import names_of
from overlap_callbacks.instruments import clocks, device

# Operator, name of the group, and how many of this kind the step has issued before.
CallKey = tuple[str, str, int]
# An idle timer ends its thread after this time.
_IDLE_S = 1.0


class StepDelays:
    """The delays of one step.

    Args:
        delays_ms: of each collective that is delayed, in ms; 0 for one that takes the same way undelayed.
        compute: a stream of the device whose steps are timed; None on the host.

    Attributes:
        applied: delays of this step so far: ms, or two marks on a device's stream around it.
        missed: collectives that could not be delayed.
    """

    def __init__(self, delays_ms: Mapping[CallKey, float], compute: device.Stream | None) -> None:
        self.applied: list[float | tuple[clocks.Mark, clocks.Mark]] = []
        self.missed = 0
        self._delays_ms = delays_ms
        self._compute, self._accelerator = compute, device.accelerator()
        self._issued = Counter[tuple[str, str]]()
        # Of the call that a thread issues: its delay, or what makes the stream of before current again.
        self._own = threading.local()
        self._works: list[_DelayedWork] = []

    def before(self, spec: OperatorSpec, call: Collective) -> bool:
        """Delay the call if it is one of those; whether ``after`` must follow."""
        place = self._issued[call.key]
        self._issued[call.key] = place + 1
        delay_ms = self._delays_ms.get((*call.key, place))
        if delay_ms is None:
            return False
        if not can_be_delayed(spec, call) or call.on_device is (self._compute is None):
            self.missed += 1
            return False
        if call.on_device:
            return self._on_device(call, delay_ms)
        if call.asynchronous:
            if _registry_size is None:  # of an older torch: a work could not be let go
                self.missed += 1
                return False
            self._own.delay_ms = delay_ms
            return True
        _sleep(delay_ms)
        self.applied.append(delay_ms)
        return False

    def _on_device(self, call: Collective, delay_ms: float) -> bool:
        assert self._compute is not None
        if self._accelerator.is_capturing():
            self.missed += 1
            return False
        issuing = self._accelerator.current_stream(self._compute.device)
        stream = device.sleeping_stream(self._compute.device) if call.asynchronous else issuing
        if stream is not issuing:
            stream.wait_stream(issuing)
        start = self._accelerator.mark(stream)
        device.sleep(stream, delay_ms)
        self.applied.append((start, self._accelerator.mark(stream)))
        if stream is issuing:
            return False
        self._own.guard = guard = device.on_stream(stream)
        try:
            guard.__enter__()
        except BaseException:
            self.undo()
            raise
        return True

    def after(self, call: Collective, result: Any) -> Any:
        """What the operator is to return in place of ``result``."""
        if call.on_device:
            self.undo()
            return result
        works = result if isinstance(result, tuple) else (result,)
        delay_ms = self._own.delay_ms
        try:
            work = _DelayedWork(dist.Work.unbox(works[-1]), delay_ms)
        except RuntimeError:  # it has no future
            self.missed += 1
            return result
        self._works.append(work)
        self.applied.append(delay_ms)
        return (*result[:-1], work.boxed()) if isinstance(result, tuple) else work.boxed()

    def undo(self) -> None:
        """Make the issuing stream current again on this thread; does nothing if it is."""
        guard = getattr(self._own, "guard", None)
        if guard is not None:
            self._own.guard = None
            guard.__exit__(None, None, None)

    def end(self) -> tuple[float | tuple[clocks.Mark, clocks.Mark], ...]:
        """End the step, and return ``applied``. Works are kept until they are complete and torch holds none."""
        _kept.extend(self._works)
        self._works = []
        release_works()
        return tuple(self.applied)


def ended(delays: StepDelays | None) -> tuple[float | tuple[clocks.Mark, clocks.Mark], ...]:
    """End the delays of a step, and return those applied."""
    return () if delays is None else delays.end()


def can_be_delayed(spec: OperatorSpec, call: Collective) -> bool:
    """Whether a collective starts when it is issued and can start later than that."""
    return bool(
        spec.returns_work
        and not (call.coalesced or spec.ends_block or call.point_to_point)
        and "barrier" not in call.operator
        and call.group.ranks
    )


class Delayable(NamedTuple):
    """A collective that can be delayed, its name in ``Exposure.names``, and its bytes."""

    call: DelayedCall
    name: str
    num_bytes: int


def delayable(calls: Sequence[Collective]) -> dict[DelayedCall, tuple[CallKey, Delayable]]:
    """The collectives of a step that can be delayed, as all ranks name them, with this rank's key of each."""
    specs = {spec.name: spec for spec in operator_specs()}
    keys, places = Counter[tuple[str, str]](), Counter[DelayedCall]()
    found = {}
    for call, name in zip(calls, names_of(calls), strict=True):
        key = (*call.key, keys[call.key])
        keys[call.key] += 1
        if call.group_size > 1 and call.operator in specs and can_be_delayed(specs[call.operator], call):
            known = call.dimension not in ("", UNKNOWN)
            # Not by the place of its kind: that differs between ranks.
            alike = DelayedCall(call.operator, call.dimension if known else call.group.name, 0, call.name)
            member = msgspec.structs.replace(alike, place=places[alike])
            places[alike] += 1
            found[member] = key, Delayable(member, name, max(call.bytes_in, call.bytes_out))
    return found


def _sleep(delay_ms: float) -> None:
    if delay_ms > 0:
        time.sleep(delay_ms / 1e3)


# -- on the host: a work that is complete later

# A work of Python's that only C++ holds loses its Python part, and could then not be waited for.
_kept: list[_DelayedWork] = []
_registry_size = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)


def release_works() -> None:
    """Let works go that are complete, once torch's registry of functional collectives holds none."""
    if _registry_size is not None and _registry_size() == 0:
        _kept[:] = [work for work in _kept if not work.is_completed()]


class _DelayedWork(dist.Work):
    """A work that is complete so long after another one. Its errors come at once. Raises RuntimeError without a future.

    A failed collective is not delayed; a wait with a timeout has that for the collective, not for the delay.
    """

    def __init__(self, work: dist.Work, delay_ms: float) -> None:
        super().__init__()
        future, over = work.get_future(), torch.futures.Future[None]()
        self._work, self._future = work, over.then(lambda _: future.value())

        def complete() -> None:
            over.set_result(None)

        def begin_delay(done: Any) -> None:
            try:
                done.value()
            except BaseException:
                complete()
                return
            if delay_ms > 0:
                _timer.call(time.monotonic() + delay_ms / 1e3, complete)
            else:
                complete()

        future.add_done_callback(begin_delay)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        waited = self._work.wait() if not timeout else self._work.wait(timeout)
        self._future.wait()
        return waited

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def is_success(self) -> bool:
        return self.is_completed() and self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def synchronize(self) -> None:
        self.wait()


class _Timer:
    """Calls functions at their times, on a thread that ends when there was nothing to do for a while."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._runs = False

    def call(self, at_s: float, function: Callable[[], None]) -> None:
        """Call ``function`` at ``at_s`` of ``time.monotonic``."""
        with self._changed:
            heapq.heappush(self._due, (at_s, next(self._numbers), function))
            self._changed.notify()
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, name="overlap-callbacks-delays", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                left_s = self._due[0][0] - time.monotonic() if self._due else _IDLE_S
                if left_s > 0:
                    self._changed.wait(left_s)
                if not self._due:
                    self._runs = False
                    return
                if self._due[0][0] > time.monotonic():
                    continue
                _, _, function = heapq.heappop(self._due)
            with contextlib.suppress(RuntimeError):
                function()


_timer = _Timer()
