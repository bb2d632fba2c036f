"""``overlap study``: the training experiments of arXiv 2507.03114."""

from __future__ import annotations

import math
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlap_callbacks.cli._options import caps, given_beside, json_option, whole_numbers, words
from overlap_callbacks.cli._output import one_line, print_json, print_tables, require

if TYPE_CHECKING:
    from overlap_callbacks.experiments.study.machine import Machine
    from overlap_callbacks.experiments.study.plan import Asked
    from overlap_callbacks.experiments.study.results import Results
    from overlap_callbacks.experiments.study.runner import Runner

# Of a command that Ctrl-C ended, as shells count.
_INTERRUPTED = 130
# What may stand beside --resume.
_BESIDE_RESUME = ("resume", "retry", "quick", "minutes", "timeout", "as_json")


@click.command("study")
@click.option(
    "--model", "models", metavar="NAME,...",
    help="gpt3-xl, gpt3-2.7b, gpt3-6.7b, gpt3-13b, llama2-13b (table II of the study); resnet50, resnet101, vgg16, "
    "bert, gpt-1.5b, gpt-3b.  [default: gpt3-xl; --full: table II]",
)  # fmt: skip
@click.option(
    "--batch", "batches", metavar="N,...",
    help="Sequences or images of a micro-batch on each rank.  [default: 1,4; --full: 8,16,32,64, on a CPU 1,2,4,8]",
)  # fmt: skip
@click.option("--strategy", "strategies", metavar="NAME,...",
              help="ddp, fsdp2, zero3 (needs DeepSpeed), tp, pp.  [default: ddp,fsdp2,pp]")  # fmt: skip
@click.option("--precision", "precisions", metavar="NAME,...",
              help="fp32, tf32, fp16, bf16.  [default: bf16, on a CPU fp32]")  # fmt: skip
@click.option(
    "--power-cap", "power_caps", metavar="W,...",
    help="Power limits of all GPUs of the host, in watts; none for their own. Needs root. Put back after each job.",
)  # fmt: skip
@click.option(
    "--clock-cap", "clock_caps", metavar="MHZ,...",
    help="The highest SM clock of all GPUs of the host, in MHz, in the same way.",
)  # fmt: skip
@click.option("--ranks", type=int, help="Ranks of each job, on this host.  [default: one a GPU; without GPUs 2]")
@click.option(
    "--scale", type=float, metavar="F",
    help="Shrink every model: layers, heads, and with them the width, sequence and vocabulary are multiplied by F and "
    "rounded; of image networks the blocks, channels and image. 1 for the models as published.  [default: 1, on a CPU "
    "0.0625]",
)  # fmt: skip
@click.option("--steps", type=int, help="Measured steps of each mode, in fives.  [default: 10; --full: 25]")
@click.option(
    "--quick/--full", default=True,
    help="At most 5 minutes and 10 steps (the default), or the study's models, batches and 25 steps, and no limit.",
)  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0.1), help="Start no job that would end later.")
@click.option(
    "--timeout", type=click.FloatRange(min=1),
    help="Seconds after which a job has failed.  [default: 600; --full: 3600]",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
              help="Folder of the results.  [default: overlap_study/TIME]")  # fmt: skip
@click.option("--resume", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="FOLDER",
              help="Go on with what is left of FOLDER, as it was begun.")  # fmt: skip
@click.option("--retry", is_flag=True, help="With --resume: try again what failed.")
@json_option
def command(
    models: str | None,
    batches: str | None,
    strategies: str | None,
    precisions: str | None,
    power_caps: str | None,
    clock_caps: str | None,
    ranks: int | None,
    scale: float | None,
    steps: int | None,
    quick: bool,
    minutes: float | None,
    timeout: float | None,
    output: Path | None,
    resume: Path | None,
    retry: bool,
    as_json: bool,
) -> None:
    """Train models under every combination, and measure what overlap costs and saves in each.

    The training experiments of "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
    Learning" (arXiv 2507.03114) on this machine: model x batch x strategy x precision x cap. One job for each, with
    the library attached. On GPUs the ranks use NCCL, without two of them the CPU and Gloo.

    A combination that fails (out of memory, say) is a row with its reason. Ctrl-C keeps what was measured.
    """
    require("jinja2", "report")
    began_s = time.monotonic()
    from overlap_callbacks.experiments.lines_file import BusyError
    from overlap_callbacks.experiments.study.capping import capped_job, check_may_cap
    from overlap_callbacks.experiments.study.machine import MachineError
    from overlap_callbacks.experiments.study.plan import FULL_TIMEOUT_S, QUICK_MINUTES, QUICK_TIMEOUT_S, Asked
    from overlap_callbacks.experiments.study.results import open_results
    from overlap_callbacks.experiments.study.runner import Runner

    if retry and resume is None:
        raise click.UsageError("--retry is for a study that goes on: give its folder by --resume")
    try:
        if resume is not None:
            results, machine = _continued(resume)
        else:
            asked = Asked(
                quick=quick, models=words(models), batches=whole_numbers(batches, "--batch"),
                strategies=words(strategies), precisions=words(precisions),
                power_caps_w=caps(power_caps, "--power-cap"), clock_caps_mhz=caps(clock_caps, "--clock-cap"),
                ranks=ranks, scale=scale, steps=steps,
            )  # fmt: skip
            results, machine = _begun(asked, output)
        check_may_cap(results.start.configurations)
        file = open_results(results.folder)
        if resume is None:
            file.write(results.start)
    except (BusyError, ValueError, TypeError) as error:
        raise click.UsageError(one_line(str(error))) from None
    except MachineError as error:
        raise click.ClickException(one_line(str(error))) from None
    except OSError as error:
        raise click.ClickException(one_line(f"the results cannot be written: {error}")) from None
    if machine.num_gpus == 1:
        click.echo("This host has one GPU, and NCCL takes one for each rank: the ranks train on the CPU.", err=True)
    try:
        quick = _is_quick(results, quick)
        limit_s = 60 * minutes if minutes is not None else 60 * QUICK_MINUTES if quick else math.inf
        left_s = limit_s - (time.monotonic() - began_s)
        timeout_s = timeout or (QUICK_TIMEOUT_S if quick else FULL_TIMEOUT_S)
        ending = _run(Runner(results, file, machine, timeout_s, left_s, retry, around_job=capped_job))
    finally:
        file.close()
    _show(results, as_json)
    if ending is not Ending.COMPLETE:
        click.echo(one_line(f"{ending.value} Go on with: overlap study --resume {results.folder}"), err=True)
    if ending is Ending.INTERRUPTED:
        raise SystemExit(_INTERRUPTED)
    if not any([row.figures is not None for row in results.rows]):
        raise SystemExit(1)


def _is_quick(results: Results, quick: bool) -> bool:
    """What the user says now; else as the study was begun."""
    if click.get_current_context().get_parameter_source("quick") is click.core.ParameterSource.COMMANDLINE:
        return quick
    return bool(results.start.options.get("quick", quick))


class Ending(Enum):
    """How a study came to an end, and what is said of it."""

    COMPLETE = ""
    OUT_OF_TIME = "The time was over before all configurations were trained (--minutes)."
    INTERRUPTED = "Interrupted: what was measured is kept."


def _run(runner: Runner) -> Ending:
    """Train what is left, with a bar on a terminal and a line for each configuration elsewhere."""
    from overlap_callbacks.cli.run_progress import shown_study
    from overlap_callbacks.experiments.study.runner import CannotGoOnError
    from overlap_callbacks.experiments.supervisor import interruptible

    try:
        with shown_study() as show, interruptible():
            runner.on_progress = show
            return Ending.COMPLETE if runner.run() else Ending.OUT_OF_TIME
    except KeyboardInterrupt:
        return Ending.INTERRUPTED
    except CannotGoOnError as error:
        said = f"{error}. What was measured is in {runner.results.folder}"
        raise click.ClickException(one_line(said)) from None
    except OSError as error:
        raise click.ClickException(one_line(f"the results cannot be written: {error}")) from None


def _show(results: Results, as_json: bool) -> None:
    from overlap_callbacks.experiments.study.page import write_study_page
    from overlap_callbacks.experiments.study.terminal import as_data, study_tables

    if as_json:
        print_json({"folder": str(results.folder), **as_data(results.start, results.rows)})
    else:
        print_tables(study_tables(results.start, results.rows))
    try:
        page = write_study_page(results.folder, results.start, results.rows)
    except OSError as error:
        click.echo(one_line(f"The page cannot be written: {error}"), err=True)
    else:
        click.echo(one_line(f"The page is {page}"), err=True)


def _begun(asked: Asked, output: Path | None) -> tuple[Results, Machine]:
    """A study that begins. Raises a ``ValueError`` where what the user gave cannot be done."""
    import datetime
    import secrets

    from overlap_callbacks.analysis.results.study import FILE_NAME
    from overlap_callbacks.experiments.study.machine import find_machine
    from overlap_callbacks.experiments.study.plan import check, make_start
    from overlap_callbacks.experiments.study.results import Results

    check(asked)
    now = datetime.datetime.now().astimezone()
    folder = output or Path("overlap_study") / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    if (folder / FILE_NAME).exists():
        raise ValueError(f"{folder} holds a study already: go on with it by --resume {folder}, or name another folder")
    machine = find_machine()
    return Results(folder, make_start(asked, machine)), machine


def _continued(folder: Path) -> tuple[Results, Machine]:
    """A study that goes on. Raises a ``ValueError`` where it cannot."""
    from overlap_callbacks.experiments.study.machine import find_machine
    from overlap_callbacks.experiments.study.plan import difference
    from overlap_callbacks.experiments.study.results import read_results

    others = given_beside(_BESIDE_RESUME)
    if others:
        raise ValueError(f"--resume goes on as the study was begun: leave out {' and '.join(others)}")
    results = read_results(folder)
    machine = find_machine()
    other = difference(results.start, machine)
    if other:
        raise ValueError(f"--resume {folder}: {other}")
    return results, machine
