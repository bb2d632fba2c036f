"""Shared by the adapters: options, versions, patching a framework's functions, logging on the training thread."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch

import overlap_callbacks
from overlap_callbacks._log import logger
from overlap_callbacks.instruments import device
from overlap_callbacks.monitor import OverlapMonitor
from overlap_callbacks.monitor.background.roll_call import WAIT_S, RollCall, has_others
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.config import MonitorConfig, apply_env_overrides, default_run_folder, switched_off_by
from overlap_callbacks.monitor.faults import say_refusal
from overlap_callbacks.sinks import FunctionSink, Sink

from ._options import Options, checked

# From the user's sinks (None if not given) and the run's folder to the monitor's sinks.
MakeSinks = Callable[[list[Sink] | None, Path], list[Sink]]


# -- from the options of one line to a monitor


def build_monitor(
    framework: str,
    options: Mapping[str, Any],
    *,
    root: str | os.PathLike[str] = "",
    sinks: MakeSinks | None = None,
    check: Callable[[], str | None] = lambda: None,
    precision: Callable[[], str | None] = lambda: None,
    next_step: int = 0,
    unused: str = "",
    target: object = None,
) -> OverlapMonitor:
    """A monitor from the combined options of ``Schedule`` and ``OverlapMonitor``; all ranks agree that it measures.

    A wrong value raises: it is the same on every rank. What ``check``, ``sinks``, the environment or the folder of the
    record get wrong may be wrong on one rank alone, and the others would wait for a rank that raises. So no rank
    measures then: rank 0 says why, and each gets a monitor that is switched off. ``strict`` raises in both cases.

    Args:
        framework: name and version of the adapter's framework, for the record.
        options: of the adapter's line; see ``Options``.
        root: the folder that holds the run's own folder by default.
        sinks: makes the monitor's sinks. By default they are those of the options.
        check: raises if the framework cannot be measured; may return what to record in place of ``framework``.
        precision: of the framework's matrix products, or None; used if the user gives none.
        next_step: number of the first step that the monitor will see.
        unused: what is wrong if the monitor never sees one.
        target: what is measured (an optimizer, a trainer): monitors of others are closed.

    Raises:
        TypeError: an option that does not exist, a wrong type, or ``schedule`` with its own options.
        ValueError: a value that is not allowed.
    """
    arguments = checked(options)
    if switched_off_by():
        # Perhaps on this rank alone. The others learn that from a short thread: this one must not wait for their store.
        monitor = OverlapMonitor(**arguments, framework=framework)
        _refuse(RuntimeError(f"switched off by {switched_off_by()}"), wait_s=0.0)
        return monitor
    try:
        framework = check() or framework
        apply_env_overrides(MonitorConfig())  # raises if a variable has a value that is not allowed
        if arguments.get("precision") is None:
            with contextlib.suppress(Exception):  # another version may rename it: only MFU needs it
                arguments["precision"] = precision()
        folder = arguments.get("run_dir")
        arguments["run_dir"] = folder = Path(root) / default_run_folder() if folder is None else folder
        if sinks is not None:
            arguments["sinks"] = sinks(arguments.get("sinks"), folder)
        monitor = OverlapMonitor(**arguments, framework=framework)
    except Exception as error:
        return switched_off(framework, error, strict=arguments.get("strict"))
    monitor.offer_page(_write_page)
    monitor.attached(next_step, unused, target)
    return monitor


def _write_page(record: Path) -> Path:
    page = record.parent / "report.html"
    overlap_callbacks.write_page([overlap_callbacks.record.read(record)], page)
    return page


def switched_off(framework: str, error: Exception, *, strict: Any = False) -> OverlapMonitor:
    """Switch measuring off on all ranks, because of ``error`` on this one; return a monitor that does nothing.

    Rank 0 says why, once. ``strict``: the user's option, as given: raise ``error`` as well.
    """
    agreed = _refuse(error, say=not strict)
    if strict:
        raise error
    if not agreed:
        logger.warning("overlap-callbacks: measuring is switched off, training goes on: %s [OC105]", error)
    return OverlapMonitor.stopped(framework)


def _refuse(error: Exception, *, say: bool = False, wait_s: float = WAIT_S) -> bool:
    """Let no rank measure, because of ``error`` on this one. Returns whether the other ranks learn of it.

    ``say``: say so, if this is rank 0.
    """
    job = Job.current()
    if job is None or not has_others(job):
        return False

    def fail() -> None:
        raise error

    call = RollCall(job, fail, say_refusal if say else lambda refusal: None)
    call.wait(wait_s)
    if not call.is_over:
        atexit.register(call.leave)  # a process that ends within a call of the store crashes
    return call.agreed


def full_precision() -> str | None:
    """The precision of 32-bit matrix products, by torch's setting; None if its old and new settings conflict."""
    try:
        return "tf32" if device.has_cuda() and torch.backends.cuda.matmul.allow_tf32 else "fp32"
    except RuntimeError:
        return None


def precision_of(dtype: Any) -> str | None:
    """The precision of matrix products of a tensor type; None for types without a peak."""
    known = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return full_precision() if dtype is torch.float32 else known.get(dtype)


def check_callable(name: str, given: Any) -> None:
    """Raise a TypeError with the ``name`` unless ``given`` is None or callable."""
    if given is not None and not callable(given):
        raise TypeError(f"{name} must be callable, got {given!r} (a {type(given).__name__})")


def is_native(sequential: str) -> bool:
    """Whether ``sequential`` asks for the framework's own switches; a ValueError if for neither them nor the gate."""
    if sequential not in ("gate", "native"):
        raise ValueError(f"sequential must be 'gate' or 'native', got {sequential!r} (a {type(sequential).__name__})")
    return sequential == "native"


# -- versions. Adapters use names that other packages do not promise to keep, and check for them in advance. So a
# missing name disables measuring with one message, which has the installed version and those that work.

KNOWN_TO_WORK = {
    "torch": "2.8.0, 2.13.0 and 2.15.0",
    "lightning": "2.5.6 and 2.6.6",
    "transformers": "4.57.1 and 5.23.0",
    "accelerate": "1.11.0 and 1.15.0",
    "deepspeed": "0.18.2 and 0.19.8",
    "megatron-core": "0.14.0, 0.15.0 and 0.16.1",
}


def lacks(package: str, version: str, what: str) -> str:
    """The message for something that a package lacks."""
    return f"{package} {version} has no {what}, which is needed here; known to work: {KNOWN_TO_WORK[package]}"


def torch_lacks(what: str) -> str:
    return lacks("torch", str(torch.__version__), what)


def missing_of(holder: Any, *names: str) -> list[str]:
    """The names that an object, a class or a module lacks, each prefixed with the holder's name."""
    owner = getattr(holder, "__name__", type(holder).__name__).rpartition(".")[2]
    return [f"{owner}.{name}" for name in names if not hasattr(holder, name)]


def check_version(package: str, version: str, missing: list[str]) -> None:
    """Reject a version in which something is missing, by a RuntimeError with the installed and the known versions."""
    if missing:
        raise RuntimeError(lacks(package, version, " and no ".join(missing)))


# -- patching a framework's objects while a monitor is attached


def patch(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object, a class or a module. Returns a function that undoes it.

    It does nothing if somebody else has set the attribute since: our value then stays inside theirs, without effect.
    """
    before, was_there = vars(holder).get(name), name in vars(holder)
    setattr(holder, name, value)

    def undo() -> None:
        if vars(holder).get(name) is not value:
            return
        if was_there:
            setattr(holder, name, before)
        else:
            delattr(holder, name)

    return undo


def wrap(holder: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function or method by ``around(original, ...)``, using ``patch``; returns a function that undoes it."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return patch(holder, name, wrapper)


class Attachments:
    """The objects that have a monitor, one each. ``kind``: what the objects are, for the message."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()

    def check_free(self, target: Any) -> None:
        """Raise a ValueError if an object already has a monitor."""
        if target in self._attached:
            raise ValueError(
                f"{self._kind} is attached to already: use that monitor, which goes on, "
                "or overlap_callbacks.close() it first"
            )

    def add(self, target: Any, monitor: OverlapMonitor) -> None:
        """Record that an object has this monitor, until the monitor is closed."""
        self._attached.add(target)
        monitor.call_on_close(lambda: self._attached.discard(target))


def expect_dtensors(monitor: OverlapMonitor, parameters: Iterable[Any]) -> None:
    """Prepare the monitor for collectives issued by operators on DTensors, if any of the parameters is one."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")  # without it there are no DTensors
    if tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in parameters):
        monitor.expect_nested_collectives()


# -- callbacks of trainers, and a framework's loggers, which may only be used on the training thread


class TrainerParts:
    """What the callbacks of trainers share. A copy measures nothing until it is used."""

    def __init__(self, **options: Unpack[Options]) -> None:
        checked(options)
        self.monitor: OverlapMonitor | None = None
        self._marks: Any = None  # a PassMarks, while a monitor is active
        self._options = options
        self._loggers: list[FunctionSink] = []
        self._pause = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "monitor": None, "_marks": None, "_loggers": [], "_pause": contextlib.ExitStack()}

    def _pause_step(self) -> None:
        """What follows is no part of the open step, if there is one, until ``_pause`` is closed."""
        if self.monitor is not None and self.monitor.in_step:
            self._pause.enter_context(self.monitor.pause())

    def _enter(self, part: int) -> None:
        if self.monitor is not None:
            self.monitor.enter(part)

    def _close(self, timeout_s: float | None = None) -> None:
        self._pause.close()
        monitor, self.monitor, self._marks = self.monitor, None, None
        if monitor is not None:
            monitor.close(timeout_s)
            flush_sinks(self._loggers, monitor)  # the last reports came while the monitor closed
        self._loggers = []


def flush_sinks(sinks: list[FunctionSink], monitor: OverlapMonitor) -> None:
    """Write the waiting windows of deferred sinks. Call it on the training thread, between steps.

    A sink that fails is stopped and removed from the list, with one warning.
    """
    for sink in list(sinks):
        try:
            sink.flush()
        except Exception as error:
            sinks.remove(sink)
            sink.stop()
            monitor.sink_failed(sink, error)
