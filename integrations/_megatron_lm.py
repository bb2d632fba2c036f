"""Megatron-LM: its ``train`` and ``train_step``, wrapped until training ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlap_callbacks import Sink, WandbSink
from overlap_callbacks.monitor import EXCEPTION_CLOSE_TIMEOUT_S
from overlap_callbacks.monitor.background.store import next_prefix
from overlap_callbacks.sinks import JsonlSink

from ._megatron_core import MegatronCore
from ._megatron_reports import LAST_REPORT_S, LATER_S, Inbox, Outbox
from ._megatron_steps import Steps, checked_chunks, open_steps
from .base import switched_off, wrap


class PretrainHook:
    """Wraps Megatron-LM's ``train`` and ``train_step`` until ``train`` ends.

    The monitor is built at the first step, because the model does not exist before.

    Args:
        core: what is used of Megatron-core.
        training: the module that holds both functions.
        sequential: as the user gave it.
        options: as the user gave them.
        on_end: called when ``train`` has ended, before the monitor is closed.
    """

    def __init__(
        self, core: MegatronCore, training: Any, sequential: str, options: dict[str, Any], on_end: Callable[[], None]
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
        """Wrap both, in their module: ``pretrain`` looks them up there whenever it calls them.

        Raises:
            AttributeError: the module lacks one of them. Then none is wrapped.
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
        """Have the last reports pass to the last rank, and leave nothing in the store.

        Args:
            timeout_s: longest time for the last rank to take what rank 0 has sent.
            wait_s: longest time for rank 0 to send it.
        """
        if self._inbox is not None:
            self._inbox.look(wait_s=wait_s)
        error = None if self._outbox is None else self._outbox.leave(timeout_s)
        if error is not None and self._steps is not None and self._outbox is not None:
            self._steps.monitor.sink_failed(self._outbox, error)

    def _train_step(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            self._steps = self._open(inspect.signature(train_step).bind(*args, **kwargs).arguments["model"])
        iteration = kwargs.get("iteration")  # newer versions pass it, so that numbers survive a resume
        self._step = self._step + 1 if iteration is None else iteration
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
            return [*(given or [JsonlSink(folder), WandbSink(start=False)]), self._outbox]

        try:
            steps = open_steps(self._core, checked_chunks(model), self._sequential, self._options, sinks=with_outbox)
        except (TypeError, ValueError, RuntimeError) as error:
            return Steps(switched_off(self._core.name, error, strict=strict))
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
                monitor.close(EXCEPTION_CLOSE_TIMEOUT_S)  # nobody else would: Megatron's methods would stay wrapped
                raise
            # This rank alone has the error: if its monitor were closed, the other ranks' windows would wait for it.
            monitor.sink_failed(WandbSink(start=False), error)
        return steps


def _tokens_per_step(training: Any) -> int | None:
    """From Megatron-LM's arguments; None while the batch size still grows, or if a version names them otherwise."""
    try:
        arguments = training.get_args()  # asserts that they exist
        if arguments.rampup_batch_size is not None:
            return None
        return int(arguments.seq_length * arguments.global_batch_size)
    except (AssertionError, AttributeError, TypeError):
        return None
