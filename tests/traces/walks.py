"""Idle time, critical paths and queues of a trace by the plainest means, in whole nanoseconds.

Nothing here is shared with the library: it is what the library's figures are held against.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from tests.traces.reference import LAUNCHES, nanoseconds

HAND_OVER_NS = 2_000
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize",
         "hipMemcpyWithStream")  # fmt: skip


class Row(NamedTuple):
    """``part`` is compute, communication or copy."""

    part: str
    start: int
    end: int
    stream: Any
    launched: int | None
    name: str


class Walk(NamedTuple):
    rows: list[Row]
    waits: list[tuple[int, int]]


def read(path: Path, device: int = 0) -> Walk:
    """The rows that take time, and when the host waited for the device."""
    content = path.read_bytes()
    content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    events = [e for e in json.loads(content, parse_float=Decimal)["traceEvents"] if e.get("ph") == "X"]
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in LAUNCHES and e["args"].get("correlation")}

    def bounds(event: Any) -> tuple[int, int]:
        start = nanoseconds(event["ts"])
        return start, start + nanoseconds(event["dur"])

    rows, waits = [], [bounds(e) for e in events if e.get("cat") in LAUNCHES and e["name"] in WAITS]
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or event["args"]["device"] != device:
            continue
        start, end = bounds(event)
        call = calls.get(event["args"].get("correlation"))
        part = "copy" if event["cat"] != "kernel" else "compute"
        if "nccl" in event["name"].lower():
            part = "communication"
        if call is not None and part == "copy" and bounds(call)[1] >= end:
            waits.append(bounds(call))
        launched = None if call is None else bounds(call)[0]
        if end > start:
            rows.append(Row(part, start, end, event["args"]["stream"], launched, event["name"]))
    return Walk(rows, sorted(waits, key=lambda wait: wait[1]))


def uses(walk: Walk, begin: int, end: int) -> dict[str, int]:
    """What the device does between two times, from one change to the next."""
    times = sorted({begin, end, *(t for row in walk.rows for t in (row.start, row.end) if begin < t < end)})
    by_start = sorted(walk.rows, key=lambda row: (row.start, -1 if row.launched is None else row.launched))
    changes = sorted([(r.start, 1, r.part) for r in walk.rows] + [(r.end, -1, r.part) for r in walk.rows])
    running, place, following = {"compute": 0, "communication": 0, "copy": 0}, 0, 0
    found = dict.fromkeys(("compute", "exposed", "copy", "host", "launch", "other"), 0)
    gap = begin
    for now, then in itertools.pairwise(times):
        while place < len(changes) and changes[place][0] <= now:
            running[changes[place][2]] += changes[place][1]
            place += 1
        if running["compute"]:
            found["compute"] += then - now
        elif running["communication"]:
            found["exposed"] += then - now
        elif running["copy"]:
            found["copy"] += then - now
        else:
            gap = now
            while following < len(by_start) and by_start[following].start < then:
                following += 1
            launched = by_start[following].launched if following < len(by_start) else None
            if launched is None or launched < gap:
                found["other"] += then - now
            else:
                late = min(launched, then)
                found["host"] += late - now
                found["launch"] += then - late
    return found


def path(walk: Walk, begin: int, end: int) -> tuple[dict[str, int], list[str]]:
    """The parts of the critical path that ends with the last row before ``end``, and the names of its rows."""
    parts = dict.fromkeys(("compute", "communication", "copy", "launch", "host", "other"), 0)
    by_end = sorted(walk.rows, key=lambda row: (row.end, -row.start))
    ends = [row.end for row in by_end]
    names: list[str] = []

    def last_before(time: int, stream: Any = None) -> Row | None:
        for i in range(bisect.bisect_right(ends, time) - 1, -1, -1):
            if stream is None or by_end[i].stream == stream:
                return by_end[i]
        return None

    row, until = last_before(end), end
    while row is not None and until > begin:
        names.append(row.name)
        parts[row.part] += until - max(row.start, begin)
        until = row.start
        if until <= begin:
            break
        own, any_row = last_before(until, row.stream), last_before(until)
        before = any_row
        if own is not None and any_row is not None and (until - own.end <= HAND_OVER_NS or own.end >= any_row.end):
            before = own
        launched = None if row.launched is None else min(row.launched, until)
        if launched is not None and launched >= (before.end if before is not None else begin):
            parts["launch"] += until - max(launched, begin)
            until = max(launched, begin)
            before = None
            for wait in reversed(walk.waits):
                waited = last_before(wait[1])
                if wait[1] <= launched and waited is not None and waited.end > wait[0]:
                    before = waited
                    break
            part = "host"
        else:
            part = "other"
        ended = max(before.end, begin) if before is not None else begin
        parts[part] += until - ended
        until, row = ended, before
    return parts, names
