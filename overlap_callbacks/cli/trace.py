"""``overlap trace``: the profiled steps of a run as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from overlap_callbacks.cli._output import newest_run, one_line, read_record, write_file


@click.command("trace")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--perfetto", "output", required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Write the trace to this file, for https://ui.perfetto.dev or chrome://tracing.",
)  # fmt: skip
@click.option("--window", type=click.IntRange(min=0), default=None, help="Of this window. [default: the last that has]")
def command(run: Path, output: Path, window: int | None) -> None:
    """Write the profiled steps of a window of RUN as a trace: both modes, kernels, collectives, power and clocks.

    RUN is a run folder, or its overlap.jsonl; of a folder of runs, the newest is taken.
    """
    import msgspec

    from overlap_callbacks.report.perfetto import perfetto_trace

    record = read_record(newest_run(run))
    if window is None:
        found = record.latest("pictures")
        missing = "the record has no window with profiled steps"
    else:
        found = next((record.whole(report) for report in record.windows if report.window == window), None)
        missing = f"the record has no window {window}; it has {len(record.windows)} windows"
        if found is not None and not found.pictures:
            found, missing = None, f"window {window} has no profiled steps"
    if found is None:
        raise click.ClickException(missing)
    content = msgspec.json.encode(perfetto_trace(found))
    write_file(output, "--perfetto", content)
    modes = " and ".join(picture.mode.value for picture in found.pictures)
    line = f"{output}: window {found.window}, {modes} step ({len(content) / 1e6:.1f} MB); open it in ui.perfetto.dev"
    click.echo(one_line(line), err=True)
    if any(picture.detail is None for picture in found.pictures):
        click.echo("Note: this record is older than details of steps: kernels have no names in the trace", err=True)
