"""Figures of a trace by the plainest means: ``json.loads``, decimals, and a walk over all end points.

Nothing here is shared with the library: it is what the library's figures are held against.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import os
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SHARED = Path(os.environ.get("OVERLAP_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")

LAUNCHES = {"cuda_runtime", "cuda_driver", "hip_runtime"}


def shared_trace(name: str) -> Path:
    """A real trace; the test is skipped where they are not at hand."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip("the real traces are not here: set OVERLAP_TRACES to their folder")
    return path


class Kernel(NamedTuple):
    """``step`` is the number of the ``ProfilerStep#`` that launched it, None outside all."""

    name: str
    start: int
    end: int
    communicates: bool
    stream: Any
    step: int | None
    grid: str

    @property
    def duration(self) -> int:
        return self.end - self.start


class Reference(NamedTuple):
    """``steps`` holds start and end by number."""

    events: list[dict[str, Any]]
    kernels: list[Kernel]
    steps: dict[int, tuple[int, int]]

    def of_step(self, number: int | None) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.step == number]


def nanoseconds(microseconds: Any) -> int:
    return int((Decimal(microseconds) * 1000).to_integral_value())


def inflated(path: Path) -> bytes:
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        return gzip.decompress(content)
    return lzma.decompress(content) if path.suffix == ".xz" else content


def read(path: Path) -> Reference:
    document = json.loads(inflated(path), parse_float=Decimal)
    events = document if isinstance(document, list) else document["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    steps: dict[int, tuple[int, int]] = {}
    for event in whole:
        found = re.fullmatch(r"ProfilerStep#(\d+)", event["name"])
        if found and event["cat"] == "user_annotation":
            start = nanoseconds(event["ts"])
            steps.setdefault(int(found.group(1)), (start, start + nanoseconds(event["dur"])))
    launched = {
        event["args"]["correlation"]: nanoseconds(event["ts"])
        for event in whole
        if event.get("cat") in LAUNCHES and event["args"].get("correlation")
    }
    kernels = []
    for event in whole:
        if event.get("cat") != "kernel":
            continue
        start = nanoseconds(event["ts"])
        launch = launched.get(event["args"].get("correlation")) if launched else start
        step = None
        for number, (begin, end) in steps.items():
            if launch is not None and begin <= launch < end:
                step = number
        kernels.append(
            Kernel(
                event["name"],
                start,
                start + nanoseconds(event["dur"]),
                "nccl" in event["name"].lower(),
                event["args"].get("stream"),
                step,
                f"{event['args'].get('grid')} {event['args'].get('block')}",
            )
        )
    return Reference(events, kernels, steps)


class Times(NamedTuple):
    """Nanoseconds; ``overlapped`` is the time in which both ran, ``covered`` counts it for each compute kernel."""

    compute_sum: int
    compute: int
    comm_sum: int
    comm: int
    overlapped: int
    covered: int

    @property
    def exposed(self) -> int:
        return self.comm - self.overlapped


def times(kernels: Iterable[Kernel], among: Sequence[Kernel]) -> Times:
    """Of some kernels; cover is taken against all the kernels ``among`` which they ran."""
    kernels = list(kernels)
    changes: list[tuple[int, int, int]] = []  # time, which counter, by how much
    for column, group in ((0, kernels), (2, among)):
        for kernel in group:
            which = column + kernel.communicates
            changes += [(kernel.start, which, 1), (kernel.end, which, -1)]
    changes.sort()
    running = [0, 0, 0, 0]  # own compute, own communication, any compute, any communication
    compute = comm = overlapped = covered = 0
    for (time, which, change), following in itertools.pairwise([*changes, (changes[-1][0] if changes else 0, 0, 0)]):
        running[which] += change
        length = following[0] - time
        compute += length * (running[0] > 0)
        comm += length * (running[1] > 0)
        overlapped += length * (running[1] > 0 and running[2] > 0)
        covered += length * running[0] * (running[3] > 0)
    return Times(
        sum(kernel.duration for kernel in kernels if not kernel.communicates),
        compute,
        sum(kernel.duration for kernel in kernels if kernel.communicates),
        comm,
        overlapped,
        covered,
    )


def covered(kernel: Kernel, by: Iterable[Kernel]) -> int:
    """How long others ran beside a kernel, by the points at which anything changes."""
    parts = [(max(kernel.start, other.start), min(kernel.end, other.end)) for other in by]
    parts = sorted(part for part in parts if part[0] < part[1])
    total, reached = 0, kernel.start
    for start, end in parts:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
