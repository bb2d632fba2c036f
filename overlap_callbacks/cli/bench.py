"""``overlap bench``: the microbenchmarks of the studies."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks.cli import ExitCode, SuggestingGroup
from overlap_callbacks.cli._options import (
    caps,
    clock_cap_option,
    json_option,
    power_cap_option,
    refuse_with_resume,
    whole_numbers,
    with_options,
    words,
)
from overlap_callbacks.cli._output import one_line
from overlap_callbacks.cli.experiment import (
    Ending,
    new_folder,
    output_option,
    reporting_interrupts,
    resume_hint,
    resume_option,
    run_to_end,
    sentences,
    show,
    shown_progress,
)

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.bench import Plan
    from overlap_callbacks.experiments.sweep import Progress

# Options allowed with --resume.
_WITH_RESUME = ("resume", "as_json", "page", "link_peak")
# Options that are fields of the plan.
_PLANNED = ("link", "device", "ranks", "threads", "rounds", "block_s", "link_gb_s")
# After Ctrl-C: time for the current point before the ranks are killed.
_GRACE_S = 30.0

_common_options = with_options(
    click.option("--quick/--full", default=True, help="A few minutes, or a whole sweep.  [default: quick]"),
    click.option("--ranks", type=int, help="Ranks on this host.  [default: one a GPU; without GPUs 2]"),
    click.option("--link", type=click.Choice(["gloo", "nccl", "loopback"]),
                 help="gloo on CPUs, nccl on several GPUs, loopback on one.  [default: what this host has]"),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda, where there is a GPU]"),
    click.option("--threads", type=int, help="Of each rank on a CPU.  [default: cores over ranks]"),
    click.option("--link-gb-s", type=float, metavar="GB/S",
                 help="Speed of a loopback link.  [default: 40, on a CPU 0.5]"),
    click.option("--rounds", type=int, help="How often each point is measured."),
    click.option("--block-s", type=float, metavar="SECONDS", help="Least length of a block."),
    output_option("overlap_bench/TIME-NAME"),
    resume_option(file_okay=True),
    click.option("--link-peak", metavar="GB/S", help="Peak of the link, or its name, e.g. nvlink4; for the page."),
    click.option("--page/--no-page", default=True, help="Whether to write bench.html into the folder."),
    json_option,
)  # fmt: skip


@click.group("bench", cls=SuggestingGroup)
def command() -> None:
    """Microbenchmarks: matrix products beside all-reduces, and collectives by size.

    They start their own ranks on this host, or run as ranks of torchrun. Every output names the link.
    """


@command.command("gemm-allreduce")
@click.option("--n", "sizes", metavar="N,N,...", help="Rows and columns of the matrices.")
@click.option("--message", metavar="SIZE,...", help="Of an all-reduce, e.g. 64KiB,16MiB,1GB.")
@click.option("--dtype", "dtypes", metavar="TYPE,...", help="fp32, tf32, fp16, bf16, fp8: what the device has.")
@click.option("--ctas", metavar="N,...", help="Thread blocks of a GPU's all-reduces; 0 for its own number.")
@power_cap_option
@clock_cap_option
@_common_options
def gemm_allreduce(**given: Any) -> None:
    """N x N matrix products beside an all-reduce, against both alone.

    Slowdown, TFLOP/s, bus bandwidth, gain of doing both at once, and power where there is a sensor; 95% intervals.
    """
    from overlap_callbacks.analysis.results.bench import GEMM

    def swept() -> dict[str, Any]:
        return {
            "sizes": whole_numbers(given["sizes"], "--n"),
            "message_bytes": _byte_sizes(given["message"], "--message"),
            "dtypes": words(given["dtypes"]),
            "ctas": whole_numbers(given["ctas"], "--ctas"),
            "power_caps_w": caps(given["power_caps"], "--power-cap"),
            "clock_caps_mhz": caps(given["clock_caps"], "--clock-cap"),
        }

    _run(GEMM, swept, given)


@command.command("collectives")
@click.option(
    "--kind", "kinds", metavar="KIND,...",
    help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv.  [default: all]",
)  # fmt: skip
@click.option("--size", "sizes", metavar="SIZE,...", help="Of messages.  [default: powers of two from 8 B]")
@click.option("--max-size", metavar="SIZE", help="The largest of the default sizes.")
@click.option(
    "--groups", metavar="GROUP,...",
    help="world, N (groups of N neighbours) or N:S (N ranks that are S apart).  [default: world]",
)  # fmt: skip
@_common_options
def collectives(**given: Any) -> None:
    """Effective bandwidth of collectives by kind, size and group; for `overlap predict --bandwidths FOLDER`."""
    from overlap_callbacks.analysis.results.bench import COLLECTIVES

    def swept() -> dict[str, Any]:
        most = _byte_sizes(given["max_size"], "--max-size")
        return {
            "kinds": words(given["kinds"]),
            "message_bytes": _byte_sizes(given["sizes"], "--size"),
            "max_bytes": most[0] if most else None,
            "groups": words(given["groups"]),
        }

    _run(COLLECTIVES, swept, given)


def _run(bench: str, swept: Callable[[], dict[str, Any]], given: dict[str, Any]) -> None:
    """Measure, print, and say how to continue."""
    command = f"overlap bench {bench}"
    with reporting_interrupts(command) as folder_is:
        world_size = _launched_ranks()
        with sentences(click.ClickException):
            peak = _peak(given["link_peak"])
            plan, folder = (
                _begun(bench, swept, given, world_size) if given["resume"] is None else _continued(bench, given)
            )
            _check_caps(plan)
        folder_is(folder)
        line = " ".join(["overlap", *sys.argv[1:]])
        if world_size is None:
            stopped = run_to_end(lambda: _launch(plan, folder, line)) is Ending.INTERRUPTED
        else:
            with sentences():
                stopped = _measure(plan, folder, line, _echo)
        if world_size is None or os.environ["RANK"] == "0":
            # A signal may have stopped the ranks but not this process.
            stopped = _show(folder, command, stopped, peak, given) or stopped
        if stopped:
            raise SystemExit(ExitCode.INTERRUPTED)


def _begun(
    bench: str, swept: Callable[[], dict[str, Any]], given: dict[str, Any], world_size: int | None
) -> tuple[Plan, Path]:
    """The plan and the folder of a new benchmark."""
    from overlap_callbacks.experiments.bench.plans import make_plan
    from overlap_callbacks.experiments.bench.results import Bench

    asked = {name: given[name] for name in _PLANNED}
    plan = make_plan(bench, asked | swept(), quick=given["quick"], world_size=world_size)
    return plan, new_folder(given["output"], "overlap_bench", Bench.FILE_NAME, suffix=bench)


def _continued(bench: str, given: dict[str, Any]) -> tuple[Plan, Path]:
    """The plan and the folder of a resumed benchmark."""
    from overlap_callbacks.experiments.bench.results import Bench

    refuse_with_resume(_WITH_RESUME)
    folder: Path = given["resume"]
    plan = Bench.read(folder).start.plan
    if plan.bench != bench:
        raise ValueError(f"{folder} was begun by overlap bench {plan.bench}: resume it with that command")
    return plan, folder if folder.is_dir() else folder.parent


def _check_caps(plan: Plan) -> None:
    from overlap_callbacks.analysis.results.bench import GemmPoint
    from overlap_callbacks.experiments.bench.results import points_of
    from overlap_callbacks.experiments.capping import check_may_cap

    check_may_cap([point for point in points_of(plan) if isinstance(point, GemmPoint)])


def _launch(plan: Plan, folder: Path, line: str) -> bool:
    """Run the ranks on this host. Ends the command if one fails: its traceback is on stderr."""
    import msgspec

    from overlap_callbacks.analysis.results.bench import LOOPBACK
    from overlap_callbacks.experiments.bench.results import Bench
    from overlap_callbacks.experiments.supervisor import exit_in_words, rank_variables, supervise
    from overlap_callbacks.experiments.sweep import LinesFile

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / Bench.FILE_NAME).exists():
        # raises if another process is measuring in this folder
        LinesFile(folder / Bench.FILE_NAME, Bench.COMMAND).close()
    outcome = supervise(
        [sys.executable, "-m", __name__, msgspec.json.encode((plan, str(folder), line)).decode()],
        environment=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if plan.device == "cpu" else {}),
        on_interrupt=lambda: click.echo("Stopping after the point under way; Ctrl-C again stops at once.", err=True),
        ranks=rank_variables(1 if plan.link == LOOPBACK else plan.ranks),
        stdout=2,  # stdout is for the result only: the Gloo of torch 2.8 writes its own lines there
        grace_s=_GRACE_S,
    )
    if outcome.exit_code:
        why = exit_in_words(outcome.exit_code)
        raise click.ClickException(one_line(f"a rank failed; what was measured is in {folder}: {why}"))
    return True


def _measure(plan: Plan, folder: Path, line: str, on_progress: Callable[[Progress], None]) -> bool:
    """Measure as one rank. Returns whether a signal stopped it."""
    from overlap_callbacks.experiments.bench.session import Stop, run_session

    stop = Stop()
    run_session(plan, folder, line, stop, on_progress)
    return stop.requested


def _echo(progress: Progress) -> None:
    if progress.current:
        click.echo(f"{progress.num_done + 1}/{progress.num_planned} {progress.current}", err=True)


def _show(folder: Path, command: str, stopped: bool, peak: Any, given: dict[str, Any]) -> bool:
    """Print the results and write the page. Returns whether anything is left to measure."""
    import importlib.util

    from overlap_callbacks.experiments.bench.results import Bench
    from overlap_callbacks.experiments.bench.view import bench_data, bench_document
    from overlap_callbacks.experiments.sweep import ResultsError

    try:
        bench = Bench.read(folder)
    except ResultsError as error:
        if not stopped:
            raise click.ClickException(one_line(str(error))) from None
        click.echo("Interrupted before anything was measured.", err=True)
        return True
    has_page = given["page"] and bool(bench.rounds)
    if has_page and importlib.util.find_spec("jinja2") is None:
        click.echo("No page: jinja2 is not installed: pip install 'overlap-callbacks[report]'", err=True)
        has_page = False
    page = folder / "bench.html" if has_page else None
    is_whole = show(bench_document(bench, peak), bench_data(bench), given["as_json"], page)
    click.echo(one_line(f"The results are in {folder / bench.FILE_NAME}."), err=True)
    if bench.left:
        click.echo(one_line(resume_hint(command, folder)), err=True)
    if not is_whole:
        raise SystemExit(ExitCode.CANNOT)
    return bool(bench.left)


def _launched_ranks() -> int | None:
    """Number of ranks started by a launcher such as torchrun; None without one."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(size) if size.isdigit() and rank.isdigit() else None


def _peak(text: str | None) -> Any:
    from overlap_callbacks.analysis.communication.link_peaks import link_of

    return None if text is None else link_of(text, "--link-peak")


def _byte_sizes(text: str | None, option: str) -> tuple[int, ...]:
    from overlap_callbacks.analysis.bench import bytes_of

    return tuple([bytes_of(part, option) for part in words(text)])


def _main(content: str) -> None:
    """Run one of the ranks that the command has started."""
    import msgspec

    from overlap_callbacks.analysis.results.bench import Plan

    plan, folder, line = msgspec.json.decode(content, type=tuple[Plan, str, str])
    with shown_progress() if os.environ["RANK"] == "0" else contextlib.nullcontext(_echo) as on_progress:
        _measure(plan, Path(folder), line, on_progress)


if __name__ == "__main__":
    _main(sys.argv[1])
