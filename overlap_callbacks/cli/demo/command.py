"""``overlap demo``: trains a small GPT with several processes and measures its overlap."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks.cli._options import Amount, is_given, json_option
from overlap_callbacks.cli._output import one_line, print_record, program, read_record, require

if TYPE_CHECKING:
    from overlap_callbacks.cli.demo.worker import DemoConfig

# The module that each rank runs.
WORKER = "overlap_callbacks.cli.demo.worker"
# MiB of a bucket: one holds all gradients of the model; or there are several, whose reductions overlap.
LARGE_MB, SMALLER_MB = 25.0, 5.0


@click.command("demo")
@click.option("--framework", type=click.Choice(["pytorch", "lightning"]), default="pytorch", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=400, show_default=True, help="Optimizer steps.")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks of the model.")
@click.option("--hidden", type=click.IntRange(min=8), default=256, show_default=True, help="Width; a multiple of 4.")
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences a rank and step.")
@click.option("--sequence", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of a sequence.")
@click.option("--bucket-mb", type=Amount(min=0, min_open=True), default=LARGE_MB, show_default=True,
              help="Size of DDP's gradient buckets, MiB.")  # fmt: skip
@click.option(
    "--every", "every_n_steps", type=click.IntRange(min=82), default=100, show_default=True,
    help="Steps from window to window.",
)  # fmt: skip
@click.option("--control", is_flag=True, help="A/A run: both arms overlapped, so all differences are errors.")
@click.option("--wandb", is_flag=True, help="Log to W&B too.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder of the record.")
@json_option
def command(run_dir: Path | None, as_json: bool, **options: Any) -> None:
    """Train a small GPT with two processes (or one on every GPU), and measure its overlap."""
    import torch

    from overlap_callbacks.cli._output import open_console
    from overlap_callbacks.cli.demo.worker import DemoConfig
    from overlap_callbacks.monitor.config import default_run_folder

    if options["hidden"] % 4:
        raise click.BadParameter(
            f"{options['hidden']} is not a multiple of 4, the number of attention heads", param_hint="--hidden"
        )
    if options["framework"] == "lightning":
        require("lightning", "lightning")
    if options["wandb"]:
        require("wandb", "wandb")
    gpus = torch.cuda.device_count()
    folder = run_dir or default_run_folder("demo-")
    config = DemoConfig(**options, processes=max(2, gpus), backend="nccl" if gpus >= 2 else "gloo", run_dir=str(folder))
    console = open_console(stderr=True)
    where = f"{gpus} GPUs with NCCL" if gpus >= 2 else "the CPU with two processes and Gloo"
    console.print(
        f"Training a GPT of {config.layers} layers, width {config.hidden}, on {where}, with gradients in buckets of "
        f"{config.bucket_mb:g} MiB: two to four minutes."
    )
    train(config)
    print_record(folder, as_json)
    makes_pages = importlib.util.find_spec("jinja2") is not None
    if makes_pages:
        from overlap_callbacks.report import write_page

        write_page([read_record(folder)], folder / "report.html")
        click.echo(f"The page is {folder / 'report.html'}", err=True)
    else:
        click.echo("For the page: pip install jinja2", err=True)
    if program() != "overlap":
        click.echo(f"In this shell, overlap is {program()}", err=True)
    click.echo("To go on, as docs/tutorial.md does:", err=True)
    for line, why in _next_commands(folder, options):
        if makes_pages or not line.startswith("report "):
            click.echo(f"  {program()} {line}  # {why}", err=True)


def _next_commands(folder: Path, options: dict[str, Any]) -> list[tuple[str, str]]:
    """The change, what came of it, and the limit: each command, and what for."""
    size = SMALLER_MB if options["bucket_mb"] != SMALLER_MB else LARGE_MB
    same: list[str] = []
    for option in click.get_current_context().command.params:
        value = options.get(option.name or "")
        if value is not None and option.name != "bucket_mb" and is_given(option.name or ""):
            same += option.opts[:1] if value is True else [option.opts[0], str(value)]
    run, other = shlex.quote(str(folder)), shlex.quote(f"{folder}-{size:g}mb")
    return [
        (" ".join(["demo", *same, f"--bucket-mb {size:g} --run-dir {other}"]), "the same with other buckets"),
        (f"report {run} {other}", "both runs on one page"),
        (f"check {other} --max-exposed 0.1", "a limit, for CI"),
    ]


def train(config: DemoConfig) -> None:
    """Run the demo, with rank 0's progress, or end the command; a rank's traceback is on stderr."""
    import os
    import sys

    import msgspec

    from overlap_callbacks.experiments.supervisor import exit_in_words, interruptible, rank_variables, supervise

    with interruptible():
        outcome = supervise(
            [sys.executable, "-m", WORKER, msgspec.json.encode(config).decode()],
            environment=os.environ,
            ranks=rank_variables(config.processes),
            stdout=2,  # stdout is for the result only: the Gloo of torch 2.8 writes its own lines there
        )
    if outcome.exit_code:
        raise click.ClickException(one_line(f"a rank of the demo failed ({exit_in_words(outcome.exit_code)})"))
