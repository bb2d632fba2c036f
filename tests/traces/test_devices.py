"""Several devices in one file, of which one lacks kernels in all its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.traces import analyze, read_trace
from tests import kineto
from tests.traces.events import MS, overlap, said
from tests.traces.test_doubts import STEP_NS, US, job, lossy


def on_second_device(*steps: int, lost: int | None = None) -> list[kineto.Event]:
    """Four kernels of 0.5 ms on device 1 in each of these steps; of the one that is lost, the launch alone."""
    events = []
    for number, begin in enumerate(step * STEP_NS + i * MS for step in steps for i in range(4)):
        events.append(kineto.launch(begin, 900 + number))
        if number != lost:
            start = begin + 10 * US
            events.append(kineto.kernel(kineto.GEMM, start, start + MS // 2, 900 + number, device=1))
    return events


@pytest.mark.parametrize("steps", [(0,), (-1,)])  # or it runs kernels before the first step alone
def test_of_several_devices_one_without_a_whole_step_is_in_no_mean_and_says_so(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    path = kineto.write(tmp_path / "a.json", [*lossy(1), *on_second_device(*steps)])
    analysis = analyze([read_trace(path)])
    one, other = analysis.traces
    assert not said(one.warnings, "device")
    assert [time.step for time in one.time] == [None, 1, 2]
    assert said(other.warnings, "device 1 has no step that is known to be whole: it is in no mean")
    assert other.total.cut
    assert [(time.step, time.compute_ms) for time in other.time] == [(None, pytest.approx(other.total.compute_ms))]
    assert other.total.compute_ms > 0
    assert (other.paths, other.host_limit) == ((), None)
    text = overlap("analyze", str(path)).output
    assert text.count("device 1 has no step that is known to be whole") == 1


def test_a_device_with_a_whole_step_is_in_the_mean_of_that(tmp_path: Path) -> None:
    events = [*job(), *on_second_device(0, 1, lost=3)]
    _, other = analyze([read_trace(kineto.write(tmp_path / "a.json", events))]).traces
    assert not said(other.warnings, "device 1 has")
    assert [(time.step, time.compute_ms) for time in other.time] == [(None, 2), (1, 2)]
