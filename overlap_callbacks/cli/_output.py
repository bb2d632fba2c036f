"""Input and output of commands: records with a progress bar; tables, JSON and pictures."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

    from overlap_callbacks.analysis.communication.view import TrafficView
    from overlap_callbacks.report.record import Record
    from overlap_callbacks.report.views.elements import Document

# No heavy imports here: every command's help needs this module.

# Work that takes longer than this shows its progress.
PATIENCE_S = 2.0
_MOST_RUNS = 5  # of several, on the short screen


def open_console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr, without colour and style if ``NO_COLOR`` is set (https://no-color.org)."""
    from rich.console import Console

    class PatientConsole(Console):
        def on_broken_pipe(self) -> None:  # else the exit code is 1
            raise BrokenPipeError

    # A name that contains :fire: stays unchanged.
    return PatientConsole(stderr=stderr, color_system=None if os.environ.get("NO_COLOR") else "auto", emoji=False)


def with_progress(what: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """A function to call with the amount done and the total; shows a progress bar if the work takes long."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext(lambda done, total: None)
    return progress_of(what, open_console(stderr=True))


@contextlib.contextmanager
def progress_of(what: str, console: Console, patience_s: float = PATIENCE_S) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the amount done and the total.

    Shows a bar for ``what`` on the console, if that is a terminal, once the work has taken ``patience_s``.
    """
    began = time.monotonic()
    shown: tuple[Progress, TaskID] | None = None

    def update(done: int, total: int) -> None:
        nonlocal shown
        if shown is None and console.is_terminal and time.monotonic() - began >= patience_s:
            shown = _bar(what, console)
            shown[0].start()
        if shown is not None:
            bar, task = shown
            bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if shown is not None:
            shown[0].stop()


def _bar(what: str, console: Console) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    return bar, bar.add_task(what, total=None)


def newest_run(path: Path) -> Path:
    """The newest run in a folder of runs, announced on stderr; any other path unchanged."""
    from overlap_callbacks.analysis.results.run import FILE_NAME
    from overlap_callbacks.report import record

    if not path.is_dir() or (path / FILE_NAME).exists():
        return path
    runs = record.runs_in(path)
    if not runs:
        return path
    if len(runs) > 1:
        older = ", ".join(run.name for run in reversed(runs[-6:-1])) + (", ..." if len(runs) > 6 else "")
        line = f"{path} holds {len(runs)} runs; this is the newest, {runs[-1].name}. Older: {older}"
    else:
        line = f"{path} holds one run, {runs[-1].name}"
    click.echo(one_line(line), err=True)
    return runs[-1]


def read_record(run: Path, *, details: bool = False) -> Record:
    """Read the record of a run, or end the command. Without ``details``, those of windows stay in the file."""
    from overlap_callbacks.report import record

    gc.disable()  # a long run has hundreds of thousands of small objects, none of them garbage
    try:
        with with_progress(f"reading {run.name}") as progress:
            return record.read(run, progress, details=details)
    except record.RecordError as error:
        hint = f". For a trace: overlap analyze {run}" if _may_be_traces(run) else ""
        raise click.ClickException(one_line(f"{error}{hint}")) from None
    finally:
        gc.freeze()  # nor later: scanning them repeatedly takes long
        gc.enable()


def with_ledger(record: Record) -> Record:
    """The record, with what the runs next to it say of its advice."""
    from overlap_callbacks.experiments.ledger import seldom_held

    record.seldom_held = seldom_held(record)
    return record


def _may_be_traces(path: Path) -> bool:
    """Whether a path is a file, or a folder with a file, that looks like a trace by its name."""
    from overlap_callbacks.traces.sources import holds_traces

    files = itertools.islice(path.iterdir(), 1000) if path.is_dir() else [path]
    return any(holds_traces(file) for file in files if file.is_file())


def print_record(run: Path, as_json: bool, everything: bool = False, causal: bool = False) -> None:
    """Print the results of a run: its answer, ``everything``, or what ``causal`` windows found."""
    record = with_ledger(read_record(run))
    if as_json:
        from overlap_callbacks.report.run_json import run_as_json

        print_json(run_as_json(record))
    elif causal:
        from overlap_callbacks.report.views.causal import causal_document

        if not record.causal:
            raise click.ClickException("no collective was delayed in this run: attach with causal=True")
        print_document(causal_document(record))
    elif everything:
        from overlap_callbacks.report.views.runs import runs_document

        print_document(runs_document([record], charts=False))
    else:
        from overlap_callbacks.analysis.results.run import FILE_NAME
        from overlap_callbacks.report.terminal import ShortScreen
        from overlap_callbacks.report.views.short import short_of

        shown = run.parent if run.name == FILE_NAME else run
        print_tables(ShortScreen(short_of(record), f"overlap show {shlex.quote(str(shown))} --all"))


def print_comparison(runs: Sequence[Path], everything: bool) -> None:
    """Print which of several runs is the fastest and the headline of each, or ``everything``."""
    from rich.text import Text

    from overlap_callbacks.analysis.formatting import count
    from overlap_callbacks.analysis.headline import run_headline
    from overlap_callbacks.report.views.comparison import head_lines
    from overlap_callbacks.report.views.runs import distinct_names, runs_document

    records = [read_record(run) for run in runs]
    if everything:
        print_document(runs_document(records, charts=False))
        return
    names = distinct_names(records)
    first, *more = head_lines(names, records)
    print_tables(Text(first, "bold"))
    for line in more:
        print_tables(Text(line))
    few = len(runs) == 2  # of more runs the first sentence, and the first runs: some 20 lines in all
    shown = list(zip(names, records, strict=True))[:_MOST_RUNS]
    for name, record in shown:
        found = run_headline(record.summary, len(record.arms))
        above = "\n" if few or record is records[0] else ""
        print_tables(Text(f"{above}{name}: {' '.join([found.sentence, *(found.also if few else ())])}"))
    left_out = len(runs) - len(shown)
    tables = f"{count(left_out, 'more run')}, and all tables" if left_out else "All tables"
    print_tables(Text(f"\n{tables}: overlap show {shlex.join(map(str, runs))} --all", "dim"))


def program() -> str:
    """``overlap`` as this shell finds it, so that commands work as they are printed."""
    if shutil.which("overlap") is not None:
        return "overlap"
    called = Path(sys.argv[0])
    if called.name == "overlap":
        return shlex.quote(_shorter(called))
    return f"{shlex.quote(_shorter(Path(sys.executable)))} -m overlap_callbacks"


def _shorter(path: Path) -> str:
    near = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if near else path)


def one_line(text: str) -> str:
    """A text on one line, of limited length, without control characters."""
    from overlap_callbacks.analysis import formatting

    return formatting.one_line(text, 2000)


def print_json(content: Any) -> None:
    """Print anything that msgspec can encode, indented. Escapes characters that could control a terminal."""
    import msgspec

    from overlap_callbacks.analysis.safe_text import escaped_json

    try:
        encoded = msgspec.json.encode(content)
    except UnicodeEncodeError:  # the bytes of a path are no text
        encoded = json.dumps(msgspec.to_builtins(content), ensure_ascii=False).encode(errors="replace")
    text = msgspec.json.format(encoded, indent=2).decode()
    click.echo(escaped_json(text).encode())  # as bytes: UTF-8 on any terminal


def print_document(document: Document, everything: bool = True) -> None:
    """Print a document; ``everything`` adds the tables of each answer."""
    from overlap_callbacks.report.terminal import drawn

    print_tables(drawn(document, everything))


def print_tables(tables: RenderableType) -> None:
    """Print tables, without characters that could control the terminal."""
    from overlap_callbacks.report.terminal import SanitizedRenderable

    open_console().print(SanitizedRenderable(tables))


def draw_matrix(view: TrafficView, svg: Path | None, png: Path | None) -> list[str]:
    """Draw a traffic matrix into the files named by the user, and return their paths. Ends the command if it cannot."""
    from overlap_callbacks.analysis.communication import view as pictures

    if png is not None:
        require("matplotlib", "plots")
    if svg is not None:
        write_file(svg, "--svg", pictures.svg(view, standalone=True).encode())
    if png is not None:
        write_file(png, "--png", pictures.png(view))
    return [str(path) for path in (svg, png) if path is not None]


def write_file(path: Path, option: str, content: bytes) -> None:
    """Write a file named by an option, or end the command with one line."""
    with writing(f"{option} {path}"):
        path.write_bytes(content)


@contextlib.contextmanager
def writing(what: str, advice: str = "") -> Iterator[None]:
    """End the command with one line, and the advice, if ``what`` (an option and its file) cannot be written."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(one_line(f"{what} cannot be written: {error.strerror or error}{advice}")) from None


@contextlib.contextmanager
def refusing(*errors: type[Exception], refusal: type[click.ClickException] = click.ClickException) -> Iterator[None]:
    """End the command with the message of these errors, on one line, as ``refusal`` has it."""
    try:
        yield
    except errors as error:
        raise refusal(one_line(str(error))) from None


def require(module: str, extra: str) -> None:
    """End the command if an optional package is not installed; the message names the extra to install."""
    if importlib.util.find_spec(module) is None:
        raise click.ClickException(f"{module} is not installed: pip install 'overlap-callbacks[{extra}]'")
