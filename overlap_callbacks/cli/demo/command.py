"""``overlap demo``: trains a small GPT with several processes and measures its overlap."""

from __future__ import annotations

from pathlib import Path

import click

from overlap_callbacks.cli._output import print_record, require


@click.command("demo")
@click.option("--framework", type=click.Choice(["pytorch", "lightning"]), default="pytorch", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=400, show_default=True, help="Optimizer steps.")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks of the model.")
@click.option("--hidden", type=click.IntRange(min=8), default=256, show_default=True, help="Width; a multiple of 4.")
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences a rank and step.")
@click.option("--sequence", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of a sequence.")
@click.option("--bucket-mb", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="Size of DDP's gradient buckets, MiB.")  # fmt: skip
@click.option(
    "--every", type=click.IntRange(min=82), default=100, show_default=True, help="Steps from window to window."
)
@click.option("--control", is_flag=True, help="A/A run: both arms overlapped, so all differences are errors.")
@click.option("--wandb", is_flag=True, help="Log to W&B too.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder of the record.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    framework: str,
    steps: int,
    layers: int,
    hidden: int,
    batch: int,
    sequence: int,
    bucket_mb: float,
    every: int,
    control: bool,
    wandb: bool,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Train a small GPT with two processes (or one on every GPU), and measure its overlap."""
    import torch

    from overlap_callbacks.cli._console import open_console
    from overlap_callbacks.cli.demo.config import DemoConfig
    from overlap_callbacks.cli.demo.launch import launch
    from overlap_callbacks.monitor.run_info import default_run_folder

    if hidden % 4:
        raise click.BadParameter(
            f"{hidden} is not a multiple of 4, the number of attention heads", param_hint="--hidden"
        )
    if framework == "lightning":
        require("lightning", "lightning")
    if wandb:
        require("wandb", "wandb")
    gpus = torch.cuda.device_count()
    config = DemoConfig(
        framework=framework,
        steps=steps,
        layers=layers,
        hidden=hidden,
        sequence=sequence,
        batch=batch,
        bucket_mb=bucket_mb,
        processes=gpus if gpus >= 2 else 2,
        backend="nccl" if gpus >= 2 else "gloo",
        run_dir=run_dir or default_run_folder("demo-"),
        every_n_steps=every,
        control=control,
        wandb=wandb,
    )
    console = open_console(stderr=True)
    where = f"{gpus} GPUs with NCCL" if gpus >= 2 else "the CPU with two processes and Gloo"
    console.print(f"Training a GPT of {layers} layers, width {hidden}, on {where}.")
    try:
        launch(config, console)
    except Exception as error:
        raise click.ClickException(f"a rank of the demo failed:\n{error}") from None
    print_record(config.run_dir, as_json)
    hint = f"The record is {config.run_dir / 'overlap.jsonl'}; see it again with: overlap show {config.run_dir}"
    console.print(hint, markup=False)
