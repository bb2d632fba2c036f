"""In which range of the host kernels were launched, and a comparison by range."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_callbacks.traces import compare, read_trace
from overlap_callbacks.traces.compared import NO_RANGE
from overlap_callbacks.traces.device_trace import launched_in
from overlap_callbacks.traces.figures import Comparison
from tests import kineto
from tests.traces import nsys_file
from tests.traces.events import MS, gemm, overlap
from tests.traces.short_memory import hold

BACKWARD_THREAD = 200


def nested(chance: random.Random, begin: int, end: int, depth: int = 0) -> list[tuple[int, int]]:
    """Ranges that nest, one within another or one after another."""
    found, now = [], begin
    while depth < 5 and end - now > 3:
        start = now + chance.randrange(0, 3)
        stop = min(end, start + chance.randrange(0, max(2, (end - begin) // 2)))
        found += [(start, stop), *nested(chance, start, stop, depth + 1)]
        now = stop + chance.randrange(0, 3)
    return found


def columns_of(ranges: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Columns of ranges of thread, start and end; the name of each is its place."""
    thread, start, end = np.array(ranges, dtype=np.int64).T
    return {"thread": thread, "start": start, "end": end, "name": np.arange(len(ranges))}


@pytest.mark.parametrize("seed", range(20))
def test_the_innermost_range_is_that_of_a_plain_search(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    hold(monkeypatch, 10)
    chance = random.Random(seed)
    ranges = [(thread, start + 5, stop + 5) for thread in (7, 8) for start, stop in nested(chance, 0, 60)]
    chance.shuffle(ranges)
    times = np.arange(70)
    for thread in (7, 8):
        places = launched_in(columns_of(ranges), np.full(len(times), thread), times, -1)
        for time, place in zip(times.tolist(), places.tolist(), strict=True):
            # The shortest; of those that are alike, any: they are one in another, in no order.
            lengths = {
                stop - start for of_thread, start, stop in ranges if of_thread == thread and start <= time < stop
            }
            assert (ranges[place][2] - ranges[place][1] if place >= 0 else None) == min(lengths, default=None)


def test_threads_without_ranges_are_in_those_of_the_training_thread() -> None:
    ranges, threads, times = columns_of([(7, 0, 10)]), np.array([7, 9, 9, -1]), np.array([5, 5, 10, -1])
    assert launched_in(ranges, threads, times, 7).tolist() == [0, 0, -1, -1]
    assert launched_in(ranges, threads, times, -1).tolist() == [0, -1, -1, -1]


def job(factor: float) -> list[kineto.Event]:
    """A step: two linear layers in a block, the optimizer, what the backward pass launches, and what nobody names."""
    launched_at = {1: 1.2, 2: 2.2, 3: 3.1, 4: 6.5, 5: 8.5, 6: 0.2}
    length = {1: 1.0 * factor, 2: 2.0, 3: 1.5, 4: 3.0 * factor, 5: 0.5, 6: 0.25}
    begins = {6: 1.0, 1: 2.0, 2: 4.0, 3: 7.0, 4: 9.0, 5: 14.0}

    def module(name: str, start: float, end: float) -> kineto.Event:
        return kineto.host_range(f"nn.Module: {name}", round(start * MS), round(end * MS), cat="python_function")

    return [
        kineto.step(1, 0, 20 * MS),
        module("Block_0", 1.0, 4.0),
        module("Linear_0", 1.1, 2.0),
        module("Linear_1", 2.1, 3.0),
        kineto.host_range("backward", 6 * MS, 8 * MS),
        kineto.host_range("Optimizer.step#AdamW.step", 8 * MS, 9 * MS),
        *[
            kineto.launch(round(at * MS), number, thread=BACKWARD_THREAD if number == 4 else 100)
            for number, at in launched_at.items()
        ],
        *[
            gemm(begin, begin + length[number], number, grid=(number, 1, 1)) for number, begin in begins.items()
        ],
    ]  # fmt: skip


def compared(folder: Path) -> tuple[Comparison, list[str]]:
    files = [str(kineto.write(folder / f"{name}.json", job(factor))) for name, factor in (("ov", 1.5), ("seq", 1.0))]
    return compare(*map(read_trace, files)), files


def test_compute_is_compared_by_the_range_that_launched_it(tmp_path: Path) -> None:
    found, _ = compared(tmp_path)
    rows = {row.name: (row.overlapped_ms, row.sequential_ms) for row in found.ranges}
    assert rows == {
        "backward": (4.5, 3.0),  # launched by another thread while the training thread was in it
        "Linear_0": (1.5, 1.0),
        "Linear_1": (2.0, 2.0),
        "Block_0": (1.5, 1.5),
        "Optimizer.step#AdamW.step": (0.5, 0.5),
        NO_RANGE: (0.25, 0.25),
    }
    assert [row.name for row in found.ranges[:2]] == ["backward", "Linear_0"]
    assert sum(row.lost_ms for row in found.ranges) == pytest.approx(sum(row.lost_ms for row in found.kernels))


def test_pushed_nvtx_ranges_of_nsight_systems_count_likewise(tmp_path: Path) -> None:
    files = []
    for name, factor in (("ov", 1.5), ("seq", 1.0)):
        report = nsys_file.NsysFile(tmp_path / f"{name}.sqlite")
        report.add([{**event, **{key: event[key] / 1000 for key in ("ts", "dur")}} for event in job(factor)])
        # Ranges that are started and ended need not nest: this one would be the innermost.
        times = {"start": kineto.BASE_NS + 6 * MS, "end": kineto.BASE_NS + 7 * MS}
        report.row("NVTX_EVENTS", **times, text="other", eventType=60, globalTid=nsys_file.number_of(77, 100))
        files.append(report.close())
    rows = {row.name: (row.overlapped_ms, row.sequential_ms) for row in compare(*map(read_trace, files)).ranges}
    # Modules are no NVTX ranges here.
    assert rows == {
        "backward": (4.5, 3.0),
        "Optimizer.step#AdamW.step": (0.5, 0.5),
        NO_RANGE: (pytest.approx(5.25), pytest.approx(4.75)),
    }


def test_the_command_shows_them(tmp_path: Path) -> None:
    _, files = compared(tmp_path)
    shown = overlap("compare", *files).stdout
    part = shown[shown.index("Compute by module or range of the host, per step") :]
    assert part.index("backward") < part.index("Linear_0") < part.index(NO_RANGE)
    lines = overlap("compare", *files, "--csv", "ranges").stdout.splitlines()
    assert lines[0].startswith("name,communication,overlapped_calls")
    assert len(lines) == 7


def without_ranges(event: kineto.Event) -> bool:
    return event["cat"] != "python_function" and event["name"] not in ("backward", "Optimizer.step#AdamW.step")


def test_a_file_without_ranges_has_no_such_table(tmp_path: Path) -> None:
    files: list[Any] = []
    for name, factor in (("ov", 1.5), ("seq", 1.0)):
        files.append(kineto.write(tmp_path / f"{name}.json", filter(without_ranges, job(factor))))
    assert compare(*map(read_trace, files)).ranges == ()
    assert "range of the host" not in overlap("compare", *map(str, files)).stdout


def test_a_module_that_step_names_is_the_step(tmp_path: Path) -> None:
    """As with operators of old files and ranges that users have named."""
    path = kineto.write(tmp_path / "trace.json", job(1.0))
    names = read_trace(path).launches.ranges  # type: ignore[union-attr]
    name = next(name for name in names if "_" in name)
    trace = read_trace(path, steps=re.compile(rf"nn\.Module: {re.escape(name)}$"))
    assert trace.steps
    assert name not in trace.launches.ranges  # type: ignore[union-attr]
