"""The collective gate: one place in which to see, and to serialise, every collective of the process.

All of torch's collectives pass through the dispatcher operators ``c10d::*``. The gate registers a Python kernel for
each of them at the ``BackendSelect`` key, does its work, and redispatches below. (The Autograd keys would miss
functional collectives, DTensor and inference mode.)

The rules that keep it safe:

- it adds waits and nothing else: it never issues, drops, reorders or resizes a collective;
- it never raises. An exception inside DDP's reducer would break the reducer for good, so an error of its own is
  counted, and its owner switches it off at the next step boundary;
- sends and receives are recorded, never waited for where they are issued: waiting there hangs real pipeline schedules,
  and Gloo's p2p works cannot be waited for twice. An adapter that knows where its framework posts a whole batch of them
  has it waited for with ``post``;
- only collectives of the training thread and of autograd's threads are serialised. The place of any other thread's
  collectives in the order differs from rank to rank, and serialising them could deadlock;
- members of a coalescing block are not waited for: they have not started yet;
- only a sequence of collectives that passed the order check is serialised. Where a step departs from it, the gate lets
  the rest of the step through as it is, and says so;
- while a CUDA graph is captured it only redispatches.

Registering and removing kernels while another thread issues a collective can crash the process. So kernels are
registered once, and stay as a pass-through until ``close``; where another thread was seen to issue collectives, they
stay for the life of the process, and the next gate takes them over.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import Collective, Group, OperatorSpec, operator_specs
from overlap_callbacks.gate.step_log import Divergence, ExpectedSequence, StepLog
from overlap_callbacks.instruments import clocks

logger = logging.getLogger("overlap_callbacks")

T = TypeVar("T")


# What the gate keeps of a call while the step runs: a list, because it is made for every collective and a class would
# take longer. Its items are a Collective's fields, with the operator's spec for its name.
_Row = list[Any]
_START, _END = 11, 12

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_dispatch_mode = torch._C._get_dispatch_mode
_unbox_group = dist.ProcessGroup.unbox
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Kernels:
    """The kernels in the dispatcher: process-wide, because the dispatcher is.

    ``active`` is the gate at work in this step, or None: then a collective costs one attribute look-up on top of
    torch's boxing into Python.
    """

    def __init__(self) -> None:
        self.active: Gate | None = None
        self.calls = 0  # so far, of the training thread and of autograd's; these may lose one to each other
        self.owner: Gate | None = None
        self.keep = False  # another thread was seen to issue collectives: removing them could crash it
        self._home = 0  # the thread that registered them
        self._autograd: set[int] = set()
        self._library: torch.library.Library | None = None
        self._removed: list[Any] = []

    @property
    def registered(self) -> bool:
        return self._library is not None

    def register(self) -> None:
        if self._library is None:
            library = torch.library.Library("c10d", "IMPL")
            for spec in operator_specs():
                library.impl(spec.name, self._kernel(spec), "BackendSelect", with_keyset=True)
            self._library = library
            self._home = get_ident()
            self._autograd.clear()

    def remove(self) -> None:
        if self._library is None or self.keep:
            return
        # A thread may be about to enter a kernel that it looked up before: they live until the next ones are removed.
        if hasattr(torch.library, "get_kernel"):  # torch 2.9
            names = [spec.name for spec in operator_specs()]
            self._removed = [torch.library.get_kernel(f"c10d::{name}", "BackendSelect") for name in names]
        self._library._destroy()
        self._library = None

    def meet(self, thread: int) -> None:
        """Take note of a thread, other than the one that registered the kernels, that issues a collective."""
        try:
            if is_autograd_thread(thread):
                self._autograd.add(thread)
                self.calls += 1
                return
        except Exception:
            logger.debug("a thread could not be told", exc_info=True)
        self.keep = True

    def _kernel(self, spec: OperatorSpec) -> Callable[..., Any]:
        redispatch, below, kernels, autograd = spec.redispatch, _BELOW, self, self._autograd

        def kernel(keyset: Any, *args: Any) -> Any:
            gate = kernels.active
            if gate is None:
                thread = get_ident()
                if thread == kernels._home or thread in autograd:
                    kernels.calls += 1
                else:
                    kernels.meet(thread)
                return redispatch(keyset & below, *args)
            row = gate._before(spec, args)
            result = redispatch(keyset & below, *args)
            if row is not None:
                gate._after(row, result)
            return result

        _leave_out_of_dynamo(kernel)
        return kernel


def _leave_out_of_dynamo(kernel: Callable[..., Any]) -> None:
    """Have ``torch.compile`` run the kernel as it is: it would trace into it, where a compiled forward communicates."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.8
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(kernel.__code__, frames._FrameExecStrategy(skip, skip))


_kernels = _Kernels()


class Gate:
    """Records and serialises the collectives of a step.

    Use: ``register()`` once, between steps on the main thread; around each step ``begin_step`` and ``end_step``;
    ``close()`` at the end.

    Args:
        capacity: collectives of one step for which storage is held ready.
        patience_s: longest time that a serialised collective is waited for on the host. After that nothing is
            serialised any more, and ``stuck`` is the collective.

    Raises:
        RuntimeError: (from ``register``) another gate of this process is in use.
    """

    def __init__(self, capacity: int = 20_000, patience_s: float = 10.0) -> None:
        self.errors = 0
        self.stuck: Collective | None = None
        self.patience_s = patience_s
        self._patience = datetime.timedelta(seconds=patience_s)
        self.last_error: Exception | None = None
        self._storage: list[_Row | None] = [None] * capacity
        self._groups: dict[dist.ProcessGroup, Group] = {}
        self.dimensions: dict[str, str] = {}  # of groups that were named by hand, by the group's name
        self._python_threads: set[int] = set()
        self._step_thread = 0
        self._serialise = False
        self._compute_stream: torch.cuda.Stream | None = None
        self._expected = ExpectedSequence()
        self._watching = False
        self._works: list[dist.Work | None] = []  # one for each collective that has returned; None if complete
        self._reset_step()

    def _reset_step(self) -> None:
        self._slots = itertools.count()  # next() is atomic under the GIL, so threads never share a slot
        self._own = 0
        self._divergence: Divergence | None = None
        self._unseen = False  # collectives of the step were let through unseen
        self._block: list[Any] | None = None  # the coalescing block seen last; held, so that no other takes its place
        self._blocks = 0
        self._batches = 0
        self._posting = 0  # number of the batch of sends and receives that is being posted
        self._posted: list[_Row] = []  # its members so far

    # -- life

    def register(self) -> None:
        """Put the kernels into the dispatcher, as a pass-through."""
        if _kernels.owner not in (None, self):
            raise RuntimeError("another OverlapMonitor of this process uses the collective gate: close() it first")
        _kernels.owner = self
        _kernels.register()

    @property
    def registered(self) -> bool:
        """Whether this gate's kernels are in the dispatcher."""
        return _kernels.owner is self and _kernels.registered

    @property
    def taken(self) -> bool:
        """Whether another gate of this process has the kernels."""
        return _kernels.owner not in (None, self)

    @property
    def calls(self) -> int:
        """Collectives of the training thread and of autograd's that passed the kernels so far, recorded or not."""
        return _kernels.calls

    @property
    def serialising(self) -> bool:
        """Whether the open step is sequential."""
        return self._serialise

    def remove(self) -> None:
        """Take the kernels out of the dispatcher, unless another thread may be inside them."""
        self.stop()
        if _kernels.owner is self:
            _kernels.remove()

    def close(self) -> None:
        """Remove the kernels and forget everything. Safe to call twice."""
        self.remove()
        if _kernels.owner is self:
            _kernels.owner = None
        self._groups.clear()
        self._works.clear()
        self._storage = []
        self._compute_stream = None

    def stop(self) -> None:
        """Let collectives pass from here on. Safe to call at any time, from any thread."""
        if _kernels.active is self:
            _kernels.active = None
        self._serialise = False

    def suspend(self) -> None:
        """Let collectives pass that are no part of the step (an evaluation's, say)."""
        if _kernels.active is self:
            _kernels.active = None
        self._unseen = True

    def resume(self) -> None:
        """Go on with the step where ``suspend`` left it."""
        if self.registered:
            _kernels.active = self

    # -- a step

    def begin_step(
        self,
        *,
        sequential: bool,
        expected: ExpectedSequence | None = None,
        compute_stream: torch.cuda.Stream | None = None,
        watch: bool = False,
    ) -> None:
        """Record the collectives of the step that begins, and serialise them if ``sequential``.

        Args:
            sequential: serialise.
            expected: what passed the order check; None where nothing may be serialised.
            compute_stream: the stream that is serialised with CUDA collectives.
            watch: hold on to the collectives' works until the step ends, to tell whether they are complete then. They
                keep their tensors alive as long, which is of no weight on the host.
        """
        self._reset_step()
        self._step_thread = get_ident()
        # Threads are looked up anew in each step, because the system reuses identifiers.
        self._python_threads.clear()
        self._expected = expected or ExpectedSequence()
        self._compute_stream = compute_stream
        self._serialise = sequential
        self._watching = watch
        _kernels.active = self

    def end_step(self) -> StepLog:
        """Stop, and return what was seen."""
        self.stop()
        used = next(self._slots)
        kept = min(used, len(self._storage))
        collectives = tuple(_collective(row) for row in self._storage[:kept] if row is not None)
        self._storage[:kept] = [None] * kept
        log = StepLog(collectives, used - kept, self._divergence, quiet=self._is_quiet(used, collectives))
        self._works.clear()
        self._groups.clear()  # keeps no process group alive between steps
        self._divergence = None
        self._block = None
        return log

    def _is_quiet(self, used: int, collectives: Sequence[Collective]) -> bool:
        if not self._watching or self._unseen or used != len(collectives) or used != len(self._works):
            return False
        return all(c.own_thread for c in collectives) and all(map(_is_complete, self._works))

    # -- sends and receives, where a framework posts a batch of them

    def post(self, issue: Callable[[], T], works_of: Callable[[T], Sequence[Any]]) -> tuple[T, list[Any]]:
        """Issue a batch of sends and receives; in a sequential step wait for all of them once all are posted.

        Waiting within a single send or receive would hang pipelines, whose stages post theirs in turn. An adapter calls
        this at the place where its framework posts a batch, and hands on the works that it gets back: those of Gloo
        cannot be waited for twice. Only for schedules in which waiting at these places comes to an end.

        Args:
            issue: posts the batch; what it raises passes through.
            works_of: the works in what ``issue`` returns.

        Returns:
            What ``issue`` returned, and a work to hand on for each of its works: ``CompletedWork`` for those that were
            waited for, the others as they are.
        """
        stream = self._begin_batch()
        try:
            result = issue()
        finally:
            self._posting = 0
        works = list(works_of(result))
        return result, works if stream is False else self._end_batch(works, stream)

    def _begin_batch(self) -> Any:
        """The issuing stream, ordered after compute; None on the host, False where nothing is serialised."""
        try:
            self._batches += 1
            self._posting = self._batches
            self._posted = []
            if not self._serialise or _kernels.active is not self or self._divergence is not None:
                return False
            compute = self._compute_stream
            if compute is None:
                return None
            if torch.cuda.is_current_stream_capturing():
                return False
            issuing = torch.cuda.current_stream(compute.device)
            if issuing != compute:
                issuing.wait_stream(compute)
            return issuing
        except Exception as error:
            self._count(error)
            return False

    def _end_batch(self, works: list[Any], stream: Any) -> list[Any]:
        handed_on = list(works)
        try:
            if self._divergence is not None or not self._is_checked_batch():
                return handed_on  # the framework waits for them where it always does
            for number, work in enumerate(works):
                # Not with a patience of ours: where that ends, Gloo closes the connection, and the job with it. The
                # group's own timeout holds, as it would for the framework's wait.
                work.wait()
                handed_on[number] = CompletedWork()
            compute = self._compute_stream
            if stream is not None and compute is not None and stream != compute:
                compute.wait_stream(stream)
        except Exception as error:
            self._count(error)
        return handed_on

    def _is_checked_batch(self) -> bool:
        """Whether the batch just posted is the one that the order check saw: another might wait for ever."""
        number = self._batches - 1
        checked = self._expected.batches[number] if number < len(self._expected.batches) else None
        if checked == tuple((row[0].name, row[1].name, row[8]) for row in self._posted):
            return True
        if self._posted:
            self._divergence = Divergence(self._own - 1, ("another batch", ""), _collective(self._posted[-1]))
        return False

    # -- a collective: called from the kernels, on whichever thread issues it. Nothing may escape.

    def _before(self, spec: OperatorSpec, args: tuple[Any, ...]) -> _Row | None:
        """Record a call, and order what comes before it; the row if it is to be waited for."""
        try:
            issued_ns = perf_counter_ns()
            if _dispatch_mode(_FAKE) is not None:
                return None  # torch.compile traces with fake tensors: nothing is communicated
            process_group = _unbox_group(args[spec.group])
            group = self._groups.get(process_group)
            if group is None:
                group = self._groups[process_group] = Group.of(process_group, self.dimensions)
            bytes_in, bytes_out, tensor = spec.sizes(args)
            thread = get_ident()
            own_thread = thread == self._step_thread or self._is_autograd_thread(thread)
            if own_thread:
                _kernels.calls += 1
            block = c10d._world.pg_coalesce_state.get(process_group)
            coalesced = 0 if block is None else self._number_of_block(block)
            dtype = None if tensor is None else tensor.dtype
            peer = args[spec.peer] if spec.peer >= 0 else -1
            tag = args[spec.tag] if spec.tag >= 0 else 0
            row = [spec, group, bytes_in, bytes_out, dtype, thread, own_thread, coalesced, peer, tag, issued_ns]
            posting = self._posting if own_thread and spec.point_to_point else 0
            row += (None, None, posting)  # start, end, batch
            if posting:
                self._posted.append(row)
            slot = next(self._slots)
            if slot < len(self._storage):
                self._storage[slot] = row
            watched = row if self._watching else None
            if not own_thread:
                _kernels.keep = True
                return watched
            if not self._serialise:
                return watched
            if not self._keeps_to_checked(row) or spec.point_to_point or coalesced or not spec.returns_work:
                return watched
            if tensor is not None and tensor.is_cuda:
                return self._before_on_cuda(row, tensor)
            row[_START] = perf_counter_ns()
            return row
        except Exception as error:
            self._count(error)
            return None

    def _number_of_block(self, block: list[Any]) -> int:
        if block is not self._block:
            self._block = block
            self._blocks += 1
        return self._blocks

    def _before_on_cuda(self, row: _Row, tensor: torch.Tensor) -> _Row | None:
        compute = self._compute_stream
        if compute is None or compute.device != tensor.device or torch.cuda.is_current_stream_capturing():
            return None
        issuing = torch.cuda.current_stream(tensor.device)
        if issuing != compute:
            issuing.wait_stream(compute)  # all compute enqueued so far comes before the collective
        row[_START] = clocks.stream_mark(issuing)
        return row

    def _after(self, row: _Row, result: Any) -> None:
        """Order what comes after a call."""
        try:
            # NCCL gives no Work for async_op=False: the kernel is then on the issuing stream itself.
            work = None
            if row[0].returns_work:
                work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            if row[_START] is None:
                self._works.append(work)  # of a watched step
                return
            if isinstance(row[_START], int):
                if work is not None and not self._wait_on_host(work):
                    self._let_go(row)
                    return
                row[_END] = perf_counter_ns()
                self._works.append(None)
                return
            compute = self._compute_stream
            if compute is None:
                return
            issuing = torch.cuda.current_stream(compute.device)
            if work is not None and not row[0].host_blocking:
                work.wait()  # the issuing stream waits for the communicator's; the host goes on
            row[_END] = clocks.stream_mark(issuing)
            if issuing != compute:
                compute.wait_stream(issuing)  # compute enqueued from here on comes after the collective
        except Exception as error:
            self._count(error)

    def _wait_on_host(self, work: dist.Work) -> bool:
        """Wait for a collective, for a bounded time; False if it has not finished by then."""
        start_ns = perf_counter_ns()
        try:
            work.wait(self._patience)
        except RuntimeError:
            # Our patience is over, which leaves the work as it is; or the collective itself failed (a peer died), and
            # its owner's own wait raises the same error, in the place where the owner expects it.
            logger.debug("the gate waited for a collective in vain", exc_info=True)
            return perf_counter_ns() - start_ns < 1e9 * self._patience.total_seconds()
        return True

    def _let_go(self, row: _Row) -> None:
        """Serialise nothing any more: the ranks have come to wait for each other in a way that no check foresaw."""
        self._serialise = False
        self.stuck = _collective(row)

    def _is_autograd_thread(self, thread: int) -> bool:
        """Whether a thread other than the training thread is one of autograd's: native, and running a backward."""
        if thread in self._python_threads:
            return False
        if is_autograd_thread(thread):
            return True
        self._python_threads.add(thread)
        return False

    def _keeps_to_checked(self, row: _Row) -> bool:
        """Whether this collective of our threads may be serialised: it stands where the order check saw it."""
        index = self._own
        self._own = index + 1
        if self._divergence is not None:
            return False
        expected = self._expected.keys[index] if index < len(self._expected.keys) else None
        spec, group = row[0], row[1]
        if expected is not None and spec.name == expected[0] and group.name == expected[1]:
            return True
        if self._expected.single_group == group.name and not spec.point_to_point:
            return True
        self._divergence = Divergence(index=index, expected=expected, found=_collective(row))
        return False

    def _count(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = error


class CompletedWork:
    """Stands for a work that was waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _is_complete(work: dist.Work | None) -> bool:
    """Whether a collective is complete, as far as its issuer can tell; asks, never waits."""
    if work is None:
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:
        # Sends and receives of Gloo have no future, and are complete once their owner has waited for them. Its
        # reduce-scatters have none either, and never say that they are complete.
        return bool(work.is_completed())


def _collective(row: _Row) -> Collective:
    return Collective(row[0].name, *row[1:])


def is_autograd_thread(thread: int) -> bool:
    """Whether the calling thread, ``thread``, is one of autograd's: native, and running a backward."""
    return torch._C._current_graph_task_id() != -1 and not _is_python_thread(thread)


def _is_python_thread(thread: int) -> bool:
    # A native thread that once called threading.current_thread() is listed too, as a dummy.
    return any(t.ident == thread and not isinstance(t, threading._DummyThread) for t in threading.enumerate())
