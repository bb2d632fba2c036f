"""Charts of a step: the modes side by side, where its time goes, and when each kernel runs."""

from __future__ import annotations

import base64
import dataclasses
import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.formatting import PAGE, bytes_in_words, page_text, rounded, short_kernel_name, useful
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import CallTimes, StepDetail, StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import StepParts
from overlap_callbacks.report.perfetto import perfetto_trace
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    Block,
    Chart,
    Column,
    Download,
    Section,
    Table,
    bar,
    name_cell,
    table_of,
)

# The colour of each step time, as a variable of the style sheet.
COLORS = {"e2e_ideal_ms": "ideal", "e2e_overlapped_ms": "overlapped", "e2e_sequential_ms": "sequential"}

Pairs = Sequence[tuple[float, float]]


def mode_bars(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Chart:
    """Overlapped and sequential step time, and the ideal one, with intervals; named runs side by side."""
    rows = []
    for name, figures in runs:
        for figure in STEP_TIMES:
            estimate = figures.get(figure.name)
            if estimate is not None:
                rows.append(bar(useful(estimate, figure.unit), run=name, label=figure.title, color=COLORS[figure.name]))
    caption = "Whiskers are 95% intervals."
    if any("e2e_ideal_ms" in figures for _, figures in runs):
        caption = (
            "Ideal is worked out: an overlapped step, less what its compute kernels lose to contention (equation 4). "
            + caption
        )
    named = dict.fromkeys(row["run"] for row in rows)
    return Chart(
        "bars",
        f"Step time of {next(iter(named))}" if len(named) == 1 < len(runs) else "Step time",
        {"unit": "ms", "rows": rows},
        caption,
        narrow=len(runs) == 1,
    )


def step_parts(parts: StepParts, figures: dict[str, Estimate], *, narrow: bool = True) -> Chart:
    """A profiled step, divided into shares that add up to it."""
    shown = named_parts(parts)
    caption = f"Shares of {whole_step(parts, figures)}, means over the ranks."
    if parts.contention_ms > 0:
        caption += " Compute alone is as in sequential steps; what it takes longer is lost to contention."
    chart = stack(
        "Where the time of a profiled step goes",
        "fraction",
        [(part.name, part.color) for part in shown],
        [("", [part.share for part in shown])],
        caption,
    )
    return dataclasses.replace(
        chart,
        data={**chart.data, "name_parts": True},
        legend=tuple([(part_in_words(part), part.color) for part in shown]),
        narrow=narrow,
    )


def stack(
    title: str,
    unit: str,
    parts: Sequence[tuple[str, str]],
    rows: Iterable[tuple[str, Iterable[float]]],
    caption: str,
    *,
    in_table: bool = False,
) -> Chart:
    """Bars divided into parts, each with a name and a colour. A row is a label and the values of its parts."""
    bars = []
    for label, values in rows:
        named = zip(parts, values, strict=True)
        divided = [{"name": name, "color": color, "value": rounded(max(value, 0.0))} for (name, color), value in named]
        bars.append({"label": label, "parts": divided})
    return Chart("stack", title, {"unit": unit, "rows": bars}, caption, tuple(parts), in_table=in_table)


def timeline(window: OverlapReport) -> Chart:
    """When compute ran and communication was in flight, for one step of each mode."""
    caption = f"One profiled step of each mode on rank {window.first_rank}, window {window.window}."
    if not window.valid:
        caption += " This window is not valid."
    return lanes(
        "Timeline of one step", [(picture.mode.value.capitalize(), picture) for picture in _by_mode(window)], caption
    )


def lanes(title: str, pictures: Sequence[tuple[str, StepTimeline]], caption: str) -> Chart:
    """When compute ran and communication was in flight, with a lane for each of the named steps."""
    if any(picture.closed_compute_ms or picture.closed_communication_ms for _, picture in pictures):
        caption += " The shortest gaps are closed."
    data = [
        {
            "mode": name,
            "step_ms": rounded(picture.step_ms),
            "compute": _short(picture.compute),
            "communication": _short(picture.communication),
            "both": _short(both(picture.compute, picture.communication)),
        }
        for name, picture in pictures
    ]
    legend = (("compute", "compute"), ("communication", "communication"), ("both at once", "both"))
    return Chart("timeline", title, {"unit": "ms", "modes": data}, caption, legend)


def both(first: Pairs, second: Pairs) -> list[tuple[float, float]]:
    """Where two ascending series of disjoint intervals overlap."""
    overlaps = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            overlaps.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def _short(intervals: Pairs) -> list[list[float]]:
    # A chart of a step cannot show nanoseconds.
    return [[round(start, 4), round(end, 4)] for start, end in intervals]


# -- the parts of a step

# Profiled steps are said to be longer from this fraction on.
_MUCH_LONGER = 0.02


class NamedPart(NamedTuple):
    """A part of the step: its name, its colour in the page's style sheet, its share, and another, shorter name."""

    name: str
    color: str
    share: float
    short: str = ""


def named_parts(parts: StepParts) -> list[NamedPart]:
    """The parts that are not shown as zero, as shares of the step that they add up to."""
    # If compute was faster during communication than alone, it lost nothing: use its full time.
    lost_ms = max(0.0, parts.contention_ms)
    exposed, short = "exposed communication", "exposed"
    if parts.bubble_ms > 0:  # the headline has all exposed communication
        exposed, short = f"{exposed} outside the bubble", "exposed non-bubble"
    found = (
        NamedPart(
            "compute alone" if PAGE.shows(lost_ms / parts.total_ms, "fraction") else "compute",
            "compute",
            parts.compute_ms + parts.contention_ms - lost_ms,
        ),
        NamedPart("lost to contention", "lost", lost_ms, "contention"),
        NamedPart(exposed, "communication", parts.transfer_ms + parts.waiting_ms, short),
        NamedPart("bubble of the pipeline", "idle", parts.bubble_ms, "bubble"),
        NamedPart("communication on the host", "ideal", parts.on_host_ms),
        NamedPart("idle", "idle", parts.idle_ms),
    )
    shares = [part._replace(share=part.share / parts.total_ms) for part in found]
    return [part for part in shares if PAGE.shows(part.share, "fraction")]


def part_in_words(part: NamedPart, *, short: bool = False) -> str:
    """E.g. ``idle 2.1%``."""
    return f"{part.short if short and part.short else part.name} {PAGE.percent(part.share)}"


def whole_step(parts: StepParts, figures: Mapping[str, Estimate]) -> str:
    """The step that the parts are shares of. The only place that says how much longer the profiler makes it."""
    step = figures.get("e2e_overlapped_ms")
    longer = 0.0 if step is None else parts.total_ms / step.value - 1
    return "a profiled step" + (f" ({PAGE.percent(longer)} longer than others)" if longer >= _MUCH_LONGER else "")


# -- kernels by name and stream, and how long their calls take


_MAX_NAME = 120
# Name of a kernel and whether it communicates, and its calls in each mode.
_OfKernel = tuple[tuple[str, bool], dict[Mode, CallTimes]]


def kernels_in_time(record: Record) -> list[Section]:
    """When kernels ran, by name and stream, and how long calls take; nothing if no timeline was recorded."""
    window = record.latest("pictures")
    if window is None:
        return []
    pictures = _by_mode(window)
    blocks: list[Block] = []
    drawn = [(picture, picture.detail) for picture in pictures if picture.detail is not None and picture.detail.slices]
    if drawn:
        blocks += [_chart(drawn, window), _file(window)]
    if any(picture.call_times for picture in pictures):
        blocks.append(_table(pictures, window))
    answer = "One step of each mode kernel by kernel, to look at closely, and how long calls take."
    return [Section("Which kernels run when?", answer, blocks)] if blocks else []


def _by_mode(window: OverlapReport) -> list[StepTimeline]:
    shown = [picture for picture in window.pictures if picture.mode is Mode.OVERLAPPED or not window.control]
    return sorted(shown, key=lambda picture: list(Mode).index(picture.mode))


def _chart(drawn: list[tuple[StepTimeline, StepDetail]], window: OverlapReport) -> Chart:
    track = "thread" if window.device == "cpu" else "stream"
    caption = (
        f"One profiled step of each mode on rank {window.first_rank}, window {window.window}. Point at a kernel for "
        "its name; drag over a part to see it closely, double-click for the whole. A number tells the place of a "
        f"{track} in the order of their first appearance."
    )
    return Chart(
        "streams",
        f"Kernels of one step, by {track}",
        {"unit": "ms", "modes": [_mode(picture, detail, track) for picture, detail in drawn]},
        caption,
        (("compute", "compute"), ("communication", "communication")),
    )


def _file(window: OverlapReport) -> Download:
    """The steps as a file within the page, so that the page alone suffices to open them in Perfetto."""
    content = gzip.compress(msgspec.json.encode(perfetto_trace(window)), mtime=0)
    return Download(
        f"Save these steps for Perfetto ({bytes_in_words(len(content))})",
        f"overlap-window-{window.window}.json.gz",
        "application/gzip",
        base64.b64encode(content).decode(),
        "Open the file in ui.perfetto.dev. overlap trace RUN -o FILE writes those of any window.",
    )


def _mode(picture: StepTimeline, detail: StepDetail, track: str) -> dict[str, object]:
    kernels = list(detail.named_slices)
    lanes = sorted({kernel.lane for kernel in kernels})
    names = [
        [page_text(short_kernel_name(name), _MAX_NAME), communicates]
        for name, communicates in zip(detail.names, detail.communication, strict=False)
    ]
    shown, left_out = len(kernels), detail.left_out
    return {
        "mode": picture.mode.value.capitalize(),
        "step_ms": round(picture.step_ms, 4),
        "left_out": f"; the {shown:,} longest of {shown + left_out:,} calls" if left_out > 0 else "",
        "names": names,
        "lanes": [f"{track} {lane}" for lane in lanes],
        "calls": [
            [kernel.name, lanes.index(kernel.lane), round(kernel.start_ms, 4), round(kernel.length_ms, 4)]
            for kernel in kernels
        ],
    }


def _table(pictures: list[StepTimeline], window: OverlapReport) -> Table:
    by_kernel: dict[tuple[str, bool], dict[Mode, CallTimes]] = {}
    for picture in pictures:
        for row in picture.call_times:
            by_kernel.setdefault((row.name, row.communication), {})[picture.mode] = row
    columns = [
        Column(head, _reader(mode, figure), "whole" if figure == "calls" else None)
        for mode in Mode
        for head, figure in ((f"{mode.value.capitalize()} calls", "calls"), *_CALL_TIMES)
    ]
    return table_of(
        "How long calls of a kernel take",
        by_kernel.items(),
        Column("*Kernel", lambda row: name_cell(row[0][0], short_kernel_name(row[0][0]))),
        Column("*Kind", lambda row: "communication" if row[0][1] else "compute"),
        *columns,
        caption=f"Milliseconds of single calls over the profiled steps of window {window.window}, on rank "
        f"{window.first_rank}; kernels with the most time first.",
        folded=True,
    )


_CALL_TIMES = (("min", "min_ms"), ("median", "median_ms"), ("max", "max_ms"))


def _reader(mode: Mode, figure: str) -> Callable[[_OfKernel], float | None]:
    return lambda row: getattr(row[1][mode], figure) if mode in row[1] else None
