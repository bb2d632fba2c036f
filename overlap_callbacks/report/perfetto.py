"""The profiled steps of a window as a trace that Perfetto and Chrome open: the Trace Event Format, in JSON.

Each mode is a process with a track for each stream or thread. Power and clock are counters of their own process. A
track's number is its process's plus its index, so that Perfetto takes the step itself for the process's main thread.
Track number 0 must not be used: Perfetto would merge its slices into the main thread. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from overlap_callbacks.analysis.results.kernel_times import StepDetail, StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import PowerTrace
from overlap_callbacks.analysis.results.report import OverlapReport

Event = dict[str, Any]

_PROCESS_OF = {Mode.OVERLAPPED: 1000, Mode.SEQUENTIAL: 2000}
_POWER_PROCESS = 3000
# Gap between two steps whose times are not on one clock.
_GAP_MS = 1.0


def perfetto_trace(window: OverlapReport) -> dict[str, Any]:
    """The trace of a window with its details.

    Steps and power share one clock if the record has it; otherwise the steps follow one another.

    Raises:
        ValueError: the window has no profiled steps.
    """
    if not window.pictures:
        raise ValueError(f"window {window.window} has no profiled steps")
    starts_ms, origin_ns = _starts(window.pictures, window.power_trace)
    events: list[Event] = []
    for picture, start_ms in zip(window.pictures, starts_ms, strict=True):
        events += _step(picture, start_ms, "thread" if window.device == "cpu" else "stream")
    if window.power_trace is not None and origin_ns is not None:
        events += _power(window.power_trace, (window.power_trace.start_ns - origin_ns) / 1e6)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "window": str(window.window),
            "first_step": str(window.first_step),
            "device": window.device,
            "clock": "of the rank" if origin_ns is not None else "the steps follow one another at a made-up distance",
        },
    }


def _starts(pictures: Sequence[StepTimeline], power: PowerTrace | None) -> tuple[list[float], int | None]:
    """Start of each step in ms from the start of the trace, and that start in ns; None without a clock."""
    known = [picture.detail.start_ns for picture in pictures if picture.detail is not None]
    times_ns = [start_ns for start_ns in known if start_ns is not None]
    if len(times_ns) == len(pictures):
        origin_ns = min([*times_ns, *([power.start_ns] if power is not None else [])])
        return [(start_ns - origin_ns) / 1e6 for start_ns in times_ns], origin_ns
    starts_ms, now_ms = [], 0.0
    for picture in pictures:
        starts_ms.append(now_ms)
        now_ms += picture.step_ms + _GAP_MS
    return starts_ms, None


def _step(picture: StepTimeline, start_ms: float, lane: str) -> Iterator[Event]:
    process = _PROCESS_OF[picture.mode]
    yield _named("process_name", process, 0, f"{picture.mode.value} step")
    yield _sorted("process_sort_index", process, 0)
    yield _named("thread_name", process, 0, "step")
    yield _slice(process, 0, f"{picture.mode.value} step", "step", start_ms, picture.step_ms)
    tracks = _tracks_of_detail(picture.detail, lane) if picture.detail is not None else _tracks_of_unions(picture)
    for track, (name, slices) in enumerate(tracks, start=1):
        yield _named("thread_name", process, track, name)
        yield _sorted("thread_sort_index", process, track)
        for text, category, begin_ms, length_ms, size_bytes in slices:
            yield _slice(process, track, text, category, start_ms + begin_ms, length_ms, size_bytes)


_Slices = list[tuple[str, str, float, float, int]]


def _tracks_of_detail(detail: StepDetail, lane: str) -> Iterator[tuple[str, _Slices]]:
    """Name and slices of each track. A track's slices do not overlap: a stream whose kernels do gets several tracks."""
    lanes: dict[tuple[bool, int], _Slices] = {}
    for kernel in detail.named_slices:
        category = "communication" if kernel.communicates else "compute"
        lanes.setdefault((kernel.communicates, kernel.lane), []).append(
            (detail.names[kernel.name], category, kernel.start_ms, kernel.length_ms, kernel.size_bytes)
        )
    for (communicates, number), slices in sorted(lanes.items()):
        for row, part in enumerate(_without_overlap(slices)):
            kind = "communication" if communicates else "compute"
            yield f"{kind}, {lane} {number}" + (f" ({row + 1})" if row else ""), part


def _without_overlap(slices: _Slices) -> list[_Slices]:
    rows: list[_Slices] = []
    for item in sorted(slices, key=lambda item: item[2]):
        # In integer nanoseconds: adding fractions of a millisecond would separate adjacent slices.
        start_ns = round(item[2] * 1e6)
        row = next((row for row in rows if round((row[-1][2] + row[-1][3]) * 1e6) <= start_ns), None)
        if row is None:
            rows.append([item])
        else:
            row.append(item)
    return rows


def _tracks_of_unions(picture: StepTimeline) -> Iterator[tuple[str, _Slices]]:
    """For older records, which have the intervals of compute and communication but no kernels."""
    for kind, intervals in (("compute", picture.compute), ("communication", picture.communication)):
        yield kind, [(kind, kind, begin, end - begin, 0) for begin, end in intervals]


def _power(trace: PowerTrace, start_ms: float) -> Iterator[Event]:
    yield _named("process_name", _POWER_PROCESS, 0, "power and clock")
    yield _sorted("process_sort_index", _POWER_PROCESS, 0)
    for time_ms, power_w in zip(trace.time_ms, trace.power_w, strict=True):
        yield _counter("power", start_ms + time_ms, "W", power_w)
    for time_ms, clock_mhz in zip(trace.time_ms, trace.sm_clock_mhz, strict=False):
        yield _counter("SM clock", start_ms + time_ms, "MHz", clock_mhz)
    yield _named("thread_name", _POWER_PROCESS, 1, "mode")
    for segment in trace.segments:
        length_ms = segment.end_ms - segment.start_ms
        yield _slice(_POWER_PROCESS, 1, segment.mode.value, "mode", start_ms + segment.start_ms, length_ms)


def _slice(
    process: int, track: int, name: str, category: str, start_ms: float, length_ms: float, size_bytes: int = 0
) -> Event:
    times = {"ts": _microseconds(start_ms), "dur": _microseconds(length_ms)}
    arguments = {"bytes": size_bytes} if size_bytes else {}
    return _event("X", process, track, name, cat=category, **times, args=arguments)


def _counter(name: str, time_ms: float, unit: str, value: float) -> Event:
    return _event("C", _POWER_PROCESS, 0, name, ts=_microseconds(time_ms), args={unit: value})


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return _event("M", process, track, kind, ts=0, args={"name": name})


def _sorted(kind: str, process: int, track: int) -> Event:
    return _event("M", process, track, kind, ts=0, args={"sort_index": track or process})


def _event(phase: str, process: int, track: int, name: str, **more: Any) -> Event:
    return {"ph": phase, "pid": process, "tid": process + track, "name": name, **more}


def _microseconds(time_ms: float) -> float:
    """Nanoseconds become three decimals, as the format requires."""
    return round(time_ms * 1000, 3)
