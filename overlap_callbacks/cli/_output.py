"""Reading a run or a trace for a command, and printing results as tables, CSV or JSON."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlap_callbacks.analysis.communication.view import TrafficView
    from overlap_callbacks.report.record import Record
    from overlap_callbacks.report.views.elements import Document

# Nothing heavy is imported at the top: every command's help needs this module.

_Read = TypeVar("_Read")
_Result = TypeVar("_Result")


def read_with_progress(path: Path, read: Callable[[Path, Callable[[int, int], None]], _Read]) -> _Read:
    """Read a file of any size, with a progress bar if it takes long."""
    with with_progress(f"reading {path.name}") as progress:
        return read(path, progress)


def with_progress(what: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """A function to call with what is done and the total; a progress bar appears if the work takes long."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext(lambda done, total: None)
    from overlap_callbacks.cli._console import open_console
    from overlap_callbacks.cli.progress import progress_of

    return progress_of(what, open_console(stderr=True))


def print_result(
    result: _Result,
    as_json: bool,
    output: Path | None,
    csv: str | None,
    document: Callable[[_Result], Document],
    problems: Sequence[str],
    everything: bool = False,
) -> None:
    """Print a result in the form that the user asked for.

    Args:
        result: of a command.
        as_json: print it as JSON.
        output: a file that gets everything as JSON; None for none.
        csv: the table to print, as CSV; None if the user did not ask for CSV.
        document: makes what people read.
        problems: printed to stderr beside a CSV; the other forms hold them.
        everything: whether to print all of the document.

    Raises:
        click.UsageError: both JSON and CSV were asked for.
        click.ClickException: the output file cannot be written.
    """
    import msgspec

    if csv is not None and as_json:
        raise click.UsageError("give either --json or --csv")
    if output is not None:
        try:
            output.write_bytes(msgspec.json.encode(result) + b"\n")
        except OSError as error:
            raise click.ClickException(one_line(f"--output {output} cannot be written: {error.strerror}")) from None
    if csv is not None:
        click.echo(csv, nl=False)
        for problem in problems:
            click.echo(one_line(f"Note: {problem}"), err=True)
    elif as_json:
        print_json(result)
    else:
        print_document(document(result), everything)


def newest_run(path: Path) -> Path:
    """The newest run of a folder of runs, which is announced on stderr; any other path as it is."""
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


def read_record(run: Path) -> Record:
    """Read the record of a run; details of windows stay in the file until they are asked for.

    Raises:
        click.ClickException: there is no record, or it cannot be read.
    """
    from overlap_callbacks.report import record

    gc.disable()  # of a long run, hundreds of thousands of small objects are kept, and none is garbage
    try:
        return read_with_progress(run, functools.partial(record.read, details=False))
    except record.RecordError as error:
        raise click.ClickException(one_line(str(error))) from None
    finally:
        gc.freeze()  # nor is any later: to look at them again and again takes long
        gc.enable()


def print_record(run: Path, as_json: bool, everything: bool = False) -> None:
    """Print the results of a run; ``everything`` adds the long tables."""
    record = read_record(run)
    if as_json:
        from overlap_callbacks.report.run_json import run_as_json

        print_json(run_as_json(record))
    else:
        from overlap_callbacks.report.views.runs import runs_document

        print_document(runs_document([record], charts=False), everything)


def one_line(text: str) -> str:
    """A text on one line, of bounded length, without control characters."""
    from overlap_callbacks.analysis import formatting

    return formatting.one_line(text, 2000)


def print_json(content: Any) -> None:
    """Print anything that msgspec encodes, indented. Characters that could steer a terminal are escaped."""
    import msgspec

    from overlap_callbacks.analysis.safe_text import escaped_json

    text = msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
    click.echo(escaped_json(text).encode())  # as bytes: UTF-8 whatever the terminal


def print_document(document: Document, everything: bool = True) -> None:
    """Print a document; ``everything`` adds the tables of each answer."""
    from overlap_callbacks.report.terminal import drawn

    print_tables(drawn(document, everything))


def print_tables(tables: RenderableType) -> None:
    """Print tables, cleaned of what could steer the terminal."""
    from overlap_callbacks.cli._console import open_console
    from overlap_callbacks.report.terminal import SanitizedRenderable

    open_console().print(SanitizedRenderable(tables))


def draw_matrix(view: TrafficView, svg: Path | None, png: Path | None) -> list[str]:
    """Draw a traffic matrix into the files that the user named.

    Returns:
        The files.

    Raises:
        click.ClickException: a file cannot be written, or matplotlib is missing.
    """
    from overlap_callbacks.analysis.communication import heat_map

    if png is not None:
        require("matplotlib", "plots")
    if svg is not None:
        _write(svg, "--svg", heat_map.svg(view, standalone=True).encode())
    if png is not None:
        _write(png, "--png", heat_map.png(view))
    return [str(path) for path in (svg, png) if path is not None]


def _write(path: Path, option: str, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"{option} {path} cannot be written: {error.strerror}") from None


def require(module: str, extra: str) -> None:
    """Check that an optional package is installed.

    Raises:
        click.ClickException: it is not; the message names the extra to install.
    """
    if importlib.util.find_spec(module) is None:
        raise click.ClickException(f"{module} is not installed: pip install 'overlap-callbacks[{extra}]'")
