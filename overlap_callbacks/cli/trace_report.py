"""What ``overlap report`` does with trace files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from overlap_callbacks.cli._output import one_line, print_json, with_progress


def trace_files(paths: Sequence[Path]) -> list[Path] | None:
    """The paths, if they are traces or folders of traces; None if they are runs.

    Raises:
        click.UsageError: some are traces and some are runs.
    """
    others = [path for path in paths if not _is_of_traces(path)]
    if len(others) == len(paths):
        return None
    if others:
        raise click.UsageError(one_line(f"a page is of traces or of runs: {others[0]} is no trace"))
    return list(paths)


def _is_of_traces(path: Path) -> bool:
    from overlap_callbacks.analysis.results.run import FILE_NAME
    from overlap_callbacks.report import record
    from overlap_callbacks.traces.sources import holds_traces

    if path.is_dir() and ((path / FILE_NAME).exists() or record.runs_in(path)):
        return False
    return holds_traces(path)


def write_report(files: Sequence[Path], output: Path | None, as_json: bool) -> None:
    """Write the page of traces.

    Args:
        files: the traces, or folders of them.
        output: the page; None for ``report.html`` in this folder.
        as_json: print the analysis as JSON too.

    Raises:
        click.ClickException: a file cannot be read, or the page cannot be written.
    """
    from overlap_callbacks.report.html.document import write_document
    from overlap_callbacks.report.views.traces import trace_document
    from overlap_callbacks.traces import TraceError, analyze_files, find_traces

    output = Path("report.html") if output is None else output
    try:
        found = find_traces(files)
        with with_progress(f"reading {len(found)} traces") as progress:
            analysis = analyze_files(found, progress=progress)
        size = write_document(trace_document(analysis), output)
    except TraceError as error:
        raise click.ClickException(one_line(str(error))) from None
    except OSError as error:
        raise click.ClickException(
            one_line(f"{output} cannot be written: {error.strerror}; name another file with --output")
        ) from None
    if as_json:
        print_json(analysis)
    click.echo(one_line(f"The page is {output} ({size / 1e6:.1f} MB)"), err=True)
