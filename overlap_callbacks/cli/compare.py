"""``overlap compare``: equations 1 to 5 from an overlapped and a sequential trace of one job."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from overlap_callbacks.cli._options import (
    add_rules,
    communication_option,
    csv_option,
    json_option,
    output_option,
    rule_option,
    step_option,
    step_pattern,
)
from overlap_callbacks.cli._output import one_line, print_result, with_progress
from overlap_callbacks.cli._start import end_quickly, loading
from overlap_callbacks.cli._table_files import check_packages, parquet_option, write_table_files, xlsx_option

# Tables of a comparison that can be printed as CSV.
TABLES = ("figures", "kernels", "ranges", "pairs", "unmatched")


@click.command("compare")
@click.argument("overlapped", type=click.Path(path_type=Path))
@click.argument("sequential", type=click.Path(path_type=Path))
@json_option
@csv_option(TABLES)
@output_option
@parquet_option
@xlsx_option
@rule_option
@communication_option
@step_option
def command(
    overlapped: Path,
    sequential: Path,
    as_json: bool,
    csv: str | None,
    output: Path | None,
    parquet: Path | None,
    xlsx: Path | None,
    rules: tuple[str, ...],
    patterns: tuple[str, ...],
    step: str | None,
) -> None:
    """Equations 1 to 5 from two traces of one rank of one job: OVERLAPPED as it is, SEQUENTIAL without overlap."""
    end_quickly()
    with loading():
        from overlap_callbacks.report import trace_tables
        from overlap_callbacks.report.views.traces import comparison_document
        from overlap_callbacks.traces import TraceError, compare_files

    add_rules(rules, patterns)
    steps = step_pattern(step)
    check_packages(parquet, xlsx)
    try:
        with with_progress(f"reading {overlapped.name} and {sequential.name}") as progress:
            result = compare_files(overlapped, sequential, progress, steps)
    except (TraceError, ValueError) as error:
        raise click.ClickException(one_line(str(error))) from None
    write_table_files(
        trace_tables.COMPARISON_TABLES, functools.partial(trace_tables.comparison_rows, result), parquet, xlsx
    )
    table = trace_tables.as_csv(trace_tables.comparison_rows(result, csv)) if csv else None
    print_result(result, as_json, output, table, comparison_document, result.problems)
