"""``overlap tune``: runs a job under every combination of settings, and says which one is fastest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlap_callbacks.cli._options import json_option, refuse_beside_resume
from overlap_callbacks.cli._output import one_line, print_json, print_tables, require
from overlap_callbacks.cli.experiment import (
    Ending,
    cannot_be_written,
    finish,
    new_folder,
    run_to_end,
    show_page,
    told_of_interrupts,
)

if TYPE_CHECKING:
    from overlap_callbacks.experiments.tune.combinations import Axis
    from overlap_callbacks.experiments.tune.results import Results
    from overlap_callbacks.experiments.tune.tuner import Tuner

QUICK_MINUTES = 5.0
_COMMAND = "overlap tune"
# What may stand beside --resume. The command and its settings may, if they are those of the tuning.
_BESIDE_RESUME = ("resume", "command", "variables", "arguments", "repeats", "quick", "minutes", "timeout", "as_json")


@click.command("tune", context_settings={"allow_interspersed_args": False})
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=V1,V2", help="Values of an environment variable. Repeatable."
)
@click.option(
    "--arg", "arguments", multiple=True, metavar="NAME=V1,V2",
    help="Values of an argument, appended to COMMAND as --NAME V, or put where COMMAND has {NAME}. Repeatable.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=4), help="Timed steps of a run, at least. [default: 40]")
@click.option("--warmup", type=click.IntRange(min=0), help="Steps before them. [default: 10]")
@click.option("--repeats", type=click.IntRange(min=1), help="Runs of each combination. [default: 4; --full: 8]")
@click.option(
    "--quick/--full", default=True,
    help="At most 5 minutes and 4 runs of each combination (the default), or 8 runs and no limit.",
)  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0.1), help="Start no run that would end later.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True,
    help="Seconds after which a run has failed.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the results. [default: overlap_tune/TIME]",
)  # fmt: skip
@click.option(
    "--resume", type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Go on with the tuning in this folder.",
)  # fmt: skip
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    variables: tuple[str, ...],
    arguments: tuple[str, ...],
    steps: int | None,
    warmup: int | None,
    repeats: int | None,
    quick: bool,
    minutes: float | None,
    timeout: float,
    output: Path | None,
    resume: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND under every combination of settings, and rank them by step time.

    COMMAND starts a job that has the library attached, e.g.

    overlap tune --arg bucket-mb=25,5,1 -- torchrun --nproc-per-node 2 train.py

    The first value of each setting is what the others are compared with. An empty one stands for "as is", e.g.
    NCCL_MAX_CTAS=,8,16. Each run is ended once its steps are timed. {run_dir} in COMMAND is a folder of that run.
    """
    require("jinja2", "report")
    with told_of_interrupts(_COMMAND) as folder_is:
        from overlap_callbacks.experiments.tune.results import open_results
        from overlap_callbacks.experiments.tune.tuner import Tuner

        try:
            if resume:
                results = _continued(resume, command, variables, arguments)
            else:
                timed = 40 if steps is None else steps
                results = _begun(command, variables, arguments, timed, 10 if warmup is None else warmup, output)
            file = open_results(results.folder)
            folder_is(results.folder)
            if not resume:
                file.write(results.tuning)
        except ValueError as error:
            raise click.UsageError(one_line(str(error))) from None
        except OSError as error:
            raise click.ClickException(cannot_be_written(error)) from None
        limit_s = 60 * minutes if minutes is not None else 60 * QUICK_MINUTES if quick else math.inf
        tuner = Tuner(results, file, repeats or (4 if quick else 8), timeout, limit_s)
        try:
            ending = _run(tuner)
        finally:
            file.close()
        results.num_left = tuner.num_left
        _show(results, as_json)
        finish(ending, results.folder, _COMMAND, measured=any([not run.failure for run in results.runs]))


def _run(tuner: Tuner) -> Ending:
    """Run what is left, with a bar on a terminal and a line for each run elsewhere."""
    from overlap_callbacks.cli.run_progress import shown_progress

    with shown_progress(tuner.results) as show:
        tuner.on_progress = show
        return run_to_end(tuner.run)


def _show(results: Results, as_json: bool) -> None:
    from overlap_callbacks.experiments.tune import page, terminal
    from overlap_callbacks.experiments.tune.ranking import ranked

    ranking = ranked(results)
    if as_json:
        print_json(terminal.as_json(results, ranking))
    else:
        print_tables(terminal.tables(results, ranking))
    show_page(lambda: page.write_page(results, ranking))


def _begun(
    command: tuple[str, ...],
    variables: tuple[str, ...],
    arguments: tuple[str, ...],
    steps: int,
    warmup: int,
    output: Path | None,
) -> Results:
    """A tuning that begins. Raises a ``ValueError`` where what the user gave cannot be run."""
    import datetime

    from overlap_callbacks._version import __version__
    from overlap_callbacks.analysis.results.env_overrides import TimingPlan
    from overlap_callbacks.experiments.tune.combinations import check_command, combinations
    from overlap_callbacks.experiments.tune.results import FILE_NAME, Results, Tuning

    if not command:
        raise ValueError("give the command to run, after --")
    axes = _axes(variables, arguments)
    combinations(axes)
    check_command(command, axes)
    now = datetime.datetime.now().astimezone()
    folder = new_folder(output, "overlap_tune", FILE_NAME)
    # Four blocks: a hiccup in one of them is then a small part of the run.
    blocks = 4
    timing = TimingPlan(
        warmup_steps=warmup, steps_per_block=-(-steps // blocks), min_block_seconds=min(0.5, 0.0125 * steps)
    )
    tuning = Tuning(
        library_version=__version__,
        started_at=now.isoformat(timespec="seconds"),
        command=command,
        axes=axes,
        timing=timing,
        blocks=blocks,
    )
    return Results(folder, tuning)


def _continued(
    folder: Path, command: tuple[str, ...], variables: tuple[str, ...], arguments: tuple[str, ...]
) -> Results:
    """An earlier tuning. Raises a ``ValueError`` where what the user gave is another one."""
    from overlap_callbacks.experiments.tune.results import read_results

    refuse_beside_resume(_BESIDE_RESUME)
    results = read_results(folder)
    if command and command != results.tuning.command:
        raise ValueError(f"{folder} has another command: leave it out to go on, or begin a new tuning without --resume")
    if (variables or arguments) and _axes(variables, arguments) != results.tuning.axes:
        raise ValueError(f"{folder} has other --env and --arg: leave them out to go on, or begin a new tuning")
    return results


def _axes(variables: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[Axis, ...]:
    from overlap_callbacks.experiments.tune.combinations import Kind, parsed_axis

    return (
        *[parsed_axis(Kind.ENV, text) for text in variables],
        *[parsed_axis(Kind.ARG, text) for text in arguments],
    )
