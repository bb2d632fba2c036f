"""One rank of the demo: trains the GPT with PyTorch DDP or Lightning; one added line measures it.

``python -m overlap_callbacks.cli.demo.worker CONFIG``, with the variables of ``torchrun``.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import nn

from overlap_callbacks.cli._output import open_console
from overlap_callbacks.cli.demo.model import GPT, GeneratedText

Progress = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Options of a demo run; most are those of the command.

    Attributes:
        batch: sequences of a rank's batch.
        bucket_mb: size of DDP's gradient buckets, in MiB.
        processes: number of ranks.
        backend: ``gloo`` (CPU) or ``nccl`` (one GPU per rank).
        run_dir: folder of the record.
        profiled_steps: profiled steps of each mode in a window.
        measure: False trains without the library, for comparison.
        strict: whether an error of the library ends the demo.
        first_step: where the first window opens. Before it, DDP builds its buckets, and allocators and caches fill.
    """

    framework: str = "pytorch"
    steps: int = 400
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    sequence: int = 64
    batch: int = 4
    bucket_mb: float = 1.0
    processes: int = 2
    backend: str = "gloo"
    run_dir: str = "overlap_runs/demo"
    every_n_steps: int = 100
    profiled_steps: int = 8
    control: bool = False
    wandb: bool = False
    measure: bool = True
    strict: bool = True
    first_step: int = 10


def main(content: str) -> None:
    """Train as this rank; ``content`` is a ``DemoConfig`` as JSON."""
    config = msgspec.json.decode(content, type=DemoConfig)
    rank = int(os.environ["RANK"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages would break the progress bar
    if config.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.processes))
    torch.manual_seed(0)
    train = {"pytorch": train_pytorch, "lightning": train_lightning}[config.framework]
    with _shown(config) if rank == 0 else contextlib.nullcontext(lambda step, loss: None) as progress:
        train(rank, config, progress)


@contextlib.contextmanager
def _shown(config: DemoConfig) -> Iterator[Progress]:
    """A function that shows the step and the loss; NaN for a loss that was not read."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=open_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=config.steps)
        yield lambda step, loss: bar.update(
            task, completed=step, description=f"training, loss {loss:.2f}" if math.isfinite(loss) else None
        )


def _options(config: DemoConfig) -> dict[str, Any]:
    from overlap_callbacks import JsonlSink, WandbSink

    sinks: list[Any] = [JsonlSink(config.run_dir)]
    if config.wandb:
        sinks.append(WandbSink())
    return {
        "every_n_steps": config.every_n_steps,
        "first_step": config.first_step,
        "profiled_steps": config.profiled_steps,
        "control": config.control,
        "sinks": sinks,
        "strict": config.strict,
        "max_overhead": None,  # measuring is all that the demo is for
    }


def _model(config: DemoConfig) -> GPT:
    return GPT(config.layers, config.hidden, config.heads, config.sequence)


def _text(rank: int, config: DemoConfig) -> GeneratedText:
    return GeneratedText(rank, config.batch, config.sequence)


def train_pytorch(rank: int, config: DemoConfig, progress: Progress) -> None:
    """Train in a plain PyTorch loop with DistributedDataParallel."""
    from overlap_callbacks.integrations.pytorch import attach

    device = torch.device("cuda", rank) if config.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(config.backend)
    model = nn.parallel.DistributedDataParallel(_model(config).to(device), bucket_cap_mb=config.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(_text(rank, config))
    with attach(optimizer, model=model, **_options(config)) if config.measure else contextlib.nullcontext():
        for step in range(config.steps):
            tokens, targets = (part.to(device, non_blocking=True) for part in next(batches))
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Reading the loss blocks until the device is done, so it is read rarely.
            progress(step + 1, loss.item() if step % 50 == 0 or step + 1 == config.steps else float("nan"))
    dist.barrier()
    dist.destroy_process_group()


def train_lightning(rank: int, config: DemoConfig, progress: Progress) -> None:
    """Train the same model with a Lightning trainer."""
    import logging
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from overlap_callbacks.integrations.lightning import OverlapCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(config)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Report(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            step = trainer.global_step
            progress(step, float(outputs["loss"]) if step % 50 == 1 or step == config.steps else float("nan"))

    callbacks: list[Any] = [Report()]
    if config.measure:
        callbacks.append(OverlapCallback(**_options(config)))
    trainer = pl.Trainer(
        accelerator="gpu" if config.backend == "nccl" else "cpu",
        devices=config.processes,
        strategy=DDPStrategy(process_group_backend=config.backend, bucket_cap_mb=config.bucket_mb),
        max_steps=config.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=config.run_dir,
        callbacks=callbacks,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(_text(rank, config), batch_size=None))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
