"""What the device does with its time and memory: rank by rank, and along the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.formatting import PAGE
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.report.views.elements import Block, Chart, Note, Section
from overlap_callbacks.report.views.run import RunView
from overlap_callbacks.report.views.step_charts import stack
from overlap_callbacks.report.views.trends import figure_lines, in_order

_GB = 1e9
_PARTS = (
    ("compute alone", "compute"), ("both", "both"), ("communication exposed", "communication"), ("neither", "idle"),
)  # fmt: skip


def usage(view: RunView) -> list[Section]:
    """Memory and utilisation; nothing where neither is known."""
    if not view.charts:
        return []
    blocks: list[Block] = []
    window = view.record.latest_valid("samples")
    ranks = None if window is None else rank_chart(window)
    if ranks is not None:
        blocks.append(ranks)
    windows = in_order(view)
    counting = set(map(id, windows))
    excluded = sorted(each.first_step for each in view.windows if id(each) not in counting)
    lines = [
        figure_lines("Highest memory of tensors", "GB", _both(_memory), windows, excluded),
        figure_lines("Time in which the device works", "fraction", (("device", "ink", _busy),), windows, excluded),
        figure_lines("SMs busy", "fraction", _both(_part("sm")), windows, excluded),
        figure_lines("Memory bandwidth used", "fraction", _both(_part("dram")), windows, excluded),
    ]
    charts = [chart for chart in lines if chart is not None]
    blocks += charts
    if not blocks:
        return []
    if not any(chart.title == "SMs busy" for chart in charts):
        blocks.append(Note("How busy SMs and memory were is not known: the device has no counters of its parts."))
    return [Section("How are device and memory used?", _answer(window), blocks)]


def rank_chart(window: OverlapReport) -> Chart | None:
    """An overlapped step of each rank divided; None without a profile of at least two ranks."""
    rows = [(sample.rank, parts) for sample in window.samples if (parts := _step_parts(sample)) is not None]
    if len(rows) < 2:
        return None
    of = (
        ""
        if len(rows) == window.num_reporting
        else f" {len(rows)} of {window.num_reporting} ranks: those that the record has."
    )
    return stack(
        "Where the time of an overlapped step goes, by rank",
        "ms",
        _PARTS,
        [(f"rank {rank}", parts) for rank, parts in rows],
        f"Profiled steps of window {window.window}. Neither: the device is idle.{of}",
    )


def _step_parts(sample: RankWindow) -> tuple[float, float, float, float] | None:
    blocks = [block for block in sample.profiled if block.mode is Mode.OVERLAPPED]
    if not blocks:
        return None

    def mean(read: Callable[[object], float]) -> float:
        return max(0.0, statistics.fmean([read(block) for block in blocks]))

    busy, hidden, comm, idle = (
        mean(lambda block, name=name: getattr(block, name) or 0.0)  # type: ignore[misc]
        for name in ("compute_busy_ms", "hidden_comm_ms", "comm_busy_ms", "idle_ms")
    )
    return max(0.0, busy - hidden), hidden, max(0.0, comm - hidden), idle


def _answer(window: OverlapReport | None) -> str:
    """Which rank idles most, in a sentence; empty where ranks are not known."""
    if window is None:
        return ""
    idle = {sample.rank: parts for sample in window.samples if (parts := _step_parts(sample)) is not None}
    shares = {rank: parts[3] / sum(parts) for rank, parts in idle.items() if sum(parts) > 0}
    if len(shares) < 2:
        return ""
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    if PAGE.percent(shares[most]) == PAGE.percent(shares[least]):
        return f"Every rank is idle for {PAGE.percent(shares[most])} of an overlapped step."
    return (
        f"Rank {most} is idle for {PAGE.percent(shares[most])} of an overlapped step, rank {least} for "
        f"{PAGE.percent(shares[least])}: the most and the least."
    )


Reader = Callable[[OverlapReport], "Estimate | None"]


def _both(read: Callable[[OverlapReport, Mode], float | None]) -> Sequence[tuple[str, str, Reader]]:
    def reader(mode: Mode) -> Reader:
        def of(window: OverlapReport) -> Estimate | None:
            value = read(window, mode)
            return None if value is None else Estimate(value, None, None, 0, 0)

        return of

    return tuple((mode.value, mode.value, reader(mode)) for mode in Mode)


def _memory(window: OverlapReport, mode: Mode) -> float | None:
    peaks = [peak.peak_bytes for peak in window.memory if peak.mode is mode and peak.peak_bytes is not None]
    return max(peaks) / _GB if peaks else None


def _busy(window: OverlapReport) -> Estimate | None:
    busy, exposed, idle = window.compute_busy_ms, window.exposed_comm_ms, window.idle_ms
    if busy is None or exposed is None or idle is None:
        return None
    works = busy.value + exposed.value
    return Estimate(works / (works + idle.value), None, None, 0, 0) if works + idle.value > 0 else None


def _part(name: str) -> Callable[[OverlapReport, Mode], float | None]:
    def read(window: OverlapReport, mode: Mode) -> float | None:
        of_mode = None if window.power is None else window.power.of(mode)
        parts = None if of_mode is None else of_mode.parts
        value: float | None = None if parts is None else getattr(parts, name)
        return value

    return read
