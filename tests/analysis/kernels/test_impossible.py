"""Kernels that overrun the next of their stream, against a plain search; calls by their names; captures."""

from __future__ import annotations

import random

import numpy as np
import pytest

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels import impossible
from overlap_callbacks.analysis.kernels.impossible import (
    CAPTURE_BEGINS,
    CAPTURE_ENDS,
    DRIVER_LAUNCH,
    LAUNCH,
    NO_LAUNCH,
    OVERRUN_NS,
    call_of,
    captures_of,
    overruns,
)

US = 1_000


def plain_search(lane: list[int], start: list[int], end: list[int], launch: list[int]) -> dict[int, int]:
    found = {}
    for i in range(len(lane)):
        later = [
            start[j]
            for j in range(i + 1, len(lane))
            if lane[j] == lane[i] and end[j] > start[j] and not launch[j] == launch[i] != 0
        ]
        if end[i] > start[i] and later and end[i] - later[0] > OVERRUN_NS:
            found[i] = later[0]
    return found


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_overruns_are_those_of_a_plain_search(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(impossible, "_AT_ONCE", at_once)
    number = 0
    for seed in range(300):
        chance = random.Random(seed)
        size = chance.randrange(25)
        start = sorted(chance.randrange(30) * 20 * US for _ in range(size))
        end = [time + chance.choice([0, 10, 40, 100, 300]) * US for time in start]
        lane = [chance.randrange(3) for _ in range(size)]
        launches = np.cumsum([chance.randrange(2) for _ in range(size)]) + 1
        launch = [chance.choice([0, one, one]) for one in launches.tolist()]
        ran = Intervals(np.array(start, dtype=np.int64), np.array(end, dtype=np.int64))
        found = overruns(np.array(lane, dtype=np.int64), ran, np.array(launch, dtype=np.uint64))
        assert dict(zip(found.rows.tolist(), found.until_ns.tolist(), strict=True)) == plain_search(
            lane, start, end, launch
        )
        number += len(found.rows)
    assert number > 300


@pytest.mark.parametrize(
    ("names", "call"),
    [
        (("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel_v9000", "hipExtModuleLaunchKernel",
          "hipLaunchKernel", "hipExtLaunchKernel", "hipModuleLaunchKernel"), LAUNCH),
        (("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"), DRIVER_LAUNCH),
        (("cudaStreamBeginCapture", "cuStreamBeginCapture_v2", "hipStreamBeginCapture"), CAPTURE_BEGINS),
        (("cudaStreamEndCapture", "cuStreamEndCapture", "hipStreamEndCapture"), CAPTURE_ENDS),
        (("cudaGraphLaunch", "cudaMemcpyAsync", "cudaLaunchHostFunc", "cudaStreamIsCapturing", "", None,
          "cudaLaunchCooperativeKernelMultiDevice", "zeCommandListAppendLaunchKernel"), NO_LAUNCH),
    ],
)  # fmt: skip
def test_calls_are_known_by_their_names(names: tuple[str | None, ...], call: int) -> None:
    assert {call_of(name) for name in names} == {call}


def test_captures_of_several_threads_and_at_the_edges() -> None:
    def found(*calls: tuple[int, bool]) -> list[bool]:
        times, begins = zip(*calls, strict=True) if calls else ((), ())
        captures = captures_of(np.array(times, dtype=np.int64), np.array(begins, dtype=bool))
        points = np.array([5, 15, 25])
        return [bool(value) for value in Intervals(points, points + 1).covered_ns(captures) > 0]

    assert found() == [False, False, False]
    assert found((10, True), (20, False)) == [False, True, False]
    assert found((10, False)) == [True, False, False]
    assert found((20, True)) == [False, False, True]
    assert found((10, True), (12, True), (14, False), (20, False)) == [False, True, False]
