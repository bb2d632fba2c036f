"""The command ``overlap``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from overlap_callbacks._version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlap_callbacks.report.record import Record


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """What overlapping computation with communication costs and saves."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="replace")


@main.command()
@click.option("--framework", type=click.Choice(["pytorch", "lightning"]), default="pytorch", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=400, show_default=True, help="Optimizer steps.")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks of the model.")
@click.option("--hidden", type=click.IntRange(min=8), default=256, show_default=True, help="Width; a multiple of 4.")
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences a rank and step.")
@click.option("--sequence", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of a sequence.")
@click.option("--bucket-mb", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="Size of DDP's gradient buckets, MiB.")  # fmt: skip
@click.option(
    "--every", type=click.IntRange(min=82), default=100, show_default=True, help="Steps from window to window."
)
@click.option("--control", is_flag=True, help="A/A run: both arms overlapped, so all differences are errors.")
@click.option("--wandb", is_flag=True, help="Log to W&B too.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder of the record.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(
    framework: str,
    steps: int,
    layers: int,
    hidden: int,
    batch: int,
    sequence: int,
    bucket_mb: float,
    every: int,
    control: bool,
    wandb: bool,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Train a small GPT with two processes (or one on every GPU), and measure its overlap."""
    import torch
    from rich.console import Console

    from overlap_callbacks.cli.demo.config import DemoConfig
    from overlap_callbacks.cli.demo.launch import launch
    from overlap_callbacks.monitor.run_info import default_run_folder

    if hidden % 4:
        raise click.BadParameter(
            f"{hidden} is not a multiple of 4, the number of attention heads", param_hint="--hidden"
        )
    if framework == "lightning":
        _need("lightning", "lightning")
    if wandb:
        _need("wandb", "wandb")
    gpus = torch.cuda.device_count()
    config = DemoConfig(
        framework=framework,
        steps=steps,
        layers=layers,
        hidden=hidden,
        sequence=sequence,
        batch=batch,
        bucket_mb=bucket_mb,
        processes=gpus if gpus >= 2 else 2,
        backend="nccl" if gpus >= 2 else "gloo",
        run_dir=run_dir or default_run_folder("demo-"),
        every_n_steps=every,
        control=control,
        wandb=wandb,
    )
    console = Console(stderr=True)
    where = f"{gpus} GPUs with NCCL" if gpus >= 2 else "the CPU with two processes and Gloo"
    console.print(f"Training a GPT of {layers} layers, width {hidden}, on {where}.")
    try:
        launch(config, console)
    except Exception as error:
        raise click.ClickException(f"a rank of the demo failed:\n{error}") from None
    _print_record(config.run_dir, as_json)
    words = f"The record is {config.run_dir / 'overlap.jsonl'}; see it again with: overlap show {config.run_dir}"
    console.print(words, markup=False)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Kernels, pairs, dimensions, power and collectives too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; it holds everything.")
def show(run: Path, everything: bool, as_json: bool) -> None:
    """Print the results of RUN: a run folder, or its overlap.jsonl; of a folder of runs, those of the newest."""
    _print_record(_newest(run), as_json, everything)


@main.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default="report.html", show_default=True,
    help="The page; an older one is replaced.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON too.")
def report_page(runs: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Make a page of RUN, a run folder or its overlap.jsonl; several are compared. Of a folder of runs, of the newest.

    The page is one HTML file that needs nothing else: it opens from a disk, without a network, and prints.
    """
    _need("jinja2", "report")
    from rich.console import Console

    from overlap_callbacks.report import terminal, write_page

    console = Console(stderr=True)
    found = [_read_record(_newest(run)) for run in runs]
    try:
        with console.status("making the page"):
            size = write_page(found, output)
    except OSError as error:
        raise click.ClickException(f"--output {output} cannot be written: {error.strerror}") from None
    if as_json:
        _print_json({"page": str(output), "bytes": size, "runs": [terminal.as_json(one) for one in found]})
    console.print(_one_line(f"The page is {output} ({size / 1e6:.1f} MB)"), highlight=False, markup=False)


@main.command()
@click.option("--entity", required=True, help="W&B user or team.")
@click.option("--project", required=True, help="Project of the entity, with runs that WandbSink has logged.")
@click.option("--name", default="Overlap cost", show_default=True, help="Name of the saved view.")
@click.option("--dry-run", is_flag=True, help="Print what would be saved; needs no network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: with --dry-run, the whole of what would be sent.")
def workspace(entity: str, project: str, name: str, dry_run: bool, as_json: bool) -> None:
    """Save a W&B workspace that shows what overlap costs."""
    from rich.console import Console

    from overlap_callbacks.sinks.wandb import workspace as views

    try:
        views.check_names(entity, project, name)
        if dry_run and not as_json:
            click.echo(f"{entity}/{project}\n{views.outline(name)}")
            return
        view = views.build(entity, project, name)
        found: dict[str, Any] = {"entity": entity, "project": project, "name": name}
        if dry_run:
            found |= {"spec": views.spec(view)}
        else:
            with Console(stderr=True).status("W&B saves the view"):  # it tries again where a server does not answer
                found |= {"url": views.save(view)}
    except views.WorkspaceError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        _print_json(found)
    else:
        click.echo(f"The workspace is {found['url']}")


_RULE = click.option(
    "--rule", "rules", multiple=True, metavar="FAMILY=REGEX",
    help="Kernels whose name holds REGEX are of FAMILY; before the rules built in. May be repeated.",
)  # fmt: skip
_COMMUNICATION = click.option(
    "--communication", "patterns", multiple=True, metavar="REGEX",
    help="Kernels whose name holds REGEX communicate, beside those built in. May be repeated.",
)  # fmt: skip
_OUTPUT = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything to this file too, as JSON."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


@main.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@_JSON
@click.option(
    "--csv", type=click.Choice(["steps", "collectives", "families", "estimates", "skew"]), help="Print a table as CSV."
)
@_OUTPUT
@_RULE
@_COMMUNICATION
def analyze(
    traces: tuple[Path, ...],
    as_json: bool,
    csv: str | None,
    output: Path | None,
    rules: tuple[str, ...],
    patterns: tuple[str, ...],
) -> None:
    """Overlap in traces of torch.profiler: one, or those of several ranks of a job side by side.

    TRACE is a .json or .json.gz file with kernels of NVIDIA or AMD devices, or of a CPU job.
    """
    from overlap_callbacks.report import terminal_traces as tables
    from overlap_callbacks.traces import TraceError, analyze, read_trace

    _add_rules(rules, patterns)
    try:
        found = analyze([_read_showing(trace, read_trace) for trace in traces])
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    problems = [*dict.fromkeys(problem for trace in found.traces for problem in trace.problems), *found.problems]
    _print_found(
        found, as_json, output, tables.analysis_csv(found, csv) if csv else None, tables.analysis_tables, problems
    )


@main.command()
@click.argument("overlapped", type=click.Path(path_type=Path))
@click.argument("sequential", type=click.Path(path_type=Path))
@_JSON
@click.option("--csv", type=click.Choice(["figures", "kernels", "pairs", "unmatched"]), help="Print a table as CSV.")
@_OUTPUT
@_RULE
@_COMMUNICATION
def compare(
    overlapped: Path,
    sequential: Path,
    as_json: bool,
    csv: str | None,
    output: Path | None,
    rules: tuple[str, ...],
    patterns: tuple[str, ...],
) -> None:
    """Equations 1 to 5 from two traces of one rank of one job: OVERLAPPED as it is, SEQUENTIAL without overlap."""
    from overlap_callbacks.report import terminal_traces as tables
    from overlap_callbacks.traces import TraceError, compare, read_trace

    _add_rules(rules, patterns)
    try:
        found = compare(_read_showing(overlapped, read_trace), _read_showing(sequential, read_trace))
    except (TraceError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    _print_found(
        found,
        as_json,
        output,
        tables.comparison_csv(found, csv) if csv else None,
        tables.comparison_tables,
        found.problems,
    )


def _read_showing(path: Path, read: Callable[..., Any]) -> Any:
    """Read a file of any size, with a bar where it takes long."""
    from rich.console import Console

    from overlap_callbacks.cli.progress import progress_of

    with progress_of(f"reading {path.name}", Console(stderr=True)) as progress:
        return read(path, progress)


def _print_found(
    found: Any,
    as_json: bool,
    output: Path | None,
    csv: str | None,
    tables: Callable[[Any], Any],
    problems: Sequence[str],
) -> None:
    import msgspec

    if csv is not None and as_json:
        raise click.UsageError("give either --json or --csv")

    if output is not None:
        try:
            output.write_bytes(msgspec.json.encode(found) + b"\n")
        except OSError as error:
            raise click.ClickException(f"--output {output} cannot be written: {error.strerror}") from None
    if csv is not None:
        click.echo(csv, nl=False)
        for problem in problems:
            click.echo(f"Note: {problem}", err=True)
    elif as_json:
        _print_json(found)
    else:
        _print_tables(tables(found))


def _add_rules(rules: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    from overlap_callbacks.analysis import name_rules

    for pattern in patterns:
        _check_pattern(pattern, "--communication")
        name_rules.communication_patterns.append(pattern)
    for position, text in enumerate(rules):
        family, equals, pattern = text.partition("=")
        _check_pattern(pattern, "--rule")
        if not (family and equals and pattern):
            raise click.BadParameter(f"{text!r} must be of the form FAMILY=REGEX", param_hint="--rule")
        name_rules.families.insert(position, name_rules.Rule(family, pattern))


def _check_pattern(pattern: str, option: str) -> None:
    import re

    try:
        re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint=option) from None


def _newest(path: Path) -> Path:
    """The newest of a folder of runs, which is said; anything else as it is."""
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
    click.echo(_one_line(line), err=True)
    return runs[-1]


def _read_record(run: Path) -> Record:
    from overlap_callbacks.report import record

    try:
        return cast(record.Record, _read_showing(run, record.read))
    except record.RecordError as error:
        raise click.ClickException(_one_line(str(error))) from None


def _print_record(run: Path, as_json: bool, everything: bool = False) -> None:
    from overlap_callbacks.report import terminal

    found = _read_record(run)
    if as_json:
        _print_json(terminal.as_json(found))
    else:
        _print_tables(terminal.tables(found, everything))


def _one_line(text: str) -> str:
    from overlap_callbacks.report.terminal import one_line

    return one_line(text, 2000)


def _print_json(content: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2))  # as bytes: UTF-8 whatever the terminal


def _print_tables(tables: RenderableType) -> None:
    from rich.console import Console

    from overlap_callbacks.report.terminal import SanitizedRenderable

    Console().print(SanitizedRenderable(tables))


def _need(module: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise click.ClickException(f"{module} is not installed: pip install 'overlap-callbacks[{extra}]'")
