"""The gate's kernels in torch's dispatcher, and the threads that they observe.

All of torch's collectives go through the dispatcher operators ``c10d::*``, and the gate has a Python kernel for each.
They are registered once per process and never removed: removing a kernel that another thread is about to enter can
crash the process. (Kernels at the Autograd keys would miss functional collectives, DTensor and inference mode.)

**Which key.** A dispatch key that no tensor has (``TESTING_ONLY_GenericMode``). Dispatch considers it only on a thread
that includes it, as the measured thread does within the steps of a window. So between windows the gate costs nothing:
with torch 2.13 on a CPU and the backend ``fake`` an all-reduce takes 5.12 us without the kernels, 5.10 us with the key
off, and 21.2 us while the gate records it (``benchmarks/results/overhead-cpu.json``).

**Which threads.** The measured thread, and autograd's threads while they work for it: the engine passes them the state
of the thread that called ``backward``. The user's Python threads are neither observed nor serialised: their place in
the order differs by rank, which could deadlock.

**DTensors.** An operator on a DTensor issues collectives within ``__torch_dispatch__``, where torch excludes the gate's
key (FSDP2's clipping does this). Jobs with DTensors have the kernels at ``BackendSelect``.

**torch.compile.** Compiled code checks at each call that the dispatch keys are those under which it was compiled. The
gate's key would fail that check, and each frame would be recompiled when a window opens: minutes of a live job, and
possibly different rounding. So once torch.compile has compiled anything in the process, or if this torch lacks what the
key needs, the kernels are at ``BackendSelect``, and the key stays off. There they see every thread's collectives at all
times, record those of threads with a mark in another thread-local state, which autograd passes on too, and pass the
others through: 7 to 12 us per collective, in and between windows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch

from overlap_callbacks._log import logger
from overlap_callbacks.gate.collectives import Collective, OperatorSpec, operator_specs
from overlap_callbacks.gate.delays import StepDelays
from overlap_callbacks.gate.interruptions import Interrupts, issuer, without_signal_check
from overlap_callbacks.gate.switches import RefusedError

OWN_KEY = "TESTING_ONLY_GenericMode"
BACKEND_SELECT = "BackendSelect"
MARK = "overlap_callbacks"  # marks measured threads, in torch's thread-local Python objects
_IN_THE_WAY = "from here on the gate is in the way of every collective, for some microseconds each"


class CollectiveObserver(Protocol):
    """Called by the kernels in a measured step, on the thread that issues the collective. No method may raise."""

    delays: StepDelays | None  # whose ``undo`` follows where a collective is not issued

    def before_call(self, spec: OperatorSpec, args: tuple[Any, ...]) -> Collective | None:
        """A collective is about to be issued; returns a call if ``after_call`` must follow."""

    def after_call(self, spec: OperatorSpec, call: Collective, result: Any) -> Any:
        """The collective was issued; its operator returned ``result``. Returns what to return in its place."""


class _Placement:
    """Kernels at one dispatch key, and the thread-local state that marks a measured thread."""

    key = ""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []  # kernels live as long as their library

    @property
    def installed(self) -> bool:
        return bool(self._libraries)

    def install(self, dispatcher: Dispatcher) -> None:
        """Register the kernels. Between steps, on the main thread."""
        library = torch.library.Library("c10d", "IMPL")
        for spec in operator_specs():
            library.impl(spec.name, self.kernel(spec, dispatcher), self.key, with_keyset=True)
        self._libraries.append(library)

    def kernel(self, spec: OperatorSpec, dispatcher: Dispatcher) -> Callable[..., Any]:
        raise NotImplementedError

    def enter(self) -> None:
        """Make the calling thread a measured one."""
        raise NotImplementedError

    def leave(self) -> None:
        """Make the calling thread an ordinary one; safe to call if it is one already."""
        raise NotImplementedError

    def _below(self) -> Any:
        """The dispatch keys below this one, where a call continues."""
        return torch._C._dispatch_keyset_full_after(self.key)


class _AtOwnKey(_Placement):
    """Kernels at a key that only measured threads include: other threads' dispatch never considers them."""

    key = OWN_KEY

    def install(self, dispatcher: Dispatcher) -> None:
        own: Any = torch._C._parse_dispatch_key(self.key)
        include = torch._C._dispatch_tls_set_dispatch_key_included
        is_included = torch._C._dispatch_tls_is_dispatch_key_included
        # Every operator that meets a key without a kernel fails, so all others fall through.
        others = torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, self.key)
        self._key, self._include, self._is_included = own, include, is_included
        self._let_higher_order_operators_fall_through()
        self._try_out()
        super().install(dispatcher)
        self._libraries.append(others)

    def _let_higher_order_operators_fall_through(self) -> None:
        """These (flex_attention, cond) are dispatched in Python, which has no fallback for all operators."""
        operators = torch._ops._higher_order_ops
        later_ones = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
        for operator in tuple(operators.values()):
            operator.fallthrough(self._key)
        later_ones.append(self._key)

    def _try_out(self) -> None:
        """Check that operators work with the key on; raises RuntimeError if not."""
        self.enter()
        try:
            torch.ones(1).add(1)
        finally:
            self.leave()

    def enter(self) -> None:
        self._include(self._key, True)

    def leave(self) -> None:
        if self._is_included(self._key):
            self._include(self._key, False)

    def kernel(self, spec: OperatorSpec, dispatcher: Dispatcher) -> Callable[..., Any]:
        below, placement, interrupts = self._below(), self, dispatcher.interrupts
        arguments, issue = issuer(spec.redispatch)

        def kernel(keyset: Any, *args: Any) -> Any:
            nonlocal arguments, interrupts
            try:
                call = None
                observer = dispatcher.observer
                if (
                    observer is None
                    or dispatcher.placement is not placement
                    or (dispatcher.stale and dispatcher.is_stale())
                ):
                    # The step ended on another thread, which could not switch off this thread's key.
                    placement.leave()
                    dispatcher.forget_thread()
                else:
                    call = observer.before_call(spec, args)
            except BaseException as error:
                call = None
                interrupts += (error,)
                _undo_delay(observer)
            arguments += ((keyset & below, *args),)
            try:
                for result in issue:
                    try:
                        if call is not None:
                            return observer.after_call(spec, call, result)  # type: ignore[union-attr]
                    except BaseException as error:
                        interrupts += (error,)
                    return result
            except BaseException:
                _undo_delay(observer)
                raise

        return _as_kernel(kernel)


def _undo_delay(observer: CollectiveObserver | None) -> None:
    """Make the issuing stream current again where a collective was not issued."""
    if observer is not None and observer.delays is not None:
        observer.delays.undo()


def _is_marked() -> Callable[[str], Any]:
    """A function that returns whether this thread has the mark; a mark that could not be removed is False."""
    has, value = torch._C._is_key_in_tls, torch._C._get_obj_in_tls
    return has if hasattr(torch._C, "_remove_obj_from_tls") else lambda key: has(key) and value(key)


class _AtBackendSelect(_Placement):
    """Kernels that see every thread's collectives, and pass through those of threads without a mark."""

    key = BACKEND_SELECT

    def enter(self) -> None:
        torch._C._stash_obj_in_tls(MARK, True)

    def leave(self) -> None:
        if torch._C._is_key_in_tls(MARK):
            if hasattr(torch._C, "_remove_obj_from_tls"):
                torch._C._remove_obj_from_tls(MARK)
            else:  # torch 2.8 cannot remove it
                torch._C._stash_obj_in_tls(MARK, False)

    def kernel(self, spec: OperatorSpec, dispatcher: Dispatcher) -> Callable[..., Any]:
        below, is_marked, interrupts = self._below(), _is_marked(), dispatcher.interrupts
        arguments, issue = issuer(spec.redispatch)

        def kernel(keyset: Any, *args: Any) -> Any:
            nonlocal arguments, interrupts
            call = None
            observer = dispatcher.observer
            # Keep nothing between windows: without the GIL, a Ctrl-C would otherwise wait for the next window.
            if observer is not None:
                try:
                    if is_marked(MARK) and not (dispatcher.stale and dispatcher.is_stale()):
                        call = observer.before_call(spec, args)
                except BaseException as error:
                    interrupts += (error,)
                    _undo_delay(observer)
            arguments += ((keyset & below, *args),)
            try:
                for result in issue:
                    if call is not None:
                        try:
                            return observer.after_call(spec, call, result)  # type: ignore[union-attr]
                        except BaseException as error:
                            interrupts += (error,)
                    return result
            except BaseException:
                _undo_delay(observer)
                raise

        return _as_kernel(kernel)


class CompileWatch:
    """Counts compilations once torch.compile's own module is loaded; does not load it.

    ``on_start`` is called on the compiling thread when a compilation starts, if this torch has a callback for that.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._started = 0
        self._subscribed = False  # whether torch calls back at each start

    def start(self) -> None:
        """Subscribe to torch's compilations, if the compiler is loaded. Cheap, and safe to call again."""
        callbacks: Any = None if self._subscribed else sys.modules.get("torch._dynamo.callback")
        if callbacks is None:
            return
        try:
            callbacks.on_compile_start(self._note)
            self._subscribed = True
        except Exception:
            logger.debug("this torch has no callback for the start of a compilation", exc_info=True)

    @property
    def count(self) -> int:
        """Compilations so far; only differences are meaningful."""
        return self._started if self._subscribed else _compilations_by_torch()

    @property
    def has_compiled(self) -> bool:
        """Whether there may be compiled code. A wrapped function proves little: DeepSpeed wraps many."""
        return self._started > 0 or _compilations_by_torch() > 0

    def _note(self, _: Any) -> None:
        # Called by torch.compile: no exception may escape.
        self._started += 1
        try:
            self._on_start()
        except Exception:
            logger.debug("the gate could not switch its key off for a compilation", exc_info=True)


def _compilations_by_torch() -> int:
    """torch.compile's own count. None of its counters includes all compilations."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if utils is None:
        return 0
    try:
        # With fullgraph=True the first stays at 0; the last omits recompiled frames.
        counters, frames_seen = utils.counters, int(getattr(frames, "FRAME_COUNTER", 0))
        return int(counters["frames"]["total"] + counters["stats"]["unique_graphs"]) + frames_seen
    except (AttributeError, KeyError, TypeError):
        return 1  # unknown: assume it is in use, which is always safe


class Dispatcher:
    """The kernels of this process, their user, and its thread. One per process, like torch's dispatcher.

    Attributes:
        observer: called for each collective of a measured thread; None makes the kernels pass calls through at once.
        placement: the kernels in use, one of ``own_key`` and ``backend_select``; None before ``install``.
        stale: threads whose step ended on another thread. Each becomes ordinary when it next enters a kernel.
        interrupts: exceptions of signal handlers within the kernels, re-raised when the step ends.
    """

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        self.observer: CollectiveObserver | None = None
        self.placement: _Placement | None = None
        self._owner: object | None = None
        self.own_key = _AtOwnKey()
        self.backend_select = _AtBackendSelect()
        self._compile_watch = CompileWatch(self._on_compile)
        self._thread = 0  # the measured thread; 0 if there is none
        self.stale: set[int] = set()

    # -- who uses the kernels

    def is_free_for(self, owner: object) -> bool:
        """Whether the kernels are unused, or used by ``owner``."""
        return self._owner is None or self._owner is owner

    def acquire(self, owner: object) -> None:
        """Reserve the kernels for ``owner``. Raises RuntimeError if they are in use."""
        if not self.is_free_for(owner):
            raise RefusedError(
                "another OverlapMonitor of this process uses the collective gate: close() it first [OC120]"
            )
        self._owner = owner

    def release(self, owner: object) -> None:
        """Release the kernels, which stay registered. Does nothing if ``owner`` does not have them."""
        if self._owner is owner:
            self._owner = None
            self.observer = None

    # -- registration

    def install(self, *, nested: bool = False) -> None:
        """Register the kernels where they cost least. Between steps, on the main thread; safe to call again.

        ``nested``: operators of the job issue collectives themselves, as those on DTensors do.
        """
        self._compile_watch.start()
        if self.placement is None:
            # Processes forked within a step, such as DataLoader workers, measure nothing.
            os.register_at_fork(after_in_child=self._leave_after_fork)
            try:
                self.own_key.install(self)
                self.placement = self.own_key
            except (AttributeError, RuntimeError) as error:
                self.use_backend_select(f"this torch has no dispatch key for the gate alone ({error}); {_IN_THE_WAY}")
        if self.placement is self.own_key and self._compile_watch.has_compiled:
            self.use_backend_select(
                f"torch.compile is in use, and would recompile for a dispatch key of the gate; {_IN_THE_WAY}"
            )

        if self.placement is self.own_key and nested:
            self.use_backend_select(
                f"collectives are issued where a dispatch key of the gate is not seen (by operators on DTensors, or on "
                f"another thread); {_IN_THE_WAY}"
            )

    def use_backend_select(self, why: str) -> None:
        """Continue at ``BackendSelect``, and log why."""
        self.backend_select.install(self)
        self.placement = self.backend_select
        logger.info("overlap-callbacks: %s [OC118]", why)

    # -- a step

    @property
    def num_compilations(self) -> int:
        """Number of torch.compile's compilations seen so far."""
        return self._compile_watch.count

    @property
    def has_compiled(self) -> bool:
        """Whether there may be code that torch.compile has compiled."""
        return self._compile_watch.has_compiled

    def switch_on(self, observer: CollectiveObserver) -> None:
        """Call ``observer`` for collectives of this thread, and of autograd on its behalf; after ``install``."""
        thread = get_ident()
        if self._thread not in (0, thread):
            self.stale.add(self._thread)
        self.stale.discard(thread)
        self._thread = thread
        self.observer = observer
        assert self.placement is not None
        self.placement.enter()

    def switch_off(self, observer: CollectiveObserver) -> None:
        """Pass all collectives through at once; callable from any thread. Does nothing if another observer is active.

        Only a thread itself can change its local state. So if another thread calls this, the measured thread becomes
        ordinary when it calls this too, or when it next enters a kernel.
        """
        if self.observer is None or self.observer is observer:
            self.observer = None
            self._leave_thread()

    def is_on(self, observer: CollectiveObserver) -> bool:
        return self.observer is observer

    def is_stale(self) -> bool:
        """Whether the calling thread began a step that another thread ended, and is in no step now."""
        return get_ident() in self.stale

    def forget_thread(self) -> None:
        """Treat the calling thread as an ordinary one again."""
        thread = get_ident()
        self.stale.discard(thread)
        if self._thread == thread:
            self._thread = 0

    def _leave_thread(self) -> None:
        for placement in (self.own_key, self.backend_select):
            if placement.installed:
                placement.leave()
        self.forget_thread()

    def _leave_after_fork(self) -> None:
        self._owner = self.observer = None
        self._leave_thread()

    def _on_compile(self) -> None:
        """torch.compile is about to compile on this thread.

        The compiled code will compare its dispatch keys with the current ones, so the gate's key is off for the rest of
        the step, which does not count. Not within a backward pass: autograd restores the key for the next node, and
        each node would be recompiled. There the code is compiled with the key, and again without it in a later step.
        """
        if self.placement is self.own_key and torch._C._current_graph_task_id() == -1:
            self.own_key.leave()


def _as_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function into a kernel; see ``interruptions.py`` for the form that its code must have."""
    without_signal_check(kernel)
    # torch.compile runs it unchanged; otherwise it would trace into it if a compiled forward communicates.
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.8
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(kernel.__code__, frames._FrameExecStrategy(skip, skip))
    return kernel


dispatcher = Dispatcher()
