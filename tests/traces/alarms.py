"""What in a trace cannot be or is missing, counted by the plainest means: what the library says is held against it.

Nothing here is shared with the library.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.traces.reference import LAUNCHES, inflated, nanoseconds

ON_DEVICE = {"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
OVERRUN_NS = 50_000
HOUR_NS = 3_600 * 10**9

_LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch\w*Kernel")
_CAPTURE = re.compile(r"(cuda|cu|hip)Stream(Begin|End)Capture")
# What the library says of each kind, with its number.
_SAID = {
    "lost": re.compile(r"(\d+) of \d+ launches have no kernel"),
    "captured": re.compile(r"(\d+) launches were captured into a CUDA graph"),
    "timeless": re.compile(r"(\d+) (?:kernels have no time|events have no time that can be read)"),
    "twice": re.compile(r"(\d+) kernels are in the file more than once"),
    "long step": re.compile(r"() ends \S+ ms after the profile"),
    "late": re.compile(r"(\d+) kernels end later|() on stream \S+ ends \S+ ms after"),
}
# The library counts these with those of another kind, by rules of more than one line.
_NOT_COUNTED = "after all else has ended"


def said(sentences: Iterable[str]) -> Counter[str]:
    """The number of events of each kind that cannot be or are missing, as the library says it."""
    found: Counter[str] = Counter()
    for sentence in sentences:
        for kind, words in _SAID.items():
            matched = words.search(sentence)
            if matched and _NOT_COUNTED not in sentence:
                found[kind] += int(matched[1] or 1)
    return found


def events_of(path: Path) -> list[dict[str, Any]] | None:
    """The events of a file; None if it is no plain JSON."""
    try:
        document = json.loads(inflated(path), parse_float=Decimal)
    except (ValueError, ArithmeticError, EOFError, OSError, lzma.LZMAError):
        return None
    events = document["traceEvents"] if isinstance(document, dict) else document
    return [event for event in events if isinstance(event, dict)]


def counted(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """The same, by a count over the events."""
    events = list(events)
    ended_ns = [nanoseconds(event["ts"]) for event in events if event.get("name") == "Record Window End"]
    events = [event for event in events if event.get("ph") == "X"]
    rows, calls = [], {}
    begins_ns, ends_ns = [], []
    for event in events:
        args, span = event.get("args") or {}, _span(event)
        if event.get("cat") in ON_DEVICE:
            rows.append((event, args, span))
        elif event.get("cat") in LAUNCHES:
            if args.get("correlation"):
                calls.setdefault(args["correlation"], (event, span))
            if span and (capture := _CAPTURE.match(event["name"])):
                (begins_ns if capture[2] == "Begin" else ends_ns).append(span[0])
    found: Counter[str] = Counter()
    steps = [
        span[1] for event in events if re.match(r"ProfilerStep#\d", str(event.get("name"))) and (span := _span(event))
    ]
    found["long step"] = bool(ended_ns and steps) and max(steps) > max(ended_ns)
    ran = {args.get("correlation") for _, args, _ in rows}
    lost = {number: call for number, call in calls.items() if _LAUNCH.match(call[0]["name"]) and number not in ran}
    for event, span in lost.values():
        inside = span is not None and (
            sum(time <= span[0] for time in begins_ns) > sum(time <= span[0] for time in ends_ns)
            or (not begins_ns and bool(ends_ns) and span[0] < min(ends_ns))
        )
        found["captured" if inside else "lost"] += not _within_another(event, span, calls, ran)
    streams: dict[Any, list[tuple[int, int, Any, str]]] = {}
    for event, args, span in rows:
        launched = calls.get(args.get("correlation"), (None, None))[1]
        if span is None or span[0] <= 0 or (launched and launched[0] > 0 and abs(span[0] - launched[0]) > HOUR_NS // 2):
            found["timeless"] += 1
            continue
        row = (*span, args.get("correlation"), event["name"])
        mine = streams.setdefault((args.get("device", event["pid"]), event["tid"]), [])
        if row in mine and span[1] > span[0]:
            found["twice"] += 1
        else:
            mine.append(row)
    for stream in streams.values():
        stream.sort(key=lambda row: row[:1])
        took_time = [row for row in stream if row[1] > row[0]]
        for place, (_, end, number, _) in enumerate(took_time):
            others = [row for row in took_time[place + 1 :] if not number or row[2] != number]
            found["late"] += bool(others) and end - others[0][0] > OVERRUN_NS
    return +found


def _span(event: dict[str, Any]) -> tuple[int, int] | None:
    try:
        start, duration = nanoseconds(event["ts"]), nanoseconds(event["dur"])
    except (ArithmeticError, ValueError, TypeError, KeyError):
        return None
    if abs(start) >= 2**62 or not 0 <= duration < 2**61 or bool in (type(event["ts"]), type(event["dur"])):
        return None
    return start, start + duration


def _within_another(event: dict[str, Any], span: Any, calls: dict[Any, Any], ran: set[Any]) -> bool:
    """Whether a call of the driver lies within one of the runtime on the same thread, and one of them ran a kernel."""
    return span is not None and any(
        other["tid"] == event["tid"] and number in ran and of and of[0] < span[1] and span[0] < of[1]
        for number, (other, of) in calls.items()
        if _LAUNCH.match(other["name"]) and other["name"].startswith("cuL") != event["name"].startswith("cuL")
    )
