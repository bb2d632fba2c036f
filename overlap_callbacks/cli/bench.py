"""``overlap bench``: the microbenchmarks of the studies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from overlap_callbacks.cli._options import (
    caps,
    clock_cap_option,
    json_option,
    power_cap_option,
    refuse_beside_resume,
    whole_numbers,
    words,
)
from overlap_callbacks.cli._output import one_line, print_json, print_tables
from overlap_callbacks.cli.experiment import INTERRUPTED_CODE, go_on, new_folder, told_of_interrupts

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.bench import BenchResults, Plan

_Function = TypeVar("_Function", bound=Callable[..., Any])
# What may stand beside --resume.
_BESIDE_RESUME = ("resume", "as_json", "page", "link_peak")

_COMMON = (
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
    click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
                 help="Folder of the results.  [default: overlap_bench/TIME-NAME]"),
    click.option("--resume", type=click.Path(path_type=Path, exists=True), metavar="FOLDER",
                 help="Go on with what is left of FOLDER, as it was begun."),
    click.option("--link-peak", metavar="GB/S", help="Peak of the link, or its name, e.g. nvlink4; for the page."),
    click.option("--page/--no-page", default=True, help="Whether to write bench.html into the folder."),
    json_option,
)  # fmt: skip


def _common(function: _Function) -> _Function:
    for option in reversed(_COMMON):
        function = option(function)
    return function


@click.group("bench")
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
@_common
def gemm_allreduce(
    sizes: str | None,
    message: str | None,
    dtypes: str | None,
    ctas: str | None,
    power_caps: str | None,
    clock_caps: str | None,
    **given: Any,
) -> None:
    """N x N matrix products beside an all-reduce, against both alone.

    Slowdown, TFLOP/s, bus bandwidth, gain of doing both at once, and power where there is a sensor; 95% intervals.
    """
    from overlap_callbacks.analysis.results.bench import GEMM

    def swept() -> dict[str, Any]:
        return {
            "sizes": whole_numbers(sizes, "--n"),
            "message_bytes": _byte_sizes(message, "--message"),
            "dtypes": words(dtypes),
            "ctas": whole_numbers(ctas, "--ctas"),
            "power_caps_w": caps(power_caps, "--power-cap"),
            "clock_caps_mhz": caps(clock_caps, "--clock-cap"),
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
@_common
def collectives(kinds: str | None, sizes: str | None, max_size: str | None, groups: str | None, **given: Any) -> None:
    """Effective bandwidth of collectives by kind, size and group; for `overlap predict --bandwidths FOLDER`."""
    from overlap_callbacks.analysis.results.bench import COLLECTIVES

    def swept() -> dict[str, Any]:
        most = _byte_sizes(max_size, "--max-size")
        return {
            "kinds": words(kinds),
            "message_bytes": _byte_sizes(sizes, "--size"),
            "max_bytes": most[0] if most else None,
            "groups": words(groups),
        }

    _run(COLLECTIVES, swept, given)


def _run(bench: str, swept: Callable[[], dict[str, Any]], given: dict[str, Any]) -> None:
    """Measure, print, and say how to go on."""
    with told_of_interrupts(f"overlap bench {bench}") as folder_is:
        from overlap_callbacks.report.bench_results import BenchFileError

        world_size = _launched_ranks()
        try:
            peak = _peak(given["link_peak"])
            folder, plan = _begun(bench, given["resume"]) if given["resume"] is not None else (None, None)
            if plan is None or folder is None:
                plan = _new_plan(bench, swept(), given, world_size)
                folder = _new_folder(bench, given["output"])
            _check_caps(plan)
        except (ValueError, TypeError, BenchFileError) as error:
            raise click.ClickException(one_line(str(error))) from None
        folder_is(folder)
        stopped = _measure(plan, folder, world_size)
        if int(os.environ.get("RANK", "0")) == 0 or world_size is None:
            # Ranks may have been told to stop where this process was not.
            stopped = _show(folder, bench, stopped, peak, given) or stopped
        if stopped:
            raise SystemExit(INTERRUPTED_CODE)


def _check_caps(plan: Plan) -> None:
    from overlap_callbacks.analysis.bench.points import points_of
    from overlap_callbacks.analysis.results.bench import GemmPoint
    from overlap_callbacks.experiments.capping import check_may_cap

    check_may_cap([point for point in points_of(plan) if isinstance(point, GemmPoint)])


def _new_plan(bench: str, swept: dict[str, Any], given: dict[str, Any], world_size: int | None) -> Plan:
    from overlap_callbacks.experiments.bench.plans import Asked, make_plan

    names = ("quick", "link", "device", "ranks", "threads", "rounds", "block_s", "link_gb_s")
    return make_plan(Asked(bench=bench, **{name: given[name] for name in names}, **swept), world_size)


def _begun(bench: str, folder: Path) -> tuple[Path, Plan]:
    """The folder and the plan that a benchmark goes on with."""
    from overlap_callbacks.report.bench_results import file_of, read

    refuse_beside_resume(_BESIDE_RESUME)
    plan = read(folder).start.plan
    if plan.bench != bench:
        raise ValueError(f"{folder} was begun by overlap bench {plan.bench}: resume it with that command")
    return file_of(folder).parent, plan


def _new_folder(bench: str, output: Path | None) -> Path:
    from overlap_callbacks.analysis.results.bench import FILE_NAME

    return new_folder(output, "overlap_bench", FILE_NAME, suffix=bench)


def _measure(plan: Plan, folder: Path, world_size: int | None) -> bool:
    """Measure; returns whether it was ended before its end."""
    from overlap_callbacks.analysis.results.bench import FILE_NAME
    from overlap_callbacks.cli._output import open_console
    from overlap_callbacks.experiments.bench.launch import RanksFailedError, launch
    from overlap_callbacks.experiments.bench.session import Stop, run_session
    from overlap_callbacks.experiments.lines_file import BusyError, LinesFile

    line = " ".join(["overlap", *sys.argv[1:]])
    console = open_console(stderr=True)
    try:
        if world_size is None:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / FILE_NAME).exists():
                LinesFile(folder / FILE_NAME, "bench").close()  # refuses a folder in which another one measures
            return launch(plan, folder, line, console)
        stop = Stop()
        run_session(plan, folder, line, stop, lambda done, total, what: click.echo(f"{done}/{total} {what}", err=True))
        return stop.requested
    except BusyError as error:
        raise click.ClickException(one_line(str(error))) from None
    except OSError as error:
        raise click.ClickException(one_line(f"{folder} cannot be written: {error.strerror}")) from None
    except RanksFailedError as error:
        raise click.ClickException(f"a rank failed; what was measured is in {folder}:\n{error}") from None


def _show(folder: Path, bench: str, stopped: bool, peak: Any, given: dict[str, Any]) -> bool:
    """Print the results and write the page; returns whether something is left to measure."""
    from overlap_callbacks.analysis.bench.points import work_left
    from overlap_callbacks.report.bench_results import BenchFileError, file_of, read
    from overlap_callbacks.report.terminal_bench import as_json, bench_tables

    try:
        results = read(folder)
    except BenchFileError as error:
        if stopped:
            click.echo("Interrupted before anything was measured.", err=True)
            return True
        raise click.ClickException(one_line(str(error))) from None
    if given["as_json"]:
        print_json(as_json(results) | {"file": str(file_of(folder))})
    else:
        print_tables(bench_tables(results))
    if given["page"] and results.rounds:
        _write_page(results, folder, peak)
    click.echo(one_line(f"The results are in {file_of(folder)}."), err=True)
    is_left = bool(work_left(results.start.plan, results))
    if is_left:
        click.echo(one_line(go_on(f"overlap bench {bench}", folder)), err=True)
    return is_left


def _write_page(results: BenchResults, folder: Path, peak: Any) -> None:
    import importlib.util

    if importlib.util.find_spec("jinja2") is None:
        click.echo("No page: jinja2 is not installed: pip install 'overlap-callbacks[report]'", err=True)
        return
    from overlap_callbacks.report.html.document import write_document
    from overlap_callbacks.report.views.bench import bench_document

    target = folder / "bench.html"
    try:
        size = write_document(bench_document(results, target.resolve().parent.name, peak), target)
    except OSError as error:
        raise click.ClickException(one_line(f"{target} cannot be written: {error.strerror}")) from None
    click.echo(one_line(f"The page is {target} ({size / 1e6:.1f} MB)"), err=True)


def _launched_ranks() -> int | None:
    """Ranks that a launcher such as torchrun has started; None without one."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(size) if size.isdigit() and rank.isdigit() else None


def _peak(text: str | None) -> Any:
    from overlap_callbacks.analysis.communication.link_peaks import link_of

    return None if text is None else link_of(text, "--link-peak")


def _byte_sizes(text: str | None, option: str) -> tuple[int, ...]:
    from overlap_callbacks.analysis.bench.sizes import bytes_of

    return tuple([bytes_of(part, option) for part in words(text)])
