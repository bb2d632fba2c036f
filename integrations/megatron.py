"""Megatron-core: ``attach(model_chunks, optimizer)``; Megatron-LM: ``hook_pretrain()`` before ``pretrain(...)``."""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from overlap_callbacks import OverlapMonitor, Sink, WandbSink, _validation
from overlap_callbacks.analysis.step_vectors import OPTIMIZER
from overlap_callbacks.monitor import EXCEPTION_CLOSE_TIMEOUT_S
from overlap_callbacks.monitor.background.store import next_prefix
from overlap_callbacks.monitor.config import default_sinks

from ._megatron_reports import LAST_REPORT_S, LATER_S, Inbox, Outbox
from ._megatron_steps import MegatronCore, Steps, checked_chunks, open_steps
from ._options import Options, checked
from .base import is_native, switched_off, wrap

_BY_HAND = "no step of the attached monitor has begun"
# Which of the two functions here has a monitor in this process, if any; and of ``attach`` the model, held weakly.
_in_use: list[tuple[str, Callable[[], Any] | None]] = []


def attach(
    model_chunks: Any, optimizer: Any, *, start_step: int = 0, sequential: str = "gate", **options: Unpack[Options]
) -> OverlapMonitor:
    """Measure the loop that steps ``optimizer``: a step lasts from one ``optimizer.step()`` to the next.

    Micro-batches and pipeline schedules need no setting. A step that the optimizer skipped, for an overflow, does not
    count. Wrap evaluations inside the loop in ``with monitor.pause():``. Call ``monitor.close()`` after the loop, or
    use ``with attach(...):``.

    Args:
        model_chunks: the pipeline schedule's ``model``: a module or a list of them.
        optimizer: what ``get_megatron_optimizer`` returned. None if you mark the steps yourself, with
            ``monitor.step()``.
        start_step: optimizer steps done before, when a job resumes.
        sequential: what makes a step sequential. ``"gate"`` waits for every collective and batch of sends and receives.
            ``"native"`` switches off ``overlap_grad_reduce``, ``overlap_param_gather`` and ``overlap_p2p_comm``, those
            that the job was built with.
        **options: see ``Options``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` restores everything.

    Raises:
        ImportError: Megatron-core is not installed, or lacks what is needed here.
        TypeError: not a model or a Megatron optimizer, or an option that does not exist.
        RuntimeError: (``strict=True`` only) model parallelism is not initialised, Megatron has a monitor already, or
            another rank cannot measure.
        ValueError: a value is not allowed; (``strict=True`` only) Megatron's switches are refused for this job.
    """
    core = MegatronCore.load()
    if optimizer is not None and not isinstance(optimizer, core.optimizer):
        raise TypeError(f"optimizer must be Megatron's, of get_megatron_optimizer(), got a {type(optimizer).__name__}")
    chunks = checked_chunks(model_chunks)
    step = _validation.count("start_step", start_step, minimum=0)
    by_hand, kind = optimizer is None, type(optimizer).__name__
    steps = open_steps(
        core,
        chunks,
        sequential,
        options,
        by_hand=by_hand,
        check=lambda: _check_free(chunks[0]),
        next_step=step if by_hand else step + 1,
        unused=_BY_HAND if by_hand else f"`optimizer.step()` was never called on the attached {kind}",
    )
    monitor = steps.monitor
    if not monitor.active:
        return monitor
    entry = ("attach()", weakref.ref(chunks[0]))
    _in_use.append(entry)
    monitor.call_on_close(lambda: _in_use.remove(entry))
    if optimizer is None:
        return monitor

    def step_and_mark(optimizer_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal step
        monitor.enter(OPTIMIZER)
        outcome = optimizer_step(*args, **kwargs)
        if monitor.in_step:
            steps.end(skipped=outcome[0] is False)
        step += 1
        steps.begin(step)
        return outcome

    # On the instance: the class's method also serves the optimizers within a chained one. A torch hook on the inner
    # optimizer would run before the parameters are gathered, and not at all after an overflow.
    monitor.call_on_close(wrap(optimizer, "step", step_and_mark))
    return monitor


def hook_pretrain(*, sequential: str = "gate", **options: Unpack[Options]) -> None:
    """Measure the next ``pretrain(...)`` of Megatron-LM: call this once before it, on all ranks.

    A step is a call of ``train_step``. Evaluation and checkpoints lie between steps. When training ends, measuring ends
    and everything is restored. Rank 0 writes the record. Reports also go to the W&B run that Megatron-LM opens on the
    last rank.

    Args:
        sequential: as in ``attach``.
        **options: as in ``attach``.

    Raises:
        ImportError: Megatron-LM or Megatron-core cannot be imported, or lacks what is needed here.
        TypeError, ValueError: an option that does not exist, or a value that is not allowed.
        RuntimeError: (``strict=True`` only) called twice, or Megatron has a monitor already.
    """
    checked(options)
    is_native(sequential)
    core = MegatronCore.load()
    try:
        _check_free()
    except RuntimeError as error:
        switched_off(core.name, error, strict=options.get("strict"))
        return
    try:
        training = importlib.import_module("megatron.training.training")
        _PretrainHook(core, training, sequential, options, _in_use.clear).install()
    except (ImportError, AttributeError) as error:
        raise ImportError(f"hook_pretrain needs Megatron-LM, with megatron.training.training: {error}") from error
    _in_use.append(("hook_pretrain()", None))


def _check_free(chunk: Any = None) -> None:
    """Raise a RuntimeError if there is a monitor that ``attach`` to a model of this first chunk would not replace."""
    for function, model in _in_use:
        if chunk is None or model is None or model() is chunk:
            raise RuntimeError(f"Megatron has a monitor already, of {function}: one at a time, close() that one first")


class _PretrainHook:
    """Wraps Megatron-LM's ``train`` and ``train_step`` until ``train`` ends.

    The monitor is built at the first step, because the model does not exist before. ``training``: the module with both
    functions. ``on_end`` is called when ``train`` has ended, before the monitor is closed.
    """

    def __init__(
        self, core: MegatronCore, training: Any, sequential: str, options: Options, on_end: Callable[[], None]
    ) -> None:
        self._core = core
        self._training = training
        self._sequential = sequential
        self._options = options
        self._on_end = on_end
        self._steps: Steps | None = None
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self._step = -1
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Wrap both, in their module: ``pretrain`` looks them up there at each call.

        Raises an AttributeError if the module lacks one of them; then neither is wrapped.
        """
        _ = self._training.train, self._training.train_step
        self._undo = [wrap(self._training, "train", self._train), wrap(self._training, "train_step", self._train_step)]

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timeout_s = wait_s = EXCEPTION_CLOSE_TIMEOUT_S
        try:
            result = train(*args, **kwargs)
            timeout_s, wait_s = LAST_REPORT_S, LAST_REPORT_S + LATER_S
            return result
        finally:
            for undo in self._undo:
                undo()
            self._on_end()
            try:
                if self._steps is not None:
                    self._steps.monitor.close(timeout_s)
            finally:  # strict: closing may raise
                self._leave(timeout_s, wait_s)

    def _leave(self, timeout_s: float, wait_s: float) -> None:
        """Pass the last reports to the last rank, and leave nothing in the store.

        ``wait_s``: maximum time for rank 0 to send them. ``timeout_s``: for the last rank to take them.
        """
        if self._inbox is not None:
            self._inbox.look(wait_s=wait_s)
        error = None if self._outbox is None else self._outbox.leave(timeout_s)
        if error is not None and self._steps is not None and self._outbox is not None:
            self._steps.monitor.sink_failed(self._outbox, error)

    def _train_step(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        iteration = kwargs.get("iteration")  # newer versions pass it, so that numbers survive a resume
        self._step = self._step + 1 if iteration is None else iteration
        if self._steps is None:
            self._steps = self._open(inspect.signature(train_step).bind(*args, **kwargs).arguments["model"])
        self._steps.begin(self._step)
        try:
            outcome = train_step(*args, **kwargs)
        except BaseException:
            self._steps.monitor.abort_step()
            raise
        self._steps.end(skipped=bool(outcome[1]))
        if self._inbox is not None:
            self._inbox.look()
        return outcome

    def _open(self, model: Any) -> Steps:
        """Build the monitor. Unless strict, errors do not stop the training."""
        prefix = f"{next_prefix()}/megatron"
        strict = self._options.get("strict")

        def with_outbox(given: list[Sink] | None, folder: Path) -> list[Sink]:
            self._outbox = Outbox(prefix)
            own = default_sinks(folder, self._options.get("detail", "short")) if given is None else given
            return [*own, self._outbox]

        try:
            chunks = checked_chunks(model)
        except TypeError as error:
            return Steps(switched_off(self._core.name, error, strict=strict))
        steps = open_steps(self._core, chunks, self._sequential, self._options, sinks=with_outbox, next_step=self._step)
        monitor = steps.monitor
        if not monitor.active:
            return steps
        if monitor.tokens_per_step is None:
            monitor.tokens_per_step = _tokens_per_step(self._training)
        try:
            writer = self._training.get_wandb_writer()  # None on all ranks but the one with the W&B run
            self._inbox = None if writer is None else Inbox(prefix, writer, monitor)
        except Exception as error:
            if strict:
                monitor.close(EXCEPTION_CLOSE_TIMEOUT_S)  # otherwise Megatron's methods would stay wrapped
                raise
            # Only this rank has the error: if its monitor were closed, the other ranks' windows would wait for it.
            monitor.sink_failed(WandbSink(start=False), error)
        return steps


def _tokens_per_step(training: Any) -> int | None:
    """From Megatron-LM's arguments; None while the batch size is still growing, or if a version renames them."""
    try:
        arguments = training.get_args()  # asserts that they exist
        if arguments.rampup_batch_size is not None:
            return None
        return int(arguments.seq_length * arguments.global_batch_size)
    except (AssertionError, AttributeError, TypeError):
        return None
