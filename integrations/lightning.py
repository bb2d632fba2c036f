"""Lightning: ``Trainer(callbacks=[OverlapCallback()])``, nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
import torch.distributed as dist

from overlap_callbacks import Sink, WandbSink
from overlap_callbacks.analysis.dimension_rules import dimension_of
from overlap_callbacks.analysis.step_vectors import CHECKPOINT, EVALUATION, INPUT, OPTIMIZER
from overlap_callbacks.monitor import EXCEPTION_CLOSE_TIMEOUT_S
from overlap_callbacks.sinks import FunctionSink, JsonlSink

from . import _configuration
from ._options import Options
from ._parts import PassMarks
from .base import TrainerParts, build_monitor, check_version, expect_dtensors, flush_sinks, full_precision, missing_of
from .pytorch import tell_models

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        # Both packages may be installed, and a Trainer only takes callbacks of its own package.
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            import pytorch_lightning as pl
        else:
            try:
                import lightning.pytorch as pl
            except ImportError:
                import pytorch_lightning as pl
    except ImportError:
        raise ImportError("OverlapCallback needs Lightning: pip install 'overlap-callbacks[lightning]'") from None


class OverlapCallback(TrainerParts, pl.Callback):
    """Measures what overlap costs and saves, and logs it through the trainer's loggers.

    A step is an optimizer step: from the first ``on_train_batch_start`` after ``trainer.global_step`` has changed to
    the ``on_train_batch_end`` where it has changed again. So gradient accumulation and manual optimization need no
    setting. Validation within a step is not measured. Reports go to the JSONL record and to every logger of the
    trainer; a ``WandbLogger`` gets tables too.

    Args:
        **options: see ``Options``, e.g. ``every_n_steps=200``. ``sinks`` replace the record, not the trainer's loggers.
            ``run_dir`` defaults to a new folder under ``<default_root_dir>/overlap_runs``.

    Raises:
        TypeError, ValueError: an option that does not exist, or a value that is not allowed. What may be wrong on one
            rank alone does not raise, unless ``strict=True``: no rank measures, and rank 0 says why.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        self._step = 0
        self._global_step = 0
        self._resumed_step: int | None = None

    # -- steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        version = cast(Any, pl).__version__
        # Not trainer.log_dir: reading it broadcasts on the job's communicator.
        self.monitor = build_monitor(
            f"lightning {version}",
            self._options,
            root=trainer.default_root_dir,
            sinks=lambda given, folder: self._sinks(trainer, given, folder),
            check=_check_version,
            precision=lambda: _precision(trainer.precision),
            next_step=trainer.global_step if self._resumed_step is None else self._resumed_step,
            unused="the trainer has trained no batch",
            target=trainer,
        )
        if self.monitor.active:
            self.monitor.name_groups(_dimensions(trainer.strategy))
            expect_dtensors(self.monitor, pl_module.parameters())
            _configuration.tell(self.monitor, lambda: _facts(trainer, pl_module))
            tell_models(self.monitor, [trainer.strategy.model] if trainer.strategy.model else [])
            self._marks = PassMarks(self.monitor)
            self._marks.watch_backward(torch.autograd, "_engine_run_backward")
            self._marks.watch_parameters(pl_module.parameters())
        # With several optimizers global_step counts every optimizer's steps. So steps are counted here, and the count
        # is kept in checkpoints.
        self._step = trainer.global_step if self._resumed_step is None else self._resumed_step
        self._resumed_step = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.monitor is not None and not self.monitor.in_step:
            self._global_step = trainer.global_step
            self.monitor.step_begin(self._step)
        if self.monitor is not None:
            self.monitor.tell_micro_batch()
        if self._marks is not None:
            self._marks.forward_begins()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter(OPTIMIZER)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter(INPUT)
        if self.monitor is not None and trainer.global_step != self._global_step:
            self.monitor.step_end(self._step)
            self._step += 1
            flush_sinks(self._loggers, self.monitor)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause_step()
        self._enter(EVALUATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._enter(INPUT)
        self._pause.close()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A step may continue in the next epoch (left-over micro-batches); anything in between is not part of it.
        if self.monitor is not None and self.monitor.in_step:
            with self.monitor.pause():
                pass

    # -- end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._pause.close()
        if self.monitor is not None:
            self.monitor.abort_step()
        self._close(EXCEPTION_CLOSE_TIMEOUT_S)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        self._enter(CHECKPOINT)
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed_step = state_dict["step"]

    # -- logging

    def _sinks(self, trainer: pl.Trainer, given: list[Sink] | None, folder: Path) -> list[Sink]:
        sinks: list[Sink] = [JsonlSink(folder)] if given is None else given
        detail, has_wandb = self._options.get("detail", "short"), any(isinstance(sink, WandbSink) for sink in sinks)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__):
                    run = cast(Any, logger).experiment  # begins it
                    sinks += [] if has_wandb else [WandbSink(run, detail=detail)]
                else:
                    self._loggers.append(LoggerSink(logger, detail))
            sinks += self._loggers
        return sinks


class LoggerSink(FunctionSink):
    """Passes reports to a Lightning logger, on the training thread: loggers need not be thread-safe."""

    def __init__(self, logger: Any, detail: str = "short") -> None:
        # Sinks are closed on another thread, so ``close`` writes nothing: the callback flushes afterwards.
        super().__init__(
            lambda metrics, step: logger.log_metrics(metrics, step=step),
            deferred=True,
            flush_on_close=False,
            exact_keys=True,
            detail=detail,
        )


def _precision(name: Any) -> str | None:
    """The precision of matrix products from Lightning's name for it; None for 64 bit and unknown names."""
    kind = str(name).removesuffix("-mixed").removesuffix("-true")
    # "transformer-engine" chooses 8 bit layer by layer.
    known = {"16": "fp16", "bf16": "bf16", "transformer-engine": "fp8", "transformer-engine-float16": "fp8"}
    return full_precision() if kind == "32" else known.get(kind)


def _facts(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """The job's configuration: the model as wrapped by the strategy, and the trainer's settings."""
    wrapped = trainer.strategy.model
    return {
        **_configuration.of_models([pl_module if wrapped is None else wrapped]),
        "model": type(pl_module).__name__,
        "strategy": type(trainer.strategy).__name__,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "precision": str(trainer.precision),
    }


def _check_version() -> None:
    missing = missing_of(pl.Trainer, "default_root_dir", "global_step", "is_global_zero", "loggers", "strategy")
    hooks = [name for name in vars(OverlapCallback) if name.startswith(("on_", "teardown", "state_", "load_state_"))]
    missing += missing_of(pl.Callback, *hooks) + missing_of(pl.strategies, "ModelParallelStrategy")
    check_version("lightning", cast(Any, pl).__version__, missing)


def _dimensions(strategy: Any) -> dict[str, str]:
    """The dimension of process groups without a description, by group name."""
    # DDP usually uses the default group, and DeepSpeed gives its groups no descriptions.
    groups = [getattr(strategy.model, name, None) for name in ("process_group", "seq_data_parallel_group")]
    known: dict[str, str] = {group.group_name: "data" for group in groups if isinstance(group, dist.ProcessGroup)}
    if isinstance(strategy, pl.strategies.ModelParallelStrategy):
        # A mesh dimension over all ranks uses the default group.
        mesh = strategy.device_mesh
        known |= {mesh.get_group(name).group_name: dimension_of(name) for name in mesh.mesh_dim_names or ()}
    return known
