"""``overlap check``: tests a run against limits and other runs, for continuous integration."""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from overlap_callbacks.cli import ExitCode, InconclusiveError, leave_pipe
from overlap_callbacks.cli._options import Amount, WithCommand, is_given, json_option
from overlap_callbacks.cli._output import newest_run, one_line, print_json, program, read_record, refusing
from overlap_callbacks.cli.experiment import KEPT

if TYPE_CHECKING:
    from overlap_callbacks.experiments.against import Verdict
    from overlap_callbacks.experiments.check import Finding, Limit
    from overlap_callbacks.report.record import Record

# Options that say how COMMAND is run.
_OF_COMMAND = {"windows": "--windows", "timeout": "--timeout", "run_dir": "--run-dir"}


# Baselines of a folder that are read, the newest ones.
_MOST_BASELINES = 50


class _Asked(NamedTuple):
    """What a run is tested against: limits, and baselines with how much slower than they it may be."""

    limits: Sequence[Limit]
    baselines: Sequence[Path]
    within: str
    force: bool

    @property
    def as_options(self) -> list[str]:
        """As typed on the command line, to be followed by a run."""
        baselines = [f"--against={shlex.quote(str(path))}" for path in self.baselines]
        given = ["--within", shlex.quote(self.within)] if self.within else []
        return [*baselines, *given, *(["--force"] if self.force else []), *[one.as_option for one in self.limits]]


class _Check(WithCommand):
    """A command whose ``--against`` takes all values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = list(itertools.takewhile(lambda word: word != "--", args)), list[str]()
        taking = False
        for word in own:
            if word.startswith("-"):
                taking = word == "--against"
            elif taking and rest[-1] != "--against":
                rest.append("--against")
            rest.append(word)
        return super().parse_args(ctx, [*rest, *args[len(own) :]])


@click.command("check", cls=_Check)
@click.option("--max-exposed", metavar="FRACTION", help="Exposed communication, of the step, e.g. 0.1.")
@click.option("--min-overlap", metavar="FRACTION", help="Communication that compute hides, of all of it.")
@click.option("--max-slowdown", metavar="FRACTION", help="Slowdown of compute by overlap.")
@click.option("--max", "maxima", multiple=True, metavar="NAME=VALUE", help="A limit on any figure. Repeatable.")
@click.option("--min", "minima", multiple=True, metavar="NAME=VALUE", help="The same from below. Repeatable.")
@click.option(
    "--against",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="BASELINE...",
    help="Runs that it must not be slower than; of a folder of runs, all that are comparable.",
)
@click.option("--within", metavar="PERCENT", help="How much slower than they a step may be.  [default: 3%]")
@click.option("--force", is_flag=True, help="Compare runs with other ranks, models or devices all the same.")
@click.option(
    "--windows", type=click.IntRange(min=1), help="End COMMAND once this many windows count. [default: let it end]"
)
@click.option("--timeout", type=Amount(min=1), help="Seconds that COMMAND may take. [default: no limit]")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Keep the record of COMMAND here.")
@json_option
@click.argument("run", nargs=-1, type=click.Path(path_type=Path), metavar="RUN | -- COMMAND...")
def command(
    maxima: tuple[str, ...],
    minima: tuple[str, ...],
    against: tuple[Path, ...],
    within: str | None,
    force: bool,
    windows: int | None,
    timeout: float | None,
    run_dir: Path | None,
    as_json: bool,
    run: tuple[Path, ...],
    command: tuple[str, ...],
    **shares: str | None,
) -> None:
    """Test RUN, a run folder or its overlap.jsonl, against limits or baselines; or COMMAND, which is run first.

    A limit holds (exit code 0) or is broken (1) if the whole 95% interval of the figure says so, over the windows that
    count. It is inconclusive (3) if it lies within the interval, or the figure was not measured. So is it with
    --against: no regression (0), a regression (1), not enough data (3).
    """
    from overlap_callbacks.experiments.against import parsed_within
    from overlap_callbacks.experiments.check import EXPOSED_SHARE, limit_on, parsed_limit

    figures = {"max_exposed": EXPOSED_SHARE, "min_overlap": "hidden_comm_fraction", "max_slowdown": "compute_slowdown"}
    with refusing(ValueError, refusal=click.UsageError):
        limits = [
            limit_on(figure, f"--{name.replace('_', '-')}", text)
            for name, figure in figures.items()
            if (text := shares[name]) is not None
        ]
        limits += [parsed_limit("--max", text) for text in maxima] + [parsed_limit("--min", text) for text in minima]
        parsed_within(within)
        if not against and (within is not None or force):
            raise ValueError(f"{'--force' if within is None else '--within'}: only with --against")
        if not limits and not against:
            raise ValueError("give a limit, e.g. --max-exposed 0.1, or runs to compare with: --against BASELINE")
        if bool(run) == bool(command):
            first = " before --against" if len(against) > 1 and not run else ""
            raise ValueError(f"give a run{first}, or -- and a command that is run first")
        if len(run) > 1:
            raise ValueError(f"give one run, or put -- before a command: -- {' '.join(map(str, run))}")
        ignored = [option for name, option in _OF_COMMAND.items() if run and is_given(name)]
        if ignored:
            raise ValueError(f"{' and '.join(ignored)}: only for a command that is run first")
    asked = _Asked(limits, against, within or "", force)
    if run:
        _finish(newest_run(run[0]), asked, as_json, ended=False)
    with _folder_of_command(run_dir, asked) as folder:
        _check_command(command, folder, windows, timeout)
        _finish(folder, asked, as_json, ended=True)


@contextlib.contextmanager
def _folder_of_command(run_dir: Path | None, asked: _Asked) -> Iterator[Path]:
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
            again = " ".join([program(), "check", *asked.as_options, shlex.quote(str(folder))])
            click.echo(one_line(f"{KEPT} Judge it with: {again}"), err=True)
        raise SystemExit(ExitCode.INTERRUPTED) from None
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
    if not failure and not (folder / "overlap.jsonl").exists():
        failure = "the command left no record: attach the library in it, and let it train until a window opens"
    if failure:
        _fail(failure)


def _finish(run: Path, asked: _Asked, as_json: bool, *, ended: bool) -> NoReturn:
    """Judge a run, and exit. ``ended``: the job is known to have ended; otherwise the record decides."""
    from overlap_callbacks.analysis.headline import run_headline
    from overlap_callbacks.experiments.against import Answer, parsed_within, verdict
    from overlap_callbacks.experiments.check import Finding, State, judge

    found = read_record(run)
    found.ended = found.ended or ended
    if found.summary.control:
        _fail("the run is an A/A control: both sides ran overlapped, so its figures are errors of measurement")
    baselines = list(_baselines(asked, found))
    why = "" if found.valid_windows else run_headline(found.summary, len(found.arms)).text
    if why and (not as_json or baselines):
        _fail(why, InconclusiveError)
    findings = (
        [Finding(limit, State.NOT_MEASURED, None, why) for limit in asked.limits]
        if why
        else judge(found.summary, asked.limits)
    )
    states = {finding.state for finding in findings}
    compared = verdict(found, baselines, parsed_within(asked.within or None)) if baselines else None
    answer = None if compared is None else compared.answer
    code = ExitCode.INCONCLUSIVE if states - {State.HOLDS} or answer is Answer.UNKNOWN else ExitCode.DONE
    if State.BROKEN in states or answer is Answer.SLOWER:
        code = ExitCode.BROKEN
    try:
        _say(found, findings, compared, code, as_json)
    except BrokenPipeError:  # whoever reads has enough; the exit code still counts
        leave_pipe()
    raise SystemExit(code)


def _baselines(asked: _Asked, found: Record) -> Iterator[Record]:
    """The records of the baselines: of those that are named each, of a folder of runs those that fit the run.

    Ends the command if one that is named does not fit, and if none is left.
    """
    from overlap_callbacks.experiments.against import incomparable
    from overlap_callbacks.report.record import holds_runs, runs_in

    own, unlike, empty, any_left = found.path.resolve().parent, [], [], not asked.baselines
    for path in asked.baselines:
        of_folder = [] if not path.is_dir() or not holds_runs(path) else runs_in(path)[-_MOST_BASELINES:]
        for one in of_folder or [path]:
            if one.resolve() in (own, found.path.resolve()):
                if of_folder:
                    continue
                _fail(f"{one} is the run itself: give other runs to --against")
            baseline = read_record(one)
            why = "" if asked.force else incomparable(found, baseline)
            if why and not of_folder:
                _fail(f"{one} cannot be compared: {why}. --force compares them all the same")
            if why:
                unlike.append(f"{one.name} ({why})")
            elif not baseline.valid_windows:
                empty.append(f"{one.name} (none of its windows counts)")
            else:
                any_left = True
                yield baseline
    if unlike or empty:
        click.echo(one_line(f"Baselines left out: {', '.join([*unlike, *empty])}"), err=True)
    if not any_left:
        _fail("no baseline is left", click.ClickException if unlike and not empty else InconclusiveError)


def _say(record: Record, findings: Sequence[Finding], compared: Verdict | None, code: ExitCode, as_json: bool) -> None:
    from overlap_callbacks.experiments import against

    if not as_json:
        if compared is not None:
            lines = [against.headline(compared), *[f"  {line}" for line in against.more_lines(compared)]]
            click.echo("\n".join(map(one_line, lines)))
        if findings:
            _say_limits(record, findings, code)
        return
    from overlap_callbacks.analysis.headline import run_headline
    from overlap_callbacks.experiments.check import exposed_as_data

    rows = [
        {
            "option": finding.limit.option,
            "figure": finding.limit.figure,
            "limit": finding.limit.bound,
            "state": finding.state,
            "measured": finding.measured,
            "doubt": finding.doubt,
        }
        for finding in findings
    ]
    windows = {"windows": len(record.windows), "valid_windows": len(record.valid_windows)}
    found = {"exit_code": code, "limits": rows, "all_looks": record.running, **windows}
    data = None if compared is None else against.as_data(compared)
    print_json({**found, "state": run_headline(record.summary).state, "against": data, **exposed_as_data(record)})


def _say_limits(record: Record, findings: Sequence[Finding], code: ExitCode) -> None:
    from overlap_callbacks.analysis.headline import run_headline
    from overlap_callbacks.analysis.run_summary import NOT_SETTLED
    from overlap_callbacks.experiments.check import EXPOSED_SHARE, State, exposed_lines, step_to_take
    from overlap_callbacks.report.views.quality import windows_that_count

    headline = run_headline(record.summary)
    first = {ExitCode.DONE: "All limits hold", ExitCode.BROKEN: "A limit is broken"}.get(code, "Inconclusive")
    # Those that decide come first; limits that hold are left out if others do not.
    order = (State.BROKEN, State.INCONCLUSIVE, State.NOT_MEASURED)
    told = [finding for state in order for finding in findings if finding.state is state] or findings
    broken = code is ExitCode.BROKEN
    words = "; ".join(
        [
            f"{'inconclusive: ' if broken and finding.state is State.INCONCLUSIVE else ''}{finding.sentence()}"
            for finding in told
        ]
    )
    if any([finding.state is State.INCONCLUSIVE and not finding.doubt for finding in findings]):
        words += ". More windows give narrower intervals"
    looks = " The job may go on: intervals are valid however often you look." if record.running else ""
    click.echo(one_line(f"{first}: {words}.{looks}"))
    counting = windows_that_count(record.summary) if len(record.valid_windows) < len(record.windows) else ""
    settled = headline.settled if any([finding.doubt == NOT_SETTLED for finding in findings]) else ""
    why = f"Why: {headline.why} What to do: {headline.what_to_do}" if headline.why else ""
    for line in filter(None, (counting and f"{counting}.", settled, why)):
        click.echo(one_line(f"  {line}"))
    about = {finding.limit.figure for finding in findings if finding.state in (State.BROKEN, State.INCONCLUSIVE)}
    if about & {EXPOSED_SHARE, "hidden_comm_fraction", "exposed_comm_ms"}:
        for line in exposed_lines(record):
            click.echo(one_line(f"  {line}"))
    if told[0].state is not State.HOLDS and not why:
        click.echo(one_line(f"  {step_to_take(record, told[0].limit.figure)}"))


def _fail(why: str, refusal: type[click.ClickException] = click.ClickException) -> NoReturn:
    raise refusal(one_line(f"nothing can be judged: {why}"))
