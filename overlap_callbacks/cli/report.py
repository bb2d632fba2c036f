"""Commands on records: ``overlap show`` prints, ``overlap report`` makes a page, ``overlap trace`` writes a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks.cli import InconclusiveError
from overlap_callbacks.cli._output import (
    newest_run,
    one_line,
    open_console,
    print_comparison,
    print_json,
    print_record,
    read_record,
    refusing,
    require,
    with_ledger,
    with_progress,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from overlap_callbacks.report.record import Record

# Windows whose times of collectives are averaged.
_OF_WINDOWS = 8


@click.command("show")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--all", "everything", is_flag=True, help="All tables of the report page.")
@click.option("--causal", is_flag=True, help="Which collective holds the step up, alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; it holds everything.")
def show(runs: tuple[Path, ...], everything: bool, causal: bool, as_json: bool) -> None:
    """Print the results of RUN, a run folder or its overlap.jsonl; several are compared.

    Of a folder of runs, those of the newest are printed.
    """
    newest = [newest_run(run) for run in runs]
    if len(newest) == 1:
        print_record(newest[0], as_json, everything, causal)
    elif causal:
        raise click.UsageError("--causal: give one run")
    elif as_json:
        raise click.UsageError("--json: give one run")
    else:
        print_comparison(newest, everything)


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
def report(runs: tuple[Path, ...], output: Path | None, axis: str | None, as_json: bool) -> None:
    """Make a page of RUN, a run folder or its overlap.jsonl; several are compared. Of a folder of runs, of the newest.

    RUN may be a trace of torch.profiler too (.json or .json.gz), several, or a folder of them: one page of all.

    The page is one HTML file that needs nothing else: it opens from a disk, without a network, and prints.
    """
    require("jinja2", "report")
    if _are_traces(runs):
        if axis is not None:
            raise click.UsageError("--axis compares runs; these are traces")
        _report_traces(runs, Path("report.html") if output is None else output, as_json)
        return
    from overlap_callbacks.report import write_page
    from overlap_callbacks.report.run_json import run_as_json
    from overlap_callbacks.report.views.runs import distinct_names
    from overlap_callbacks.report.views.scaling import AxisError, compared, scaling_data

    if axis is not None and len(runs) < 2:
        raise click.UsageError("--axis compares several runs: give two or more")
    records = [read_record(newest_run(run)) for run in runs]
    if len(records) == 1:
        with_ledger(records[0])
    if output is None:
        output = (records[0].path.parent if len(records) == 1 else Path()) / "report.html"
    try:
        size = _written(output, lambda path: write_page(records, path, axis))
    except AxisError as error:
        raise click.ClickException(one_line(f"--{error}")) from None
    if as_json:
        content = {"page": str(output), "bytes": size, "runs": [run_as_json(record) for record in records]}
        found = compared(distinct_names(records), records, axis) if len(records) > 1 else None
        print_json(content if found is None else {**content, "against": scaling_data(found)})


def _written(output: Path, write: Callable[[Path], int]) -> int:
    """Write a page, say where it is, and return its size in bytes; ends the command if it cannot be written."""
    console = open_console(stderr=True)
    with writing(str(output), "; name another file with --output"), console.status("making the page"):
        size = write(output)
    console.print(
        one_line(f"The page is {output} ({size / 2**20:.1f} MiB)"), highlight=False, markup=False, soft_wrap=True
    )
    return size


def _are_traces(paths: Sequence[Path]) -> bool:
    """Whether the paths are traces or folders of traces, not runs; a ``UsageError`` if they are mixed."""
    others = [path for path in paths if not _is_of_traces(path)]
    if others and len(others) < len(paths):
        raise click.UsageError(one_line(f"a page is of traces or of runs: {others[0]} is no trace"))
    return not others


def _is_of_traces(path: Path) -> bool:
    from overlap_callbacks.report.record import holds_runs
    from overlap_callbacks.traces.sources import holds_traces

    return not holds_runs(path) and holds_traces(path)


def _report_traces(paths: Sequence[Path], output: Path, as_json: bool) -> None:
    from overlap_callbacks.report.html import write_document
    from overlap_callbacks.report.views.traces import trace_document
    from overlap_callbacks.traces import TraceError, analyze_files, find_traces

    with refusing(TraceError):
        files = find_traces(paths)
        with with_progress(f"reading {len(files)} traces") as progress:
            analysis = analyze_files(files, progress=progress)
    _written(output, lambda path: write_document(trace_document(analysis), path))
    if as_json:
        print_json(analysis)


@click.command("trace")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--for", "reader", type=click.Choice(["perfetto", "inductor"]), default="perfetto", show_default=True,
    help="Profiled steps for ui.perfetto.dev or chrome://tracing; or times of collectives alone, for torch.compile.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the trace to this file.  [default: perfetto.json or inductor.json in the folder of the run]",
)  # fmt: skip
@click.option(
    "--window", type=click.IntRange(min=0), default=None,
    help="Of this window.  [default: perfetto: the last that has steps; inductor: the last eight that count]",
)  # fmt: skip
def trace(run: Path, reader: str, output: Path | None, window: int | None) -> None:
    """Write what was measured in RUN as a trace for other tools.

    For Perfetto: the profiled steps of a window, both modes, with kernels, collectives, power and clocks. For inductor,
    the compiler of torch.compile: how long collectives take alone, without waiting for late ranks. RUN is a run folder,
    or its overlap.jsonl; of a folder of runs, the newest is taken.
    """
    import msgspec

    record = read_record(newest_run(run))
    if window is not None and all([report.window != window for report in record.windows]):
        raise click.UsageError(f"the record has no window {window}; it has {len(record.windows)} windows")
    content, what, notes = (_for_perfetto if reader == "perfetto" else _for_inductor)(record, window)
    output = record.path.parent / f"{reader}.json" if output is None else output
    encoded = msgspec.json.encode(content)
    write_file(output, "--output", encoded)
    for line in (f"{output}: {what} ({len(encoded) / 2**20:.1f} MiB)", *notes):
        click.echo(one_line(line), err=True)


def _for_perfetto(record: Record, window: int | None) -> tuple[dict[str, Any], str, list[str]]:
    from overlap_callbacks.report.perfetto import perfetto_trace

    if window is None:
        found, missing = record.latest("pictures"), "the record has no window with profiled steps"
    else:
        found = next((record.whole(report) for report in record.windows if report.window == window), None)
        missing = f"window {window} has no profiled steps"
    if found is None or not found.pictures:
        raise InconclusiveError(missing)
    modes = " and ".join([picture.mode.value for picture in found.pictures])
    notes = []
    if any([picture.detail is None for picture in found.pictures]):
        notes = ["Note: this record is older than details of steps: kernels have no names in the trace"]
    return perfetto_trace(found), f"window {found.window}, {modes} step; open it in ui.perfetto.dev", notes


def _for_inductor(record: Record, window: int | None) -> tuple[dict[str, Any], str, list[str]]:
    from overlap_callbacks.report.inductor import inductor_trace

    chosen = [report for report in record.valid_windows if window in (None, report.window)]
    windows, sent = [record.whole(report) for report in chosen[-_OF_WINDOWS:]], record.latest("messages")
    with refusing(ValueError, refusal=InconclusiveError):
        if not windows:
            raise ValueError("no window counts" if window is None else f"window {window} does not count")
        content = inductor_trace(windows, None if sent is None else sent.messages)
    number = len(content["traceEvents"])
    told = "torch._inductor.config.aten_distributed_optimizations.profile_guided_estimations_profile_path"
    return content, f"times of {number} collectives alone", [f"Give its path to {told}"]
