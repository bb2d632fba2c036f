"""What the Trace Event Format and Perfetto ask of a document, rule by rule: for tests without Perfetto itself."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

_ALL = {"name", "ph", "ts", "pid", "tid", "args"}
_FIELDS = {"X": _ALL | {"cat", "dur"}, "C": _ALL, "M": _ALL}
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
             "thread_sort_index": "sort_index"}  # fmt: skip


def check(document: Any) -> None:
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in document["otherData"].values())
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    processes: dict[int, int] = {}
    for event in document["traceEvents"]:
        assert set(event) == _FIELDS[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["tid"] > 0  # Perfetto has no track 0: it puts such events on the process's main thread
        assert processes.setdefault(event["tid"], event["pid"]) == event["pid"]
        assert isinstance(event["name"], str)
        assert event["name"]
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in event["args"].values())
        else:
            assert set(event["args"]) == {_METADATA[event["name"]]}
    for slices in tracks.values():  # slices of a track nest or follow one another: else a parser drops some
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda item: (item[0], -item[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)
