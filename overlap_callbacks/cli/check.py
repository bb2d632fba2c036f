"""``overlap check``: tests a run against limits, for continuous integration."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from overlap_callbacks.cli._options import json_option
from overlap_callbacks.cli._output import newest_run, one_line, print_json
from overlap_callbacks.cli.experiment import INTERRUPTED_CODE, KEPT

if TYPE_CHECKING:
    from overlap_callbacks.experiments.check import Finding, Limit
    from overlap_callbacks.report.record import Record

HOLDS, BROKEN, NOTHING = 0, 1, 2


@click.command("check", context_settings={"allow_interspersed_args": False})
@click.option("--max-exposed", type=float, metavar="FRACTION", help="Exposed communication, of the step.")
@click.option("--min-overlap", type=float, metavar="FRACTION", help="Communication that compute hides, of all of it.")
@click.option("--max-slowdown", type=float, metavar="FRACTION", help="Slowdown of compute by overlap.")
@click.option("--max", "maxima", multiple=True, metavar="NAME=VALUE", help="A limit on any figure. Repeatable.")
@click.option("--min", "minima", multiple=True, metavar="NAME=VALUE", help="The same from below. Repeatable.")
@click.option("--sure", is_flag=True, help="Broken only where the whole 95% interval lies beyond the limit.")
@click.option(
    "--windows", type=click.IntRange(min=1), help="End COMMAND once so many windows count. [default: let it end]"
)
@click.option("--timeout", type=click.FloatRange(min=1), help="Seconds that COMMAND may take. [default: no limit]")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Keep the record of COMMAND here.")
@json_option
@click.argument("target", nargs=-1, required=True, type=click.UNPROCESSED, metavar="RUN | -- COMMAND...")
def command(
    max_exposed: float | None,
    min_overlap: float | None,
    max_slowdown: float | None,
    maxima: tuple[str, ...],
    minima: tuple[str, ...],
    sure: bool,
    windows: int | None,
    timeout: float | None,
    run_dir: Path | None,
    as_json: bool,
    target: tuple[str, ...],
) -> None:
    """Hold RUN, a run folder or its overlap.jsonl, against limits; or COMMAND, which is run first.

    The exit code is 0 if all limits hold, 1 if one is broken, and 2 if a figure was not measured, COMMAND failed, or
    an option is wrong. A figure is judged by its mean over the windows that count.
    """
    from overlap_callbacks.experiments.check import EXPOSED_SHARE, Limit, parsed_limit

    try:
        limits = [
            Limit(option, figure, is_maximum, bound)
            for option, figure, is_maximum, bound in (
                ("--max-exposed", EXPOSED_SHARE, True, max_exposed),
                ("--min-overlap", "hidden_comm_fraction", False, min_overlap),
                ("--max-slowdown", "compute_slowdown", True, max_slowdown),
            )
            if bound is not None
        ]
        limits += [parsed_limit("--max", text) for text in maxima] + [parsed_limit("--min", text) for text in minima]
    except ValueError as error:
        raise click.UsageError(one_line(str(error))) from None
    if not limits:
        raise click.UsageError("give a limit, e.g. --max-exposed 0.1")
    path = Path(target[0])
    is_run = len(target) == 1 and (path.is_dir() or path.suffix == ".jsonl")
    if len(target) == 1 and not is_run and shutil.which(target[0]) is None:
        raise click.UsageError(one_line(f"{target[0]} is neither a run nor a command"))
    if is_run:
        _finish(newest_run(path), limits, sure, as_json, ended=False)
    with _folder_of_command(run_dir, limits) as folder:
        _check_command(target, folder, windows, timeout)
        _finish(folder, limits, sure, as_json, ended=True)


@contextlib.contextmanager
def _folder_of_command(run_dir: Path | None, limits: Sequence[Limit]) -> Iterator[Path]:
    """A folder for the record of a command. A temporary one is removed, unless Ctrl-C comes when it has a window."""
    folder = Path(tempfile.mkdtemp(prefix="overlap-check-")) if run_dir is None else run_dir.resolve()
    is_kept = run_dir is not None
    try:
        yield folder
    except KeyboardInterrupt:
        if not _has_windows(folder):
            click.echo("Interrupted before a window was measured.", err=True)
        else:
            is_kept = True
            again = " ".join(["overlap check", *[limit.as_option for limit in limits], str(folder)])
            click.echo(one_line(f"{KEPT} Judge it with: {again}"), err=True)
        raise SystemExit(INTERRUPTED_CODE) from None
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def _has_windows(folder: Path) -> bool:
    from overlap_callbacks.report import record

    try:
        return bool(record.read(folder, details=False).valid_windows)
    except record.RecordError:
        return False


def _check_command(target: Sequence[str], folder: Path, windows: int | None, timeout_s: float | None) -> None:
    """Run the command; does not return if it fails."""
    from overlap_callbacks.experiments.check import run_for_windows

    if (folder / "overlap.jsonl").exists():
        raise click.UsageError(f"--run-dir {folder} has a record already: name another folder")
    failure = run_for_windows(target, folder, windows, math.inf if timeout_s is None else timeout_s)
    if failure:
        _fail(failure)


def _finish(run: Path, limits: Sequence[Limit], sure: bool, as_json: bool, *, ended: bool) -> NoReturn:
    """Judge a run, and exit. ``ended``: the job is known to have ended; otherwise the record decides."""
    from overlap_callbacks.analysis.statistics import Pooling
    from overlap_callbacks.experiments.check import State, judge
    from overlap_callbacks.report import record

    try:
        found = record.read(run, details=False)
    except record.RecordError as error:
        _fail(str(error))
    if found.summary.control:
        _fail("the run is an A/A control: both sides ran overlapped, so its figures are errors of measurement")
    if not found.valid_windows:
        _fail("no window of the run counts: overlap show says why")
    pooling = Pooling(all_looks=found.running and not ended)
    findings = judge(found.summary, limits, sure=sure, pooling=pooling)
    states = {finding.state for finding in findings}
    code = BROKEN if State.BROKEN in states else NOTHING if State.NOT_MEASURED in states else HOLDS
    _say(found, findings, code, as_json, all_looks=pooling.all_looks)
    raise SystemExit(code)


def _say(record: Record, findings: Sequence[Finding], code: int, as_json: bool, *, all_looks: bool) -> None:
    from overlap_callbacks.experiments.check import EXPOSED_SHARE, State, exposed_as_data, exposed_lines

    if as_json:
        rows = [
            {
                "option": finding.limit.option,
                "figure": finding.limit.figure,
                "limit": finding.limit.bound,
                "state": finding.state,
                "measured": finding.measured,
            }
            for finding in findings
        ]
        print_json({"exit_code": code, "limits": rows, "all_looks": all_looks, **exposed_as_data(record)})
        return
    told = [finding for finding in findings if code == HOLDS or finding.state is not State.HOLDS]
    words = {HOLDS: "All limits hold", BROKEN: "A limit is broken", NOTHING: "A limit cannot be judged"}[code]
    looks = " The job may go on: intervals hold at all looks." if all_looks else ""
    click.echo(one_line(f"{words}: {'; '.join(finding.sentence() for finding in told)}.{looks}"))
    about = {finding.limit.figure for finding in findings if finding.state is State.BROKEN}
    if about & {EXPOSED_SHARE, "hidden_comm_fraction", "exposed_comm_ms"}:
        for line in exposed_lines(record):
            click.echo(one_line(f"  {line}"))


def _fail(why: str) -> NoReturn:
    click.echo(one_line(f"Nothing can be judged: {why}."), err=True)
    raise SystemExit(NOTHING)
