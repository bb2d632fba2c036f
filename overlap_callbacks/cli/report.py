"""``overlap report``: makes one HTML page of one run or of several."""

from __future__ import annotations

from pathlib import Path

import click

from overlap_callbacks.cli._output import newest_run, one_line, print_json, read_record, require
from overlap_callbacks.cli.trace_report import trace_files, write_report


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="The page; an older one is replaced. [default: report.html in the folder of RUN; of several, in this folder]",
)  # fmt: skip
@click.option(
    "--axis", metavar="NAME", default=None,
    help="Show several runs against NAME: world_size, tokens_per_step, precision, model, a dimension of parallelism, "
    "one of your settings, or an environment variable. [default: world_size, if it varies]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON too.")
def command(runs: tuple[Path, ...], output: Path | None, axis: str | None, as_json: bool) -> None:
    """Make a page of RUN, a run folder or its overlap.jsonl; several are compared. Of a folder of runs, of the newest.

    RUN may be a trace of torch.profiler too (.json or .json.gz), several, or a folder of them: one page of all.

    The page is one HTML file that needs nothing else: it opens from a disk, without a network, and prints.
    """
    require("jinja2", "report")
    if (traces := trace_files(runs)) is not None:
        if axis is not None:
            raise click.UsageError("--axis compares runs; these are traces")
        write_report(traces, output, as_json)
        return
    from overlap_callbacks.cli._console import open_console
    from overlap_callbacks.report import write_page
    from overlap_callbacks.report.run_json import run_as_json
    from overlap_callbacks.report.views.runs import distinct_names
    from overlap_callbacks.report.views.scaling import AxisError, as_plain, compared

    if axis is not None and len(runs) < 2:
        raise click.UsageError("--axis compares several runs: give two or more")
    console = open_console(stderr=True)
    records = [read_record(newest_run(run)) for run in runs]
    if output is None:
        output = (records[0].path.parent if len(records) == 1 else Path()) / "report.html"
    try:
        with console.status("making the page"):
            size = write_page(records, output, axis)
    except AxisError as error:
        raise click.ClickException(one_line(f"--{error}")) from None
    except OSError as error:
        raise click.ClickException(
            one_line(f"{output} cannot be written: {error.strerror}; name another file with --output")
        ) from None
    if as_json:
        content = {"page": str(output), "bytes": size, "runs": [run_as_json(record) for record in records]}
        found = compared(distinct_names(records), records, axis) if len(records) > 1 else None
        print_json(content if found is None else {**content, "against": as_plain(found)})
    console.print(one_line(f"The page is {output} ({size / 1e6:.1f} MB)"), highlight=False, markup=False)
