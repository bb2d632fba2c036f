"""The kernels of a step by name and stream, and how long calls of each kernel take."""

from __future__ import annotations

import base64
import functools
import gzip

import msgspec

from overlap_callbacks.analysis.formatting import page_text, short_kernel_name
from overlap_callbacks.analysis.results.kernel_times import CallTimes, StepDetail, StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.perfetto import perfetto_trace
from overlap_callbacks.report.views.elements import (
    Block,
    Cell,
    Chart,
    Column,
    Download,
    Section,
    Table,
    name_cell,
    number_cell,
    table_of,
)
from overlap_callbacks.report.views.run import RunView

_MAX_NAME = 120
# Name of a kernel and whether it communicates, and its calls in each mode.
_OfKernel = tuple[tuple[str, bool], dict[Mode, CallTimes]]


def kernels_in_time(view: RunView) -> list[Section]:
    """When each kernel of a step ran, and how long its calls take; nothing where no record of them is kept."""
    window = view.record.latest("pictures") if view.charts else None
    blocks = [] if window is None else kernel_blocks(window)
    answer = "One step of each mode kernel by kernel, to look at closely, and how long calls take."
    return [Section("Which kernels run when?", answer, blocks)] if blocks else []


def kernel_blocks(window: OverlapReport) -> list[Block]:
    """What ran when, by name and stream, and the times of calls; nothing of a record of an older version."""
    pictures = sorted(window.pictures, key=lambda picture: list(Mode).index(picture.mode))
    blocks: list[Block] = []
    drawn = [(picture, picture.detail) for picture in pictures if picture.detail is not None and picture.detail.slices]
    if drawn:
        blocks += [_chart(drawn, window), _file(window)]
    if any(picture.call_times for picture in pictures):
        blocks.append(_table(pictures, window))
    return blocks


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
    """The steps as a file within the page: who has the page alone can open them in Perfetto, too."""
    content = gzip.compress(msgspec.json.encode(perfetto_trace(window)), mtime=0)
    return Download(
        f"Save these steps for Perfetto ({len(content) / 1e3:,.0f} kB)",
        f"overlap-window-{window.window}.json.gz",
        "application/gzip",
        base64.b64encode(content).decode(),
        "Open the file in ui.perfetto.dev. overlap trace RUN --perfetto FILE writes those of any window.",
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
    columns = []
    for mode in Mode:
        for head, figure in ((f"{mode.value.capitalize()} calls", "calls"), *_CALL_TIMES):
            columns.append(Column(head, functools.partial(_of_calls, mode=mode, figure=figure)))
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


def _of_calls(row: _OfKernel, mode: Mode, figure: str) -> Cell:
    calls = row[1].get(mode)
    value = None if calls is None else getattr(calls, figure)
    return number_cell(value, 0 if figure == "calls" else None)
