"""``overlap analyze``: figures of overlap from trace files of one rank or of several."""

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
)
from overlap_callbacks.cli._output import one_line, print_result, read_with_progress
from overlap_callbacks.cli._table_files import check_packages, parquet_option, write_table_files, xlsx_option

# Tables of an analysis that can be printed as CSV.
TABLES = (
    "steps", "time", "paths", "kernels", "collectives", "sizes", "families", "estimates", "queues", "utilisation",
    "skew",
)  # fmt: skip


@click.command("analyze")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@json_option
@csv_option(TABLES)
@output_option
@parquet_option
@xlsx_option
@rule_option
@communication_option
@click.option("--all", "everything", is_flag=True, help="Show all tables of all files, with all rows.")
def command(
    traces: tuple[Path, ...],
    as_json: bool,
    csv: str | None,
    output: Path | None,
    parquet: Path | None,
    xlsx: Path | None,
    rules: tuple[str, ...],
    patterns: tuple[str, ...],
    everything: bool,
) -> None:
    """Overlap in traces of torch.profiler: one, or those of several ranks of a job side by side.

    TRACE is a .json or .json.gz file with kernels of NVIDIA or AMD devices, or of a CPU job.
    """
    from overlap_callbacks.report import terminal_traces, trace_rows
    from overlap_callbacks.traces import TraceError, analyze, read_trace

    add_rules(rules, patterns)
    check_packages(parquet, xlsx)
    try:
        result = analyze([read_with_progress(trace, read_trace) for trace in traces])
    except TraceError as error:
        raise click.ClickException(one_line(str(error))) from None
    problems = [*dict.fromkeys(problem for trace in result.traces for problem in trace.problems), *result.problems]
    write_table_files(trace_rows.ANALYSIS_TABLES, functools.partial(trace_rows.analysis_rows, result), parquet, xlsx)
    table = trace_rows.as_csv(trace_rows.analysis_rows(result, csv)) if csv else None
    tables = functools.partial(terminal_traces.analysis_tables, everything=everything)
    print_result(result, as_json, output, table, tables, problems)
