"""The collective gate: one place in which to see, and to serialise, every collective of the training thread.

The kernels of ``dispatcher.py`` call it before and after each collective of a measured step. What keeps it safe:

- it adds waits and nothing else: it never issues, drops, reorders or resizes a collective;
- it never raises: an exception would break DDP's reducer for good. An error of its own is kept, and its owner switches
  the gate off at the next step boundary. What a user's signal handler raises is raised at the step's end;
- sends and receives are never waited for where they are issued: that hangs real pipeline schedules, and Gloo's p2p
  works cannot be waited for twice. An adapter that knows where its framework posts a batch of them uses ``post``;
- only collectives of the training thread and of autograd's threads are serialised (``dispatcher.py``);
- members of a coalescing block are not waited for: they have not started yet (``process_groups.py``);
- only a sequence that passed the order check is serialised. Where a step departs from it, the rest passes as it is;
- while a CUDA graph is captured the gate only redispatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overlap_callbacks.gate.collectives import Collective, Group, OperatorSpec
from overlap_callbacks.gate.dispatcher import dispatcher
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
from overlap_callbacks.instruments import device

T = TypeVar("T")

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_dispatch_mode = torch._C._get_dispatch_mode
unbox_group = dist.ProcessGroup.unbox


class Gate:
    """Records and serialises the collectives of a step.

    ``register()`` before the first step, on the main thread; ``begin_step`` and ``end_step`` on the training thread.

    Args:
        capacity: collectives of one step for which storage is kept.
        patience_s: longest time that the host waits for a serialised collective, which then is ``stuck``.

    Attributes:
        stuck: the serialised collective that did not finish in time; None if there is none.
        last_error: an error of the gate's own; None if there was none.
        dimensions: dimension of parallelism of groups that were named by hand, by the group's name.
        side_streams: streams that compute and never issue a collective, named by an adapter.
        micro_batches: of the open step so far; 0 if no adapter counts them.
        nested: whether operators of the job (on DTensors, say) issue collectives; the first window finds out.
    """

    def __init__(self, capacity: int = 20_000, patience_s: float = 10.0) -> None:
        self.stuck: Collective | None = None
        self.last_error: Exception | None = None
        self.patience_s = patience_s
        self.dimensions: dict[str, str] = {}
        self.side_streams: list[device.Stream] = []
        self.nested = False
        self._recorder = StepRecorder(capacity)
        self._groups: dict[dist.ProcessGroup, Group] = {}
        self._on_host = HostSerialiser(patience_s)
        self._on_stream: StreamSerialiser | None = None
        self._works: list[dist.Work | None] = []  # one for each collective that has returned; None if complete
        self._numbers: SequenceNumbers | None = None
        self._step_thread = 0  # the thread that began the open step
        self._serialise = self._watching = self._suspended = False
        self._reset_step(ExpectedSequence())

    def _reset_step(self, expected: ExpectedSequence) -> None:
        self._tracker = SequenceTracker(expected)
        self.micro_batches, self._unseen = 0, False  # whether collectives of the step were let through unseen
        self._not_serialised, self._not_serialised_bytes = Counter[NotSerialised](), 0
        self._unsupported_device, self._captured = "", False
        self._compilations, self._blocks = dispatcher.num_compilations, CoalescingBlocks()
        self._batches = self._posting = 0  # batches of sends and receives so far; the open one
        self._posted: list[Collective] = []  # its members so far
        self._batch_passes = False  # one of them cannot be waited for

    # -- life

    def register(self) -> None:
        """Register the kernels, for this gate alone. Until a step begins they let every collective pass."""
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
        """Whether the open step, if it is recorded, has issued a collective."""
        return self._recorder.any_seen

    def close(self) -> None:
        """Release the kernels for other gates, and forget everything. Safe to call twice."""
        self.stop()
        dispatcher.release(self)
        self._groups.clear()
        self._works.clear()
        self._recorder = StepRecorder(0)
        self._on_stream = self._numbers = None

    def stop(self) -> None:
        """Let collectives pass from here on. Safe to call at any time, from any thread."""
        self._serialise = False
        self._suspended = False
        dispatcher.switch_off(self)

    def suspend(self) -> None:
        """Let collectives pass that are no part of the step (an evaluation's, say)."""
        self._unseen = True
        if dispatcher.is_on(self):
            self._suspended = True
            dispatcher.switch_off(self)

    def resume(self) -> None:
        """Go on with the step where ``suspend`` left it; does nothing on another thread than the step's."""
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
    ) -> None:
        """Record the collectives of the step that begins, and serialise them if ``sequential``.

        Args:
            sequential: serialise.
            expected: what passed the order check; None if nothing may be serialised.
            compute_stream: the stream that is serialised with collectives of the device.
            watch: keep the collectives' works until the step ends, to know whether they are complete then.

        Raises:
            RuntimeError: the step begins within a backward pass or in inference mode.
        """
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled():
            where = "in inference mode" if torch.is_inference_mode_enabled() else "within a backward pass"
            raise RuntimeError(f"a step began {where}, where it cannot be measured: begin steps outside")
        dispatcher.install()  # torch.compile may have come into use since the step before
        self._reset_step(expected or ExpectedSequence())
        self._accelerator = device.accelerator()
        self._on_stream = None if compute_stream is None else StreamSerialiser(compute_stream, self.side_streams)
        self._watching, self._suspended = watch, False
        self._step_thread = get_ident()
        self._numbers = SequenceNumbers()
        self._serialise = sequential
        dispatcher.switch_on(self)

    def end_step(self) -> StepLog:
        """Stop, and return what was seen."""
        self.stop()
        collectives, dropped = self._recorder.drain()
        compiled = dispatcher.num_compilations != self._compilations
        foreign, quiet = tuple[str, ...](), False
        # What passed unseen is not somebody else's.
        if self._numbers is not None and not (self._unseen or dropped or compiled):
            foreign = self._numbers.foreign_groups(collectives, self.dimensions)
            self.nested = self.nested or bool(foreign)  # from the next window on
            is_quiet = self._watching and self._numbers.complete and not foreign
            quiet = is_quiet and len(self._works) == len(collectives) and all(map(is_complete, self._works))
        passed = self._not_serialised, self._unsupported_device, self._not_serialised_bytes, self._captured
        # Another thread may be further on one rank than on another, at the same step.
        counts = {} if self._numbers is None else self._numbers.before(self.dimensions, without=foreign)
        rest = counts, None if self._numbers is None else self._numbers.issued, self.micro_batches
        log = StepLog(collectives, dropped, self._tracker.divergence, quiet, foreign, compiled, *passed, *rest)
        self._works.clear()
        self._groups.clear()  # keeps no process group alive between steps
        self._numbers = None
        self._reset_step(ExpectedSequence())
        return log

    # -- sends and receives, where a framework posts a batch of them

    def post(self, issue: Callable[[], T], works_of: Callable[[T], Sequence[Any]]) -> tuple[T, list[Any]]:
        """Issue a batch of sends and receives; in a sequential step wait for all of them once all are posted.

        For an adapter, in schedules in which waiting there comes to an end. ``issue`` posts the batch, and what it
        raises passes through; ``works_of`` gives the works in what it returns. Returns what ``issue`` returned, and the
        works to pass on, ``CompletedWork`` for each that was waited for: those of Gloo cannot be waited for twice.
        """
        order_after = self._begin_batch()
        try:
            result = issue()
        finally:
            self._posting = 0
        works = list(works_of(result))
        return result, works if order_after is None else self._end_batch(works, order_after)

    def _begin_batch(self) -> Callable[[], None] | None:
        """Order what came before the batch. Returns what orders the rest; None where nothing is serialised."""
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
                return handed_on  # the framework waits for them where it always does
            for number, work in enumerate(works):
                # Not with a patience of ours: where that ends, Gloo closes the connection, and the job with it. The
                # group's own timeout holds, as it would for the framework's wait.
                work.wait()
                handed_on[number] = CompletedWork()
            order_after()
        except Exception as error:
            self.last_error = dispatcher.interrupts.own(error) or self.last_error
        return handed_on

    # -- a collective: called from the kernels, on whichever thread issues it. Nothing may escape.

    def before_call(self, spec: OperatorSpec, args: tuple[Any, ...]) -> Collective | None:
        """Record a call, and order what comes before it. Returns the call if ``after_call`` is wanted for it."""
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
            if on_device and self._accelerator.is_capturing():
                self._captured = True
            blocks = self._blocks
            call = Collective(
                spec.name,
                group,
                bytes_in,
                bytes_out,
                None if tensor is None else tensor.dtype,
                blocks.number_of(process_group) if blocks.open else 0,
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
            if call.posted:
                self._posted.append(call)
            self._recorder.append(call)
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
        """What serialises the call, or why nothing does."""
        if not call.group.ranks:
            return NotSerialised.UNKNOWN_GROUP
        if spec.point_to_point and not call.posted:
            return NotSerialised.SINGLE_MESSAGE
        if not call.posted and (call.coalesced or self._blocks.hold_back(spec)):
            return NotSerialised.COALESCING_BLOCK
        serialiser: Serialiser | None = self._on_stream if call.on_device else self._on_host
        return NotSerialised.OTHER_DEVICE if serialiser is None else serialiser.obstacle(tensor) or serialiser

    def after_call(self, spec: OperatorSpec, call: Collective, result: Any) -> None:
        try:
            # NCCL gives no Work for async_op=False: the kernel is then on the issuing stream itself.
            work = None
            if spec.returns_work:
                work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            serialiser, call.serialiser = call.serialiser, None  # the log keeps no stream alive
            if serialiser is None:
                self._works.append(work)  # of a watched step
            elif not serialiser.after(call, work):
                # It timed out: the ranks wait for each other in a way that no check foresaw.
                self._serialise, self.stuck = False, call
            elif serialiser.completes and self._watching:
                self._works.append(None)
        except Exception as error:
            self.last_error = dispatcher.interrupts.own(error) or self.last_error


def _unsupported_device(tensor: torch.Tensor | None) -> str:
    """The type of the tensor's device, if it is none on which anything can be timed; else empty."""
    return "" if tensor is None or tensor.is_cpu or device.is_timed(tensor.device) else tensor.device.type
