"""What the commands that run experiments have in common: their folder, how they end, and how to go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import NoReturn

import click

from overlap_callbacks.cli._output import one_line

# Of a command that Ctrl-C ended, as shells count.
INTERRUPTED_CODE = 130
KEPT = "Interrupted: what was measured is kept."


class Ending(Enum):
    """How an experiment came to an end, and what is said of it."""

    COMPLETE = ""
    OUT_OF_TIME = "The time was over before all runs were done (--minutes)."
    INTERRUPTED = KEPT


def new_folder(output: Path | None, parent: str, file_name: str, suffix: str = "") -> Path:
    """The folder for new results.

    Args:
        output: that the user named; None for one of its own.
        parent: of those.
        file_name: of the results.
        suffix: of the folder's name.

    Raises:
        ValueError: it holds results already.
    """
    import datetime
    import secrets

    now = datetime.datetime.now()
    folder = output or Path(parent) / f"{now:%Y%m%d-%H%M%S}-{suffix or secrets.token_hex(3)}"
    if (folder / file_name).exists():
        raise ValueError(f"{folder} has results already: go on with --resume {folder}, or name another --output")
    return folder


def run_to_end(run: Callable[[], bool]) -> Ending:
    """Run what is left.

    Args:
        run: does it; returns False if the time was over first.

    Raises:
        click.ClickException: results cannot be written.
    """
    from overlap_callbacks.experiments.supervisor import interruptible

    try:
        with interruptible():
            return Ending.COMPLETE if run() else Ending.OUT_OF_TIME
    except KeyboardInterrupt:
        return Ending.INTERRUPTED
    except OSError as error:
        raise click.ClickException(cannot_be_written(error)) from None


def cannot_be_written(error: OSError) -> str:
    """What is said where results cannot be written."""
    return one_line(f"the results cannot be written: {error}")


def finish(ending: Ending, folder: Path, command: str, *, measured: bool) -> None:
    """Say how to go on, and exit as the experiment ended.

    Args:
        ending: of the experiment.
        folder: of its results.
        command: that goes on, e.g. ``overlap tune``.
        measured: whether anything was.
    """
    if ending is not Ending.COMPLETE:
        click.echo(one_line(f"{ending.value} {go_on(command, folder)}"), err=True)
    if ending is Ending.INTERRUPTED:
        raise SystemExit(INTERRUPTED_CODE)
    if not measured:
        raise SystemExit(1)


def go_on(command: str, folder: Path) -> str:
    """How to go on, in a sentence."""
    return f"Go on with: {command} --resume {folder}"


@contextlib.contextmanager
def told_of_interrupts(command: str) -> Iterator[Callable[[Path], None]]:
    """Ctrl-C while nothing runs, e.g. while libraries load or the page is drawn: what was measured is on disk already.

    Args:
        command: that goes on.

    Yields:
        A function to call with the folder of the results once it is known.
    """
    known: list[Path] = []
    try:
        yield known.append
    except KeyboardInterrupt:
        _say_interrupted(command, known[0] if known and _has_results(known[0]) else None)


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.jsonl"))


def _say_interrupted(command: str, folder: Path | None) -> NoReturn:
    if folder is None:
        click.echo("Interrupted before anything was measured.", err=True)
    else:
        click.echo(one_line(f"{KEPT} {go_on(command, folder)}"), err=True)
    raise SystemExit(INTERRUPTED_CODE)


def show_page(write: Callable[[], Path]) -> None:
    """Write a page, and say where it is.

    Args:
        write: writes it and returns its path.
    """
    try:
        click.echo(one_line(f"The page is {write()}"), err=True)
    except OSError as error:
        click.echo(one_line(f"The page cannot be written: {error}"), err=True)
