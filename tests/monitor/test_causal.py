"""Causal windows in jobs whose slack is set by construction: compute is sleep, and collectives are Gloo's."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.analysis.causal import Verdict, levels_of, responses_of
from overlap_callbacks.analysis.results.env_overrides import TIME_ONLY
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate import delays
from overlap_callbacks.monitor.config import MonitorConfig, apply_env_overrides
from overlap_callbacks.monitor.schedule import Part, Schedule
from overlap_callbacks.report import record
from overlap_callbacks.report.views.causal import causal
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import run_ranks
from tests.monitor.jobs import kept_logs

RANKS_LOAD = ("torch",)
STEP_S, EVERY, WINDOWS = 0.06, 42, 5
SCHEDULE: dict[str, Any] = {"first_step": 4, "every_n_steps": EVERY, "repeats": 2, "profiled_steps": 0, "spread": False}


def _step(blocking: torch.Tensor, slack: torch.Tensor, others: dist.ProcessGroup) -> list[float]:
    """Waits for a collective before compute, for one after more compute than any delay; ranks 2 and 3 for one more."""
    blocking.fill_(1.0)
    slack.fill_(2.0)
    gathered = torch.empty(4 * len(blocking))
    late = dist.all_reduce(slack, async_op=True)
    dist.all_gather_into_tensor(gathered, blocking, async_op=True).wait()
    time.sleep(STEP_S)
    late.wait()
    if dist.get_rank() > 1:
        of_others = torch.ones(64)
        dist.all_reduce(of_others, group=others, async_op=True).wait()
        return [float(gathered.sum()), float(slack.sum()), float(of_others.sum())]
    return [float(gathered.sum()), float(slack.sum())]


def _train(rank: int, folder: str) -> tuple[list[list[float]], int]:
    """What its collectives gave, and how many of them were delayed."""
    tensors = torch.zeros(64), torch.zeros(64)
    others = dist.new_group([2, 3])
    numbers, delays = [], 0
    for _ in range(2):  # the second start goes on in the record
        monitor = OverlapMonitor(
            Schedule(**SCHEDULE), [JsonlSink(folder)], causal=True, max_overhead=None, power=False, strict=True
        )
        with kept_logs() as logs:
            for step in range(SCHEDULE["first_step"] + WINDOWS * EVERY):
                monitor.step_begin(step)
                numbers.append(_step(*tensors, others))
                monitor.step_end()
        monitor.close()
        delays += sum([len(log.delays) for log in logs])
    deadline_s = time.monotonic() + 30
    while any(thread.name == "overlap-callbacks-delays" for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return numbers, delays


def holds(slope: Estimate, truth: float) -> bool:
    """Whether its interval is around the truth; a tenth more for what timers are late."""
    return slope.ci_low is not None and slope.ci_high is not None and slope.ci_low - 0.1 < truth < slope.ci_high + 0.1


@pytest.mark.alone
@pytest.mark.nightly  # the simulated device and the simulations have known slack each day
def test_slopes_of_a_job_of_known_slack(tmp_path: Path) -> None:
    ranks = run_ranks(_train, 4, str(tmp_path), timeout_s=180)
    for rank, (numbers, _) in enumerate(ranks):
        assert numbers == [[256.0, 512.0, *([128.0] if rank > 1 else [])]] * len(numbers)
    found = record.read(tmp_path)
    # Every second window: all of each dimension first, also of the group without rank 0; after the restart the halves.
    assert [window.window for window in found.causal] == [1, 3, 1, 3]
    assert [len(window.delayed.members) for window in found.causal] == [2, 1, 1, 1]
    assert len(found.windows) == 6
    steps = len(found.causal[0].levels)
    assert [delays for _, delays in ranks] == [4 * steps, 4 * steps, 5 * steps, 5 * steps]
    for window in found.causal:
        assert window.levels == levels_of(len(window.levels), window.window)
        assert window.missed == 0
    assert found.causal[0].charged_ms > 0  # what the delays cost is within the budget
    alone = {of.delayed.members[0]: of for of in responses_of(found.causal) if of.alone}
    assert len(alone) == 3
    (slack,) = [of for call, of in alone.items() if (call.operator, call.group) == ("allreduce_", "world")]
    for blocking in [of for of in alone.values() if of is not slack]:
        assert holds(blocking.slope, 1.0)
        assert blocking.verdict is not Verdict.SLACK
    assert holds(slack.slope, 0.0)
    assert slack.verdict is not Verdict.BLOCKING


MISSED = range(44, 46)  # steps of the only causal window


def _train_and_miss(rank: int, folder: str, max_overhead: float | None = None) -> list[float]:
    """Rank 1 cannot delay its collectives in some steps."""
    tensor, found = torch.zeros(8), []
    options: dict[str, Any] = {**SCHEDULE, "first_step": 3, "every_n_steps": 32}
    with OverlapMonitor(
        Schedule(**options), [JsonlSink(folder)], causal=True, max_overhead=max_overhead, power=False, strict=True
    ) as monitor:
        for step in range(66):
            monitor.step_begin(step)
            tensor.fill_(step)
            misses = rank == 1 and step in MISSED
            with mock.patch.object(delays, "can_be_delayed", return_value=False) if misses else nullcontext():
                dist.all_reduce(tensor, async_op=True).wait()
            found.append(float(tensor[0]))
            monitor.step_end()
    return found


@pytest.mark.nightly
def test_a_delay_that_another_rank_misses_is_left_out_and_said(tmp_path: Path) -> None:
    assert run_ranks(_train_and_miss, 2, str(tmp_path)) == [[2.0 * step for step in range(66)]] * 2
    found = record.read(tmp_path)
    (window,) = found.causal
    assert (window.missed, window.missed_steps) == (0, len(MISSED))  # rank 0 missed none
    assert window.step_ms.count(None) >= len(MISSED)
    (section,) = causal(found)
    assert section.answer.endswith(" Left out, as a rank could not delay all: 2 steps.")


@pytest.mark.nightly
def test_the_budget_skips_causal_windows_too(tmp_path: Path) -> None:
    # What the first window cost is not paid for, or not known yet, in so short a job.
    assert run_ranks(_train_and_miss, 2, str(tmp_path), 1e-6) == [[2.0 * step for step in range(66)]] * 2
    found = record.read(tmp_path)
    assert [window.window for window in found.windows] == [0]
    assert found.causal == []
    assert len(found.left_out) == 1  # window 1, which is causal above


def test_options_that_leave_no_causal_window_are_refused() -> None:
    with pytest.raises(ValueError, match="neither decide nor control"):
        MonitorConfig(causal=True, schedule=Schedule(control=True))
    with pytest.raises(ValueError, match="every_n_steps of at least 25, got 24"):
        MonitorConfig(
            causal=True, schedule=Schedule(every_n_steps=24, repeats=1, profiled_steps=0, warmup_steps=0, spread=False)
        )
    with pytest.raises(TypeError, match="causal"):
        MonitorConfig(causal=1)  # type: ignore[arg-type]


def test_a_job_that_is_only_timed_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIME_ONLY, "1")
    config, plan = apply_env_overrides(MonitorConfig(causal=True))
    assert plan is not None
    assert config.causal is False


@pytest.mark.parametrize(
    ("every_n_steps", "delayed", "profiled"), [(500, 54, 5), (60, 54, 5), (50, 42, 5), (33, 24, 5), (29, 24, 0)]
)
def test_a_causal_window_ends_with_profiled_steps_if_there_is_room(
    every_n_steps: int, delayed: int, profiled: int
) -> None:
    schedule = Schedule(
        every_n_steps=every_n_steps, repeats=1, warmup_steps=0, first_step=0, spread=every_n_steps > 400
    )
    placed = schedule.causal(levels_of(schedule.delayed_steps))
    plans = [plan for step in range(every_n_steps) if (plan := placed.plan(step)) is not None]
    assert [plan.last for plan in plans] == [*[False] * (len(plans) - 1), True]
    by_part = {part: [plan for plan in plans if plan.part is part] for part in (Part.DELAYED, Part.PROFILED)}
    assert [len(of) for of in by_part.values()] == [delayed, profiled]
    assert [plan.counted for plan in by_part[Part.PROFILED]] == [False, True, True, True, True][:profiled]
    assert not any(plan.level or plan.mode is Mode.SEQUENTIAL for plan in by_part[Part.PROFILED])
    assert [plan.offset for plan in plans] == [step for step in range(every_n_steps) if placed.plan(step) is not None]
