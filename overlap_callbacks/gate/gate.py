"""The collective gate: observes, and serialises, every collective of the training thread.

The kernels of ``dispatcher.py`` call it before and after each collective of a measured step. It is safe because

- it only adds waits, and in causal windows delays: it never issues, drops, reorders or resizes a collective;
- it never raises: an exception would break DDP's reducer for good. An error of its own is kept, and its owner switches
  the gate off at the next step boundary. Exceptions of the user's signal handlers are raised at the step's end;
- it never waits for sends and receives where they are issued: that hangs real pipeline schedules, and Gloo's p2p works
  cannot be waited for twice. An adapter that knows where its framework posts a batch of them uses ``post``;
- it serialises only collectives of the training thread and of autograd's threads (``dispatcher.py``);
- it does not wait for members of a coalescing block: they have not started yet (``process_groups.py``);
- it serialises only a sequence that passed the order check. If a step deviates from it, the rest passes through;
- while a CUDA graph is captured, it only redispatches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overlap_callbacks.gate.collectives import Collective, Group, OperatorSpec
from overlap_callbacks.gate.delays import CallKey, StepDelays, ended
from overlap_callbacks.gate.dispatcher import dispatcher
from overlap_callbacks.gate.names import StepNames, let_go, made
from overlap_callbacks.gate.patience import StreamPatience
from overlap_callbacks.gate.process_groups import CoalescingBlocks, SequenceNumbers
from overlap_callbacks.gate.serialiser import (
    IN_CHECKED_ORDER,
    CompletedWork,
    HostSerialiser,
    NotSerialised,
    Serialiser,
    StreamSerialiser,
    is_complete,
)
from overlap_callbacks.gate.step_log import ExpectedSequence, SequenceTracker, StepLog, StepRecorder
from overlap_callbacks.gate.switches import RefusedError
from overlap_callbacks.instruments import device

T = TypeVar("T")

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_dispatch_mode = torch._C._get_dispatch_mode
unbox_group = dist.ProcessGroup.unbox


class Gate:
    """Records and serialises the collectives of a step.

    ``register()`` before the first step, on the main thread; ``begin_step`` and ``end_step`` on the training thread.

    Args:
        capacity: maximum number of collectives recorded per step.
        patience_s: longest wait of the host for a collective, which is then ``stuck``; for streams see ``patience.py``.

    Attributes:
        stuck: the serialised collective that did not finish in time, or a batch; None if there is none.
        last_error: an error of the gate's own; None if there was none.
        dimensions: dimension of parallelism of groups named by the user or adapter, by group name.
        side_streams: streams that compute and never issue a collective, as adapters name them.
        micro_batches: of the open step so far; 0 if no adapter counts them.
        nested: whether operators of the job (on DTensors, say) issue collectives; the first window finds out.
        names: makes what names the collectives of a step, if an adapter knows how.
    """

    def __init__(self, capacity: int = 20_000, patience_s: float = 10.0) -> None:
        self.stuck: Collective | str | None = None
        self.last_error: Exception | None = None
        self.patience_s = patience_s
        self.dimensions: dict[str, str] = {}
        self.side_streams: list[Iterable[device.Stream]] = []
        self.nested = False
        self.names: Callable[[], StepNames] | None = None
        self._recorder = StepRecorder(capacity)
        self._groups: dict[dist.ProcessGroup, Group] = {}
        self._on_host, self._streams = HostSerialiser(patience_s), StreamPatience(patience_s)
        self._on_stream: StreamSerialiser | None = None
        self._works: list[dist.Work | None] = []  # one per returned collective; None if complete
        self._numbers: SequenceNumbers | None = None
        self._step_thread = 0  # the thread that began the open step
        self._serialise = self._watching = self._suspended = False
        self._reset_step(ExpectedSequence())

    def _reset_step(self, expected: ExpectedSequence) -> None:
        self._tracker = SequenceTracker(expected)
        self.micro_batches, self._unseen = 0, False  # whether collectives of the step passed unrecorded
        self._not_serialised, self._not_serialised_bytes = Counter[NotSerialised](), 0
        self._unsupported_device, self._captured, self._batch_passes = "", False, False
        self._compilations, self._blocks = dispatcher.num_compilations, CoalescingBlocks()
        self._batches = self._posting = 0  # number of batches of sends and receives so far; the open one
        self.delays: StepDelays | None = None
        self._posted: list[Collective] = []  # members of the open batch so far
        self._names: StepNames | None = None

    # -- life

    def register(self) -> None:
        """Register the kernels for this gate alone. Until a step begins they pass every collective through."""
        dispatcher.acquire(self)
        dispatcher.install(nested=self.nested)

    @property
    def taken(self) -> bool:
        """Whether another gate of this process has the kernels."""
        return not dispatcher.is_free_for(self)

    @property
    def serialising(self) -> bool:
        return self._serialise

    def any_seen(self) -> bool:
        """Whether the open step, if recorded, has issued a collective."""
        return self._recorder.any_seen

    def close(self) -> None:
        """Release the kernels for other gates, and clear all state. Safe to call twice."""
        self.stop()
        dispatcher.release(self)
        self._groups.clear()
        self._works.clear()
        self._recorder = StepRecorder(0)
        self._on_stream = self._numbers = None
        self._streams.close()

    def stop(self) -> None:
        """Pass collectives through from now on. Safe to call at any time, from any thread."""
        self._serialise = self._suspended = False
        dispatcher.switch_off(self)
        let_go(self._names)

    def suspend(self) -> None:
        """Ignore collectives that are not part of the step (an evaluation's, for example)."""
        self._unseen = True
        if dispatcher.is_on(self):
            self._suspended = True
            dispatcher.switch_off(self)

    def resume(self) -> None:
        """Continue the step after ``suspend``; does nothing on a thread other than the step's."""
        if self._suspended and get_ident() == self._step_thread:
            self._suspended = False
            dispatcher.switch_on(self)

    # -- a step

    def begin_step(
        self,
        *,
        sequential: bool,
        expected: ExpectedSequence | None = None,
        compute_stream: device.Stream | None = None,
        watch: bool = False,
        named: bool = False,
        delays_ms: Mapping[CallKey, float] | None = None,
    ) -> None:
        """Start recording the collectives of a step, serialising them if ``sequential``.

        Args:
            sequential: serialise.
            expected: what passed the order check; None if nothing may be serialised.
            compute_stream: the stream to serialise with the device's collectives.
            watch: keep the collectives' works until the step ends, to check whether they are complete.
            named: name the collectives, which takes longer.
            delays_ms: of collectives to delay, in a step that is not sequential; None for none.

        Raises:
            RefusedError: the step begins within a backward pass or in inference mode.
        """
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled():
            where = "in inference mode" if torch.is_inference_mode_enabled() else "within a backward pass"
            raise RefusedError(f"a step began {where}, where it cannot be measured: begin steps outside [OC126]")
        dispatcher.install()  # torch.compile may have come into use since the last step
        self._reset_step(expected := expected or ExpectedSequence())
        others = itertools.chain.from_iterable(self.side_streams)
        valve = self._streams.open(compute_stream, self._released) if sequential and expected.can_deadlock else None
        self._on_stream = None if compute_stream is None else StreamSerialiser(compute_stream, others, valve)
        self._watching, self._suspended, self._step_thread, self._numbers = watch, False, get_ident(), SequenceNumbers()
        self._names = made(self.names, compiled=dispatcher.has_compiled) if named else None
        self._serialise, self._accelerator = sequential and self.stuck is None, device.accelerator()
        self._streams.step_begins()
        self.delays = None if delays_ms is None else StepDelays(delays_ms, compute_stream)
        dispatcher.switch_on(self)

    def _released(self, call: Any, patience_s: float) -> None:
        self._serialise, self.stuck, self.patience_s = False, call, patience_s

    def end_step(self) -> StepLog:
        """Stop, and return the log of the step."""
        self.stop()
        self._streams.step_ends()
        collectives, dropped = self._recorder.drain()
        compiled = dispatcher.num_compilations != self._compilations
        foreign, quiet = tuple[str, ...](), False
        # Collectives that passed unrecorded are not foreign.
        if self._numbers is not None and not (self._unseen or dropped or compiled):
            foreign = self._numbers.foreign_groups(collectives, self.dimensions)
            self.nested = self.nested or bool(foreign)  # takes effect in the next window
            is_quiet = self._watching and self._numbers.complete and not foreign
            quiet = is_quiet and len(self._works) == len(collectives) and all(map(is_complete, self._works))
        passed = self._not_serialised, self._unsupported_device, self._not_serialised_bytes, self._captured
        # Another thread may have progressed further on one rank than on another at the same step.
        counts = {} if self._numbers is None else self._numbers.before(self.dimensions, without=foreign)
        rest = counts, None if self._numbers is None else self._numbers.issued, self.micro_batches, ended(self.delays)
        log = StepLog(collectives, dropped, self._tracker.divergence, quiet, foreign, compiled, *passed, *rest)
        self._works.clear()
        self._groups.clear()  # keep no process group alive between steps
        self._numbers = None
        self._reset_step(ExpectedSequence())
        return log

    # -- sends and receives, where a framework posts a batch of them

    def post(self, issue: Callable[[], T], works_of: Callable[[T], Sequence[Any]]) -> tuple[T, list[Any]]:
        """Issue a batch of sends and receives; in a sequential step, wait for all once all are posted.

        For adapters whose schedules cannot hang at that wait. ``issue`` posts the batch, and its exceptions pass
        through; ``works_of`` extracts the works from its result. Returns that result, and the works to pass on, with a
        ``CompletedWork`` for each that was waited for: Gloo's cannot be waited for twice.
        """
        order_after = self._begin_batch()
        try:
            result = issue()
        finally:
            self._posting = 0
        works = list(works_of(result))
        return result, works if order_after is None else self._end_batch(works, order_after)

    def _begin_batch(self) -> Callable[[], None] | None:
        """Order what came before the batch. Returns a function that orders the rest; None if nothing is serialised."""
        try:
            self._posting = self._batches = self._batches + 1
            self._posted, self._batch_passes = [], False
            if not self._serialise or not dispatcher.is_on(self) or self._tracker.divergence is not None:
                return None
            serialiser = self._on_stream or self._on_host
            return serialiser.before_batch() if serialiser.obstacle(None) is None else None
        except Exception as error:
            self.last_error = dispatcher.interrupts.own(error) or self.last_error
            return None

    def _end_batch(self, works: list[Any], order_after: Callable[[], None]) -> list[Any]:
        handed_on = list(works)
        try:
            if self._batch_passes or not self._tracker.admits_batch(self._batches - 1, self._posted):
                return handed_on  # the framework waits for them as usual
            for number, work in enumerate(works):
                # Without a timeout of the gate's: when it expires, Gloo closes the connection, which ends the job. The
                # group's own timeout applies, as it would to the framework's wait.
                work.wait()
                handed_on[number] = CompletedWork()
            order_after()
        except Exception as error:
            self.last_error = dispatcher.interrupts.own(error) or self.last_error
        return handed_on

    # -- a collective: called by the kernels, on the thread that issues it. No exception may escape.

    def before_call(self, spec: OperatorSpec, args: tuple[Any, ...]) -> Collective | None:
        """Record a call, and order what comes before it. Returns the call if ``after_call`` must follow."""
        try:
            issued_ns = perf_counter_ns()
            if _dispatch_mode(_FAKE) is not None:
                return None  # torch.compile traces with fake tensors: nothing is communicated
            process_group = unbox_group(args[spec.group])
            group = self._groups.get(process_group)
            if group is None:
                group = self._groups[process_group] = Group.of(process_group, self.dimensions)
                self._unsupported_device = self._unsupported_device or _unsupported_device(spec.sizes(args)[2])
            bytes_in, bytes_out, tensor = spec.sizes(args)
            on_device = tensor is not None and not tensor.is_cpu
            self._captured = self._captured or (on_device and self._accelerator.is_capturing())
            call = Collective(
                spec.name,
                group,
                bytes_in,
                bytes_out,
                None if tensor is None else tensor.dtype,
                self._blocks.number_of(process_group) if self._blocks.open else 0,
                args[spec.peer] if spec.peer >= 0 else -1,
                args[spec.tag] if spec.tag >= 0 else 0,
                issued_ns,
                None,
                None,
                self._posting if spec.point_to_point else 0,
                args[spec.async_op] if len(args) > spec.async_op else spec.asynchronous,
                on_device,
                spec.splits(args) if spec.splits else None,
            )
            if self._names is not None:
                call.name = self._names.of(call, tensor)
            if call.posted:
                self._posted.append(call)
            self._recorder.append(call)
            if self.delays is not None:
                return call if self.delays.before(spec, call) else None
            watched = call if self._watching else None
            if not self._serialise or not self._tracker.admits(call) or not spec.returns_work:
                return watched
            serialiser = self._serialiser_of(spec, call, tensor)
            if isinstance(serialiser, NotSerialised):
                self._not_serialised[serialiser] += 1
                self._not_serialised_bytes += max(bytes_in, bytes_out)
                self._batch_passes = True
                if serialiser in IN_CHECKED_ORDER and self._on_stream is not None:
                    self._on_stream.skip(tensor)
                return watched
            if call.posted:
                return watched  # ``post`` waits for the whole batch
            serialiser.before(call)
            call.serialiser = serialiser
            return call
        except Exception as error:
            self.last_error = dispatcher.interrupts.own(error) or self.last_error
            return None

    def _serialiser_of(
        self, spec: OperatorSpec, call: Collective, tensor: torch.Tensor | None
    ) -> Serialiser | NotSerialised:
        """The call's serialiser, or why there is none."""
        if not call.group.ranks:
            return NotSerialised.UNKNOWN_GROUP
        if spec.point_to_point and not call.posted:
            return NotSerialised.SINGLE_MESSAGE
        if not call.posted and (call.coalesced or self._blocks.is_held_back(spec)):
            return NotSerialised.COALESCING_BLOCK
        serialiser: Serialiser | None = self._on_stream if call.on_device else self._on_host
        return NotSerialised.OTHER_DEVICE if serialiser is None else serialiser.obstacle(tensor) or serialiser

    def after_call(self, spec: OperatorSpec, call: Collective, result: Any) -> Any:
        try:
            if self.delays is not None:
                return self.delays.after(call, result)
            # NCCL returns no Work for async_op=False: its kernel then runs on the issuing stream itself.
            returned = result[-1] if isinstance(result, tuple) else result
            work = dist.Work.unbox(returned) if spec.returns_work else None
            serialiser, call.serialiser = call.serialiser, None  # keep no stream alive in the log
            if serialiser is None:
                self._works.append(work)  # the step is watched
            elif not serialiser.after(call, work):
                # Timed out: the ranks wait for each other in a way that the order check did not foresee.
                self._serialise, self.stuck = False, call
            elif serialiser.completes and self._watching:
                self._works.append(None)
        except Exception as error:
            self.last_error = dispatcher.interrupts.own(error) or self.last_error
        return result


def _unsupported_device(tensor: torch.Tensor | None) -> str:
    """The tensor's device type if it cannot be timed; else empty."""
    return "" if tensor is None or tensor.is_cpu or device.is_timed(tensor.device) else tensor.device.type
