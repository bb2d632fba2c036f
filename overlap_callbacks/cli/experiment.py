"""Shared by the commands that run experiments: their folder, progress, endings, and how to resume."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from overlap_callbacks.cli import ExitCode
from overlap_callbacks.cli._output import one_line, print_document, print_json, program

if TYPE_CHECKING:
    from overlap_callbacks.experiments.supervisor import Limits
    from overlap_callbacks.experiments.sweep import LinesFile, Point, Progress, Sweep
    from overlap_callbacks.report.views.elements import Document

_Function = TypeVar("_Function", bound=Callable[..., Any])
KEPT = "Interrupted: what was measured is kept."
_QUICK_MINUTES = 5.0
_MAX_NAME, _MAX_OUTCOME = 80, 500


class Ending(Enum):
    """How an experiment ended, with the message for it."""

    COMPLETE = ""
    OUT_OF_TIME = "The time was over before all runs were done (--minutes)."
    INTERRUPTED = KEPT


def output_option(parent: str) -> Callable[[_Function], _Function]:
    """The option ``--output`` of a command whose default folders are in ``parent``."""
    return click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
                        help=f"Folder of the results.  [default: {parent}]")  # fmt: skip


def resume_option(*, file_okay: bool = False) -> Callable[[_Function], _Function]:
    """The option ``--resume``; it may name the results file if ``file_okay``."""
    return click.option("--resume", type=click.Path(path_type=Path, exists=True, file_okay=file_okay), metavar="FOLDER",
                        help="Go on with what is left of FOLDER, as it was begun.")  # fmt: skip


def new_folder(output: Path | None, parent: str, file_name: str, suffix: str = "") -> Path:
    """The folder for new results: ``output`` if the user named one, else a new one in ``parent``.

    Raises a ``ValueError`` if it already holds results.
    """
    import datetime
    import secrets

    now = datetime.datetime.now()
    folder = output or Path(parent) / f"{now:%Y%m%d-%H%M%S}-{suffix or secrets.token_hex(3)}"
    if (folder / file_name).exists():
        raise ValueError(f"{folder} has results already: go on with --resume {folder}, or name another --output")
    return folder


@contextlib.contextmanager
def sentences(refusal: type[click.ClickException] | None = None) -> Iterator[None]:
    """End the command with one sentence if an experiment cannot start or continue, or nothing can be written.

    ``refusal`` is raised if an option has a wrong value; None if options were checked before.
    """
    from overlap_callbacks.experiments.sweep import BusyError, CannotGoOnError

    try:
        yield
    except (ValueError, TypeError) as error:
        if refusal is None and not isinstance(error, BusyError):
            raise
        raise (refusal or click.ClickException)(one_line(str(error))) from None
    except CannotGoOnError as error:
        raise click.ClickException(one_line(str(error))) from None
    except OSError as error:
        raise click.ClickException(one_line(f"the results cannot be written: {error}")) from None


def limit_s(given: dict[str, Any]) -> float:
    """Time limit in seconds for all runs, from ``--minutes``, ``--quick`` and ``--full``."""
    if given["minutes"] is not None:
        return float(60 * given["minutes"])
    return 60 * _QUICK_MINUTES if given["quick"] else math.inf


def measure_all(
    sweep: Sweep[Any, Any],
    measure: Callable[[Point, Limits, ExitStack], Any],
    file: LinesFile,
    *,
    timeout_s: float,
    total_s: float,
) -> Ending:
    """Measure what is left of a sweep, show the progress, and close the file; arguments as in ``sweep.run``."""
    from overlap_callbacks.experiments.sweep import run

    with contextlib.closing(file), shown_progress() as on_progress:
        limits = {"timeout_s": timeout_s, "total_s": total_s}
        return run_to_end(lambda: run(sweep, measure, file, on_progress=on_progress, **limits))


def run_to_end(run: Callable[[], bool]) -> Ending:
    """Run what is left; ``run`` returns False if time ran out. Ends the command if nothing can be written."""
    from overlap_callbacks.experiments.supervisor import interruptible

    try:
        with interruptible(), sentences():
            return Ending.COMPLETE if run() else Ending.OUT_OF_TIME
    except KeyboardInterrupt:
        return Ending.INTERRUPTED


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A function that shows progress: on a terminal a bar with the time left, and everywhere a line per outcome."""
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar

    from overlap_callbacks.analysis import formatting
    from overlap_callbacks.cli._output import open_console

    console = open_console(stderr=True)
    text, left = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), left)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None, left="")

        def show(progress: Progress) -> None:
            if progress.ended:
                ended = formatting.one_line(progress.ended, _MAX_OUTCOME)
                words = f"{progress.num_done} of {progress.num_planned}: {ended}"
                bar.console.print(escape(words), highlight=False, soft_wrap=True)
            left_s = progress.left_s if progress.left_s is not None else bar.tasks[0].time_remaining
            bar.update(
                task,
                description=escape(formatting.one_line(progress.current, _MAX_NAME)),
                completed=progress.num_done,
                total=progress.num_planned,
                left="" if left_s is None else _left(left_s),
            )

        yield show


def _left(left_s: float) -> str:
    return f"some {left_s:.0f} s left" if left_s < 100 else f"some {left_s / 60:.0f} min left"


def show(document: Document, data: dict[str, Any], as_json: bool, page: Path | None) -> bool:
    """Print the document, or the data as JSON, and write the page, if any. Returns whether it could be written."""
    if as_json:
        print_json(data)
    else:
        print_document(document, everything=False)
    if page is None:
        return True
    from overlap_callbacks.report.html import write_document

    try:
        size = write_document(document, page)
    except OSError as error:
        click.echo(one_line(f"The page cannot be written: {error}"), err=True)
        return False
    click.echo(one_line(f"The page is {page} ({size / 2**20:.1f} MiB)"), err=True)
    return True


def finish(ending: Ending, folder: Path, command: str, *, measured: bool, is_clear: bool = True) -> None:
    """Say how to continue, and exit as the experiment ended: with an error if nothing was measured."""
    if ending is not Ending.COMPLETE:
        click.echo(one_line(f"{ending.value} {resume_hint(command, folder)}"), err=True)
    if ending is Ending.INTERRUPTED:
        raise SystemExit(ExitCode.INTERRUPTED)
    if not measured:
        raise SystemExit(ExitCode.CANNOT)
    if not is_clear:
        raise SystemExit(ExitCode.INCONCLUSIVE)


def resume_hint(command: str, folder: Path) -> str:
    """How to continue, in a sentence."""
    return f"Go on with: {program()} {command.removeprefix('overlap ')} --resume {shlex.quote(str(folder))}"


@contextlib.contextmanager
def reporting_interrupts(command: str) -> Iterator[Callable[[Path], None]]:
    """Say what is kept on a Ctrl-C while nothing runs, e.g. while libraries load or the page is drawn.

    Yields a function to call with the results folder once it is known.
    """
    known: list[Path] = []
    try:
        yield known.append
    except KeyboardInterrupt:
        if known and known[0].is_dir() and any(known[0].glob("*.jsonl")):
            click.echo(one_line(f"{KEPT} {resume_hint(command, known[0])}"), err=True)
        else:
            click.echo("Interrupted before anything was measured.", err=True)
        raise SystemExit(ExitCode.INTERRUPTED) from None
