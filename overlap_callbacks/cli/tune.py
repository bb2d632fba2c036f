"""``overlap tune``: runs a job under every combination of settings, and says which one is fastest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks.cli._options import Amount, WithCommand, json_option, refuse_with_resume
from overlap_callbacks.cli._output import one_line, require
from overlap_callbacks.cli.experiment import (
    finish,
    limit_s,
    measure_all,
    new_folder,
    output_option,
    reporting_interrupts,
    resume_option,
    sentences,
    show,
)

if TYPE_CHECKING:
    from overlap_callbacks.experiments.tune.combinations import Axis
    from overlap_callbacks.experiments.tune.sweep import Tune

_COMMAND = "overlap tune"
# Options allowed with --resume. The command and its settings are allowed if they match the earlier tuning's.
_WITH_RESUME = ("resume", "command", "variables", "arguments", "repeats", "quick", "minutes", "timeout", "as_json")


@click.command("tune", cls=WithCommand)
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
@click.option("--minutes", type=Amount(min=0.1), help="Start no run that would end later.")
@click.option(
    "--timeout", type=Amount(min=1), default=600.0, show_default=True,
    help="Seconds after which a run has failed.",
)  # fmt: skip
@output_option("overlap_tune/TIME")
@resume_option()
@json_option
@click.argument("stray", nargs=-1, metavar="-- COMMAND...")
def command(**given: Any) -> None:
    """Run COMMAND under every combination of settings, and rank them by step time.

    COMMAND starts a job that has the library attached, e.g.

    overlap tune --arg bucket-mb=25,5,1 -- torchrun --nproc-per-node 2 train.py

    The first value of each setting is what the others are compared with. An empty one means "as is", e.g.
    NCCL_MAX_CTAS=,8,16. Each run is ended once its steps are timed. {run_dir} in COMMAND is a folder of that run.
    """
    if given["stray"]:
        raise click.UsageError(one_line(f"put -- before the command: -- {' '.join(given['stray'])}"))
    require("jinja2", "report")
    with reporting_interrupts(_COMMAND) as folder_is:
        from overlap_callbacks.experiments.tune.ranking import ranked
        from overlap_callbacks.experiments.tune.view import tuning_data, tuning_document

        with sentences(click.UsageError):
            axes = _axes(given)
            tune = _begun(given, axes) if given["resume"] is None else _continued(given, axes)
            file = tune.open()
        folder_is(tune.folder)
        tune.num_runs = given["repeats"] or (4 if given["quick"] else 8)
        ending = measure_all(tune, tune.run_once, file, timeout_s=given["timeout"], total_s=limit_s(given))
        ranking = ranked(tune)
        show(tuning_document(tune, ranking), tuning_data(tune, ranking), given["as_json"], tune.folder / "tune.html")
        measured = any([not run.failure for run in tune.lines])
        finish(ending, tune.folder, _COMMAND, measured=measured, is_clear=ranking.is_clear)


def _begun(given: dict[str, Any], axes: tuple[Axis, ...]) -> Tune:
    """A new tuning. Raises a ``ValueError`` if it cannot be run as the user asked."""
    import datetime

    from overlap_callbacks._version import __version__
    from overlap_callbacks.analysis.results.env_overrides import TimingPlan
    from overlap_callbacks.experiments.tune.combinations import check_command, combinations
    from overlap_callbacks.experiments.tune.sweep import Tune, Tuning

    command = given["command"]
    if not command:
        raise ValueError("give the command to run, after --")
    combinations(axes)
    check_command(command, axes)
    if "{" not in command[0] and shutil.which(command[0]) is None:
        raise ValueError(f"the command cannot be started: there is no program {command[0]}")
    steps = 40 if given["steps"] is None else given["steps"]
    warmup = 10 if given["warmup"] is None else given["warmup"]
    # Four blocks, so that a hiccup in one of them affects only a small part of the run.
    blocks = 4
    tuning = Tuning(
        library_version=__version__,
        started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command,
        axes=axes,
        timing=TimingPlan(
            warmup_steps=warmup, steps_per_block=-(-steps // blocks), min_block_seconds=min(0.5, 0.0125 * steps)
        ),
        blocks=blocks,
    )
    return Tune(new_folder(given["output"], "overlap_tune", Tune.FILE_NAME), tuning)


def _continued(given: dict[str, Any], axes: tuple[Axis, ...]) -> Tune:
    """A resumed tuning. Raises a ``ValueError`` if the user's arguments differ from the earlier tuning's."""
    from overlap_callbacks.experiments.tune.sweep import Tune

    refuse_with_resume(_WITH_RESUME)
    folder: Path = given["resume"]
    tune = Tune.read(folder)
    if given["command"] and given["command"] != tune.start.command:
        raise ValueError(f"{folder} has another command: leave it out to go on, or begin a new tuning without --resume")
    if axes and axes != tune.start.axes:
        raise ValueError(f"{folder} has other --env and --arg: leave them out to go on, or begin a new tuning")
    return tune


def _axes(given: dict[str, Any]) -> tuple[Axis, ...]:
    from overlap_callbacks.experiments.tune.combinations import Kind, parsed_axis

    options = ((Kind.ENV, "variables"), (Kind.ARG, "arguments"))
    return tuple([parsed_axis(kind, text) for kind, name in options for text in given[name]])
