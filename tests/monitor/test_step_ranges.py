"""Ranges that name the steps of windows in a user's own profile."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.schedule import Placement, Schedule
from overlap_callbacks.monitor.window import PREFIX, StepRanges, range_name
from overlap_callbacks.monitor.window_runner import WindowRunner
from tests.distributed import run_ranks
from tests.monitor.fakes import Bench
from tests.monitor.jobs import Training, digest_without_library, new_monitor, run_steps, tiny_schedule
from tests.monitor.test_window_runner import GRANTED, SCHEDULE, run


def profiled() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def ranges(profile: Any) -> list[str]:
    """Names of our ranges in a user's profile, in order of time."""
    events = [event for event in profile.events() if event.name.startswith(PREFIX)]
    return [event.name.removeprefix(PREFIX) for event in sorted(events, key=lambda event: event.time_range.start)]


def train(rank: int, annotate: bool) -> tuple[list[str], bool]:
    monitor = new_monitor(schedule=tiny_schedule(every_n_steps=20), annotate_steps=annotate)
    training = Training(rank)
    with profiled() as theirs:
        run_steps(training, monitor, 20)
    monitor.close()
    return ranges(theirs), training.digest() == digest_without_library(rank, 20)


def train_both(rank: int) -> list[tuple[list[str], bool]]:
    return [train(rank, annotate=True), train(rank, annotate=False)]


def test_a_real_profile_shows_the_steps_of_a_window_and_their_modes_and_training_stays_bit_identical() -> None:
    for annotated, plain in run_ranks(train_both, 2):
        assert annotated[1]
        assert plain == ([], True)
        names = annotated[0]
        modes = Counter(name.split(" ")[0] for name in names)
        assert set(modes) == {"overlapped", "sequential"}
        assert names[0] == "overlapped step 2 of window 0, recorded"
        numbers = [int(name.split(" ")[2]) for name in names]
        assert numbers == sorted(numbers)
        assert len(names) == 5  # nothing outside the window's parts
        assert any(name.endswith(", timed, warm-up") or name.endswith(", timed") for name in names)


def runner_with_ranges(bench: Bench) -> WindowRunner:
    bench.slot.config = MonitorConfig(schedule=SCHEDULE, annotate_steps=True)
    return WindowRunner(bench.slot, bench.ring)


def test_steps_outside_windows_have_no_range_and_one_that_is_given_up_ends_its_own() -> None:
    bench = Bench(GRANTED, GRANTED)
    runner = runner_with_ranges(bench)
    with profiled() as theirs:
        run(runner, *range(12))
        runner.begin(12)
        runner.abandon("the step fails")
        with torch.profiler.record_function("after"):
            pass
    names = ranges(theirs)
    modes = ["overlapped", "overlapped", "sequential", "sequential", "overlapped"]
    assert [name.split(" ")[:3:2] for name in names] == [
        [mode, str(number)] for number, mode in [*enumerate(modes, start=2), (12, "overlapped")]
    ]
    after = next(event for event in theirs.events() if event.name == "after")
    last = [event for event in theirs.events() if event.name.startswith(PREFIX)][-1]
    assert last.time_range.end <= after.time_range.start


class Nvtx:
    """What torch's NVTX module does, written down."""

    def __init__(self, missing: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._missing = missing

    def range_start(self, name: str) -> int:
        if self._missing:
            raise RuntimeError("NVTX functions not installed")
        self.calls.append(("start", name))
        return len(self.calls)

    def range_end(self, number: int) -> None:
        self.calls.append(("end", number))


@pytest.mark.parametrize("missing", [False, True])
def test_on_a_gpu_each_range_is_nvtx_s_too_and_a_build_without_it_does_without(
    monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    nvtx = Nvtx(missing)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx", nvtx)
    steps = StepRanges(enabled=True)
    window = SCHEDULE.placed(Placement(1, 5, steps_per_block=1))
    plans = [window.plan(number) for number in (2, 4)]
    for number, plan in zip((2, 4), plans, strict=True):
        assert plan is not None
        steps.begin(plan, number)
        steps.end()
        steps.end()
    wanted = [
        ("start", f"{PREFIX}overlapped step 2 of window 0, recorded"), ("end", 1),
        ("start", f"{PREFIX}sequential step 4 of window 0, timed"), ("end", 3),
    ]  # fmt: skip
    assert nvtx.calls == ([] if missing else wanted)


def test_every_step_of_a_window_has_a_name() -> None:
    window = Schedule().placed(Placement(40, 120))
    names = {range_name(plan, step) for step in range(200) if (plan := window.plan(step)) is not None}
    for kind in (
        "overlapped step 20 of window 0, recorded", "overlapped step 59 of window 0, around the timed ones",
        "overlapped step 60 of window 0, timed, warm-up", "sequential step 64 of window 0, timed",
        "sequential step 143 of window 0, profiled",
    ):  # fmt: skip
        assert f"{PREFIX}{kind}" in names


def test_without_the_option_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.profiler.record_function", SimpleNamespace)  # would fail on a name
    steps, plan = StepRanges(enabled=False), SCHEDULE.plan(2)
    assert plan is not None
    steps.begin(plan, 2)
    steps.end()
