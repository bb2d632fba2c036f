"""``overlap analyze``: overlap figures from trace files. ``overlap compare``: equations 1 to 5 from two of them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from overlap_callbacks.cli import ExitCode, end_quickly, loading
from overlap_callbacks.cli._options import json_option, with_options
from overlap_callbacks.cli._output import (
    one_line,
    print_document,
    print_json,
    require,
    with_progress,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from overlap_callbacks.report.trace_tables import Rows
    from overlap_callbacks.report.views.elements import Document

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Tables of an analysis, and of a comparison, that can be printed as CSV.
ANALYSIS_TABLES = (
    "steps", "time", "paths", "kernels", "collectives", "exposure", "on_host_collectives", "families", "estimates",
    "copies", "queues", "utilisation", "sizes", "skew",
)  # fmt: skip
COMPARISON_TABLES = ("figures", "kernels", "ranges", "pairs", "unmatched")
_shared_options = with_options(
    click.option(
        "--output", type=click.Path(path_type=Path, dir_okay=False),
        help="Write everything to this file too, as JSON.",
    ),
    click.option(
        "--parquet", type=click.Path(path_type=Path, file_okay=False),
        help="Write all tables into this folder too, each as a Parquet file; needs pyarrow.",
    ),
    click.option(
        "--xlsx", type=click.Path(path_type=Path, dir_okay=False),
        help="Write all tables to this Excel file too, each as a sheet; needs XlsxWriter.",
    ),
    click.option(
        "--rule", "rules", multiple=True, metavar="FAMILY=REGEX",
        help="Kernels whose name holds REGEX are of FAMILY; before the rules built in. May be repeated.",
    ),
    click.option(
        "--communication", "patterns", multiple=True, metavar="REGEX",
        help="Kernels and copies whose name holds REGEX communicate, besides those built in. May be repeated.",
    ),
    click.option(
        "--step", metavar="REGEX",
        help="Ranges of the host whose name holds REGEX are the steps, instead of ProfilerStep#. Its first group is "
        "the step's number.",
    ),
)  # fmt: skip


def _options(tables: Sequence[str]) -> Callable[[_Function], _Function]:
    """The options of a command on traces that has these tables."""
    csv = click.option("--csv", type=click.Choice(list(tables)), help="Print a table as CSV.")
    return with_options(json_option, csv, _shared_options)


@click.command("analyze")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@_options(ANALYSIS_TABLES)
@click.option(
    "--processes", type=click.IntRange(min=1), help="Files read at once. [default: one per core, at most eight]"
)
@click.option("--all", "everything", is_flag=True, help="Show all tables of all files, with all rows.")
def analyze(traces: tuple[Path, ...], processes: int | None, everything: bool, **given: Any) -> None:
    """Overlap in traces: one, or those of several ranks of a job side by side.

    TRACE is a file of torch.profiler (.json, also packed as .gz, .bz2, .xz or .zst; of NVIDIA, AMD or Intel devices or
    of a CPU job), an export of Nsight Systems (nsys export --type sqlite or parquetdir), a .zip or .tar, a folder,
    or a quoted pattern such as 'run/rank*.json'.
    """
    # Nothing here multiplies matrices, and starting those threads takes longer than reading a small trace.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    end_quickly()
    with loading():
        from overlap_callbacks.report.trace_tables import analysis_rows
        from overlap_callbacks.report.views.trace_verdict import problems_of
        from overlap_callbacks.report.views.traces import MAX_DEVICES, trace_document
        from overlap_callbacks.traces import analyze_files, find_traces

    steps = _prepared(given)
    with _reading(traces):
        files = find_traces(traces)
        what = f"reading {files[0].name}" if len(files) == 1 else f"reading {len(files)} traces"
        with with_progress(what) as progress:
            found = analyze_files(files, processes=processes, progress=progress, steps=steps)
    if steps is not None and not any([trace.steps for trace in found.traces]):
        raise click.UsageError(
            one_line(f"--step {steps.pattern} matches no range: without it, the whole file is a step")
        )
    document = functools.partial(trace_document, found, None if everything else MAX_DEVICES)
    rows_of = functools.partial(analysis_rows, found)
    _write(found, given, ANALYSIS_TABLES, rows_of, document, problems_of(found), everything)


@click.command("compare")
@click.argument("overlapped", type=click.Path(path_type=Path))
@click.argument("sequential", type=click.Path(path_type=Path))
@_options(COMPARISON_TABLES)
@click.option("--force", is_flag=True, help="Show the tables of files that do not fit each other too.")
def compare(overlapped: Path, sequential: Path, force: bool, **given: Any) -> None:
    """Equations 1 to 5 from two traces of one rank of one job: OVERLAPPED as it is, SEQUENTIAL without overlap.

    The exit code is 3 if they cannot be computed, e.g. where nothing communicates, and 2 if the files do not fit each
    other.
    """
    end_quickly()
    with loading():
        from overlap_callbacks.report.trace_tables import comparison_rows
        from overlap_callbacks.report.views.traces import comparison_document
        from overlap_callbacks.traces import TraceError, compare_files

    steps = _prepared(given)
    what = f"reading {overlapped.name} and {sequential.name}"
    with _reading([overlapped, sequential]):
        with with_progress(what) as progress:
            found = compare_files(overlapped, sequential, progress, steps)
        if found.misfits and not force:
            raise TraceError(
                f"the files do not fit each other: {'; '.join(found.misfits)}. --force shows their tables all the same"
            )
    document = functools.partial(comparison_document, found)
    _write(found, given, COMPARISON_TABLES, functools.partial(comparison_rows, found), document, found.problems)
    if "speedup_vs_sequential" not in found.figures:
        raise SystemExit(ExitCode.INCONCLUSIVE)


@contextlib.contextmanager
def _reading(paths: Sequence[Path]) -> Iterator[None]:
    """End the command if the traces cannot be read or do not fit each other; of a run, with what shows it."""
    from overlap_callbacks.report.record import holds_runs
    from overlap_callbacks.traces import TraceError

    try:
        yield
    except TraceError as error:
        runs = [path for path in paths if holds_runs(path)]
        hint = f". For a run: overlap show {runs[0]}" if runs else ""
        raise click.ClickException(one_line(f"{error}{hint}")) from None


def _prepared(given: dict[str, Any]) -> re.Pattern[str] | None:
    """Check the options before anything is read, and put the user's naming rules before the built-in ones.

    They are gone when the command has ended. Returns the pattern of step names. Ends the command if an option is wrong
    or a package is missing.
    """
    from overlap_callbacks.analysis import name_rules

    extended: tuple[list[Any], ...] = (name_rules.communication_patterns, name_rules.families)
    for rules in extended:
        click.get_current_context().call_on_close(functools.partial(rules.__setitem__, slice(None), [*rules]))
    for pattern in given["patterns"]:
        _check_pattern(pattern, "--communication")
        name_rules.communication_patterns.append(pattern)
    for position, text in enumerate(given["rules"]):
        family, equals, pattern = text.partition("=")
        _check_pattern(pattern, "--rule")
        if not (family and equals and pattern):
            raise click.BadParameter(f"{text!r} must be of the form FAMILY=REGEX", param_hint="--rule")
        name_rules.families.insert(position, name_rules.Rule(family, pattern))
    if given["step"] is not None:
        _check_pattern(given["step"], "--step")
    for option, module in (("parquet", "pyarrow"), ("xlsx", "xlsxwriter")):
        if given[option] is not None:
            require(module, "tables")
    if given["csv"] is not None and given["as_json"]:
        raise click.UsageError("give either --json or --csv")
    return None if given["step"] is None else re.compile(given["step"])


def _check_pattern(pattern: str, option: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint=option) from None


def _write(
    found: Any,
    given: dict[str, Any],
    tables: Sequence[str],
    rows_of: Callable[[str], Rows],
    document: Callable[[], Document],
    problems: Sequence[str],
    everything: bool = False,
) -> None:
    """Write the files that the user asked for, and print the result in the requested form, or end the command.

    Args:
        found: the result.
        given: options.
        tables: their names.
        rows_of: makes a table, by name.
        document: makes the readable document.
        problems: printed to stderr next to a CSV; the other forms contain them.
        everything: whether to print the whole document.
    """
    import msgspec

    from overlap_callbacks.report.trace_tables import as_csv, write_parquet, write_xlsx

    for option, write in (("parquet", write_parquet), ("xlsx", write_xlsx)):
        if given[option] is not None:
            with writing(f"--{option} {given[option]}"):
                write({name: rows_of(name) for name in tables}, given[option])
    if given["output"] is not None:
        write_file(given["output"], "--output", msgspec.json.encode(found) + b"\n")
    if given["csv"] is not None:
        click.echo(as_csv(rows_of(given["csv"])), nl=False)
        for problem in problems:
            click.echo(one_line(f"Note: {problem}"), err=True)
    elif given["as_json"]:
        print_json(found)
    else:
        print_document(document(), everything)
