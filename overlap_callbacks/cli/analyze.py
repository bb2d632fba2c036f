"""``overlap analyze``: figures of overlap from trace files of one rank or of several."""

from __future__ import annotations

import functools
import os
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
@step_option
@click.option(
    "--processes", type=click.IntRange(min=1), help="Files read at once. [default: one per core, at most eight]"
)
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
    step: str | None,
    processes: int | None,
    everything: bool,
) -> None:
    """Overlap in traces: one, or those of several ranks of a job side by side.

    TRACE is a file of torch.profiler (.json or .json.gz, of NVIDIA, AMD or Intel devices or of a CPU job), an export of
    Nsight Systems (nsys export --type sqlite), a .zip of files, a folder, or a quoted pattern such as 'run/rank*.json'.
    """
    # Nothing here multiplies matrices, and the threads for it take longer to start than a small trace to read.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    end_quickly()
    with loading():
        from overlap_callbacks.report.views.trace_verdict import problems_of
        from overlap_callbacks.report.views.traces import MAX_DEVICES, trace_document
        from overlap_callbacks.traces import TraceError, analyze_files, find_traces

    add_rules(rules, patterns)
    steps = step_pattern(step)
    check_packages(parquet, xlsx)
    try:
        files = find_traces(traces)
        what = f"reading {files[0].name}" if len(files) == 1 else f"reading {len(files)} traces"
        with with_progress(what) as progress:
            result = analyze_files(files, processes=processes, progress=progress, steps=steps)
    except TraceError as error:
        raise click.ClickException(one_line(str(error))) from None
    table = None
    if csv or parquet or xlsx:
        from overlap_callbacks.report import trace_tables

        rows_of = functools.partial(trace_tables.analysis_rows, result)
        write_table_files(trace_tables.ANALYSIS_TABLES, rows_of, parquet, xlsx)
        table = trace_tables.as_csv(rows_of(csv)) if csv else None
    document = functools.partial(trace_document, most=None if everything else MAX_DEVICES)
    print_result(result, as_json, output, table, document, problems_of(result), everything)
