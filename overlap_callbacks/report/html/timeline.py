"""The kernels of a step by name and stream, and how long calls of each kernel take."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import page_text, short_kernel_name
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CallTimes, StepTimeline
from overlap_callbacks.report.html.elements import Block, Cell, Chart, Table, heads
from overlap_callbacks.report.html.tables import name_cell, number_cell

# The command that writes what is drawn here for a viewer that shows all of it.
_PERFETTO = "overlap trace RUN --perfetto out.json writes this for ui.perfetto.dev."
_MAX_NAME = 120


def kernel_blocks(window: OverlapReport) -> list[Block]:
    """What ran when, by name and stream, and the times of calls; nothing of a record of an older version."""
    pictures = sorted(window.pictures, key=lambda picture: list(Mode).index(picture.arm))
    blocks: list[Block] = []
    drawn = [picture for picture in pictures if picture.calls]
    if drawn:
        blocks.append(_chart(drawn, window))
    if any(picture.call_times for picture in pictures):
        blocks.append(_table(pictures, window))
    return blocks


def _chart(pictures: list[StepTimeline], window: OverlapReport) -> Chart:
    lane = "thread" if window.device == "cpu" else "stream"
    caption = (
        f"One profiled step of each mode on rank {window.first_rank}, window {window.window}. Point at a kernel for "
        f"its name; drag over a part to see it closely, double-click for the whole. {_PERFETTO}"
    )
    return Chart(
        "streams",
        f"Kernels of one step, by {lane}",
        {"unit": "ms", "modes": [_mode(picture, on_host=window.device == "cpu") for picture in pictures]},
        caption,
        (("compute", "compute"), ("communication", "communication")),
    )


def _mode(picture: StepTimeline, *, on_host: bool) -> dict[str, object]:
    lanes = sorted({call.lane for call in picture.calls})
    names = [[page_text(short_kernel_name(name.name), _MAX_NAME), name.communication] for name in picture.names]
    left = picture.num_calls - len(picture.calls)
    return {
        "mode": picture.arm.value.capitalize(),
        "step_ms": round(picture.step_ms, 4),
        "left_out": f"; the {len(picture.calls):,} longest of {picture.num_calls:,} calls" if left > 0 else "",
        "names": names,
        "lanes": [_lane(lane, number, on_host=on_host) for number, lane in enumerate(lanes)],
        "calls": [
            [call.name, lanes.index(call.lane), round(call.start_ms, 4), round(call.length_ms, 4)]
            for call in picture.calls
            if 0 <= call.name < len(names)
        ],
    }


def _lane(lane: int, number: int, *, on_host: bool) -> str:
    if not on_host:
        return f"stream {lane}"
    # Threads have long numbers that say nothing; the training thread has none.
    return "training thread" if lane == 0 else f"thread {number}"


def _table(pictures: list[StepTimeline], window: OverlapReport) -> Table:
    by_kernel: dict[tuple[str, bool], dict[Mode, CallTimes]] = {}
    for picture in pictures:
        for row in picture.call_times:
            by_kernel.setdefault((row.name, row.communication), {})[picture.arm] = row
    rows = []
    for (name, communicates), of_mode in by_kernel.items():
        cells: list[Cell] = [name_cell(name, short_kernel_name(name))]
        kind = "communication" if communicates else "compute"
        cells.append(Cell(kind, kind))
        for mode in Mode:
            found = of_mode.get(mode)
            values = [None] * 4 if found is None else [found.calls, found.min_ms, found.median_ms, found.max_ms]
            cells += [number_cell(value, 0 if place == 0 else None) for place, value in enumerate(values)]
        rows.append(tuple(cells))
    columns = ["*Kernel", "*Kind"]
    for mode in Mode:
        columns += [f"{mode.value.capitalize()} calls", "min", "median", "max"]
    return Table(
        "How long calls of a kernel take",
        heads(*columns),
        tuple(rows),
        f"Milliseconds of single calls over the profiled steps of window {window.window}, on rank "
        f"{window.first_rank}; kernels with the most time first.",
        folded=True,
    )
