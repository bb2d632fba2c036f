"""The results of ``overlap bench`` in words, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_callbacks.analysis.bench.figures import GemmFigures, TransferFigures, gemm_figures, transfer_figures
from overlap_callbacks.analysis.bench.points import points_of, work_left
from overlap_callbacks.analysis.bench.sizes import rate_in_words, size_in_words
from overlap_callbacks.analysis.formatting import PLAIN, Style, change_in_words, count
from overlap_callbacks.analysis.results.bench import GEMM, GLOO, LOOPBACK, NCCL, BenchResults, GemmRound, TransferRound
from overlap_callbacks.analysis.results.estimate import Estimate

# A smaller share of covered products casts doubt on a slowdown.
_COVERED = 0.98
_LINKS = {
    GLOO: "ranks on the CPU of one host or several, with Gloo",
    NCCL: "GPUs with NCCL",
    LOOPBACK: "a loopback link: the second rank is a phantom with the same data in the same process",
}


def gemm_points(results: BenchResults) -> tuple[GemmFigures, ...]:
    """The figures of a ``gemm-allreduce``; empty for another benchmark."""
    rounds = [found for found in results.rounds if isinstance(found, GemmRound)]
    return gemm_figures(rounds, results.start.plan.ranks)


def transfer_points(results: BenchResults) -> tuple[TransferFigures, ...]:
    """The figures of a ``collectives``; empty for another benchmark."""
    return transfer_figures([found for found in results.rounds if isinstance(found, TransferRound)])


def where(results: BenchResults) -> str:
    """What it ran on, in a line."""
    start = results.start
    threads = f", {count(start.plan.threads, 'thread')} each" if start.plan.threads else ""
    speed = ""
    if start.plan.link == LOOPBACK and start.plan.link_gb_s is not None:
        speed = f" ({start.plan.link_gb_s:g} GB/s)"
    return (
        f"{count(start.plan.ranks, 'rank')}{threads}: {_LINKS.get(start.plan.link, start.plan.link)}{speed}; "
        f"{start.device_name}; torch {start.torch_version}"
    )


def link_in_words(results: BenchResults) -> str:
    """What connects the ranks, in a few words."""
    plan = results.start.plan
    if plan.link == LOOPBACK:
        return "a loopback link on " + ("one GPU" if plan.device == "cuda" else "the CPU")
    return "Gloo on the CPU" if plan.link == GLOO else "NCCL"


def verdict(results: BenchResults, style: Style = PLAIN) -> str:
    """The answer, in a sentence or two."""
    if results.start.plan.bench == GEMM:
        return _gemm_verdict(results, gemm_points(results), style)
    return _transfer_verdict(results, transfer_points(results), style)


def _gemm_verdict(results: BenchResults, points: Sequence[GemmFigures], style: Style) -> str:
    known = [point for point in points if point.slowdown is not None]
    if not known:
        return "No point was measured in which matrix products ran wholly beside an all-reduce."
    slowdowns = sorted(_value(point.slowdown) for point in known)
    gains = sorted(_value(point.speedup) for point in known if point.speedup is not None)
    span = _span(slowdowns, "longer", "less time", style)
    text = f"Beside an all-reduce over {link_in_words(results)}, a matrix product takes {span}"
    text += _told_from_chance([point.slowdown for point in known])
    if not gains:
        return text
    gain = _span(gains, "more", "less", style)
    return f"{text} Both at once do {gain} work in the same time than one after the other."


def _span(ascending: Sequence[float], more: str, less: str, style: Style) -> str:
    """The least and the largest of relative changes, without signs; e.g. ``12.4% to 76.5% longer``."""
    low, high = ascending[0], ascending[-1]
    first, last = (change_in_words(value, more, less, style) for value in (low, high))
    if first == last:
        return first
    return f"{style.percent(low)} to {last}" if low >= 0 else f"{first} to {last}"


def _told_from_chance(changes: Sequence[Estimate | None]) -> str:
    """How many changes are beyond chance, to follow a sentence that lacks its end."""
    known = [change for change in changes if change is not None and change.ci_low is not None]
    if not known:
        return "."
    sure = sum([not (change.ci_low or 0.0) <= 0 <= (change.ci_high or 0.0) for change in known])
    return f", beyond chance at {sure} of {count(len(known), 'point')}."


def _transfer_verdict(results: BenchResults, points: Sequence[TransferFigures], style: Style) -> str:
    if not points:
        return "No collective was measured."
    best = max(points, key=lambda point: point.busbw_gb_s.value)
    least = min(points, key=lambda point: point.time_ms.value)
    return (
        f"Over {link_in_words(results)}, the bus bandwidth is at most {rate_in_words(best.busbw_gb_s.value, style)}, "
        f"reached by {best.point.kind} of {size_in_words(best.point.message_bytes)}; the shortest call takes "
        f"{style.quantity(1e3 * least.time_ms.value, 'us')} ({least.point.kind} of "
        f"{size_in_words(least.point.message_bytes)})."
    )


def _value(estimate: Any) -> float:
    return float(estimate.value)


def notes(results: BenchResults) -> list[str]:
    """What a reader must know, as sentences."""
    start, plan = results.start, results.start.plan
    found = []
    left = len(work_left(plan, results))
    if left:
        found.append(f"Not finished: {left:,} of {len(points_of(plan)) * plan.rounds:,} measurements are left.")
    if plan.link == LOOPBACK:
        found.append(
            "On a loopback link, how long communication takes and what it occupies is given. What a real link costs "
            "needs a second rank."
        )
    if plan.bench == GEMM:
        if plan.device == "cpu":
            found.append(
                "On a CPU, products and the threads of Gloo share the cores. What a GPU does is another question."
            )
        if not any(point.compute_w for point in gemm_points(results)):
            why = start.power_missing or "blocks are shorter than the sensor needs"
            found.append(f"Power is absent: {why.removeprefix('no power: ')}.")
        short = sum(1 for point in gemm_points(results) if (point.covered or 1.0) < _COVERED)
        if short:
            found.append(
                f"Of {count(short, 'point')} some products did not end beside all-reduces and are left out: there the "
                "slowdown is too small."
            )
        lacking = sum(1 for point in gemm_points(results) if point.slowdown is None)
        if lacking:
            found.append(
                f"Of {count(lacking, 'point')} no product ran wholly beside all-reduces: "
                "larger messages or smaller products would help."
            )
    found += [f"Not measured: {_point_words(failure)}: {failure.reason}" for failure in results.failed]
    if results.resumed:
        versions = {start.torch_version, *(part.torch_version for part in results.resumed)}
        devices = {start.device_name, *(part.device_name for part in results.resumed)}
        found.append(f"It was ended and went on {count(len(results.resumed), 'time')}.")
        if len(versions) + len(devices) > 2:
            found.append("Its parts ran with different versions of torch, or on different devices.")
    if results.broken_lines:
        found.append(f"{count(results.broken_lines, 'line')} of the file cannot be read and is left out.")
    return found


def _point_words(failure: Any) -> str:
    if failure.gemm is not None:
        size = size_in_words(failure.gemm.message_bytes)
        cap = f", {failure.gemm.cap_in_words}" if failure.gemm.cap_in_words else ""
        return f"N {failure.gemm.n}, {failure.gemm.dtype}, all-reduce of {size}{cap}"
    if failure.transfer is not None:
        return f"{failure.transfer.kind} of {size_in_words(failure.transfer.message_bytes)}"
    return "a point"
