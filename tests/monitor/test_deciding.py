"""A job that decides about its arms while it trains."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode
from overlap_callbacks.analysis.deciding import Decider
from overlap_callbacks.analysis.results.env_overrides import TIME_ONLY
from overlap_callbacks.gate.arms import Arm, BaseArm, Keep, PowerCap, Sequential
from overlap_callbacks.monitor.background.deciding import Deciding
from overlap_callbacks.monitor.config import MonitorConfig, apply_env_overrides
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, digest_without_library, new_monitor, tiny_schedule
from tests.report.runs import run_info

# A step as configured sleeps for so long, and with an arm so many times that. Where steps take longer without any
# sleep, as on a busy machine, it sleeps for so many times that: what the arms win must stand out.
OWN_S, TIMES_A_STEP = 0.01, 4
SLEEPS = {"faster": 0.1, "slower": 3.0}
SEARCH = Keep(budget=1.0)
# The ranks look after so many steps, between windows, whether the job has shown what it should; a busy machine needs
# more windows to tell.
EVERY, MOST_STEPS, TIMEOUT_S = 24, 2400, 180.0
KEPT_STEPS = 20
RANKS_LOAD = ["overlap_callbacks.monitor.window_runner"]


class Sleeping:
    """Steps that sleep, and arms with which they sleep for another time; all ranks alike."""

    def __init__(self, own_s: float = OWN_S) -> None:
        self.arm = ""
        self._own_s = own_s

    @classmethod
    def beside(cls, training: Training) -> Sleeping:
        """For steps like these, which are of another training than the test's."""
        began_s = time.perf_counter()
        for _ in range(10):
            training.step()
        step_s = torch.tensor((time.perf_counter() - began_s) / 10)
        dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
        return cls(max(OWN_S, TIMES_A_STEP * step_s.item()))

    def arms(self, names: list[str], extra: Any = None) -> list[BaseArm]:
        return [Sequential() if name == "sequential" else self._made(name, extra) for name in names]

    def _made(self, name: str, extra: Any) -> Arm:
        def on() -> None:
            self.arm = name

        def off() -> None:
            self.arm = ""

        return Arm(name, on, off, equal_results=True)

    def sleep(self) -> None:
        time.sleep(self._own_s * SLEEPS.get(self.arm, 1.0))


def train(rank: int, folder: str, names: list[str], decide: Any, how: str = "keep") -> dict[str, Any]:
    """Trains until the job has decided, and kept an arm for some steps, or ``how`` something else has come of it.

    Notes which arm each step had, and which steps were of windows.
    """
    sleeping, training = Sleeping.beside(Training(rank)), Training(rank)
    schedule = tiny_schedule(repeats=2, every_n_steps=EVERY)
    monitor = new_monitor(JsonlSink(folder), arms=sleeping.arms(names), decide=decide, schedule=schedule)
    arms: list[str] = []
    within: list[bool] = []
    done = 0

    def is_over() -> bool:
        if how in ("force", "close"):
            over = bool(done) and len(arms) > done + EVERY
        elif how == "keep":
            over = sum(bool(arm) and not of_window for arm, of_window in zip(arms, within, strict=True)) > KEPT_STEPS
        else:
            decision = read(folder).decision if rank == 0 else None
            over = decision is not None and (decision.best or decision.advised) is not None
        told = torch.tensor(float(over))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told)

    with captured_log() as lines:
        for step in range(MOST_STEPS):
            kept = sleeping.arm == "faster" and not monitor.in_window
            if how == "force" and kept and not done:
                done = step
                monitor.force(Mode.OVERLAPPED)
            with monitor.step(step):
                training.step()
                if how == "other order" and sleeping.arm:
                    dist.all_reduce(training.model.module[0].bias.detach().clone())
                if how == "close" and kept and not done:
                    done = step
                    monitor.close()
                sleeping.sleep()
                arms.append(sleeping.arm)
                within.append(monitor.in_window)
            if step % EVERY == EVERY - 1 and is_over():
                break
        monitor.close()
    return {
        "arms": arms, "within": within, "lines": lines, "digest": training.digest(), "left": sleeping.arm, "done": done,
    }  # fmt: skip


def runs_of(arms: list[str], name: str) -> list[int]:
    """Lengths of the stretches of steps with an arm."""
    return [len(list(run)) for arm, run in itertools.groupby(arms) if arm == name]


def test_an_arm_that_wins_is_turned_on_between_windows_on_all_ranks_at_the_same_steps(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path), ["slower", "faster"], SEARCH, timeout_s=TIMEOUT_S)
    record = read(tmp_path)
    assert record.decision is not None
    assert record.decision.kept == "faster"
    assert all(report.same_order for report in record.arms)
    assert ranks[0]["arms"] == ranks[1]["arms"]
    assert max(runs_of(ranks[0]["arms"], "faster")) > 8  # longer than any block
    assert max(runs_of(ranks[0]["arms"], "slower")) <= 2
    assert runs_of(ranks[0]["arms"], "slower")[0] == runs_of(ranks[0]["arms"], "faster")[0] == 1  # tried in one step
    assert not any(rank["left"] for rank in ranks)
    expected = run_ranks(digest_without_library, 2, len(ranks[0]["arms"]))
    assert [rank["digest"] for rank in ranks] == list(expected)


def recommend(rank: int, folder: str) -> dict[str, Any]:
    MonitorConfig.search = property(lambda config: SEARCH)  # of this rank's process alone: a job of hours in seconds
    return train(rank, folder, ["slower", "faster", "sequential"], "recommend", "decide")


def test_what_is_recommended_is_turned_on_in_windows_only(tmp_path: Path) -> None:
    ranks = run_ranks(recommend, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    record = read(tmp_path)
    assert record.decision is not None
    assert record.decision.best is not None
    assert record.decision.best.arm == "faster"
    assert record.decision.kept == ""
    for rank in ranks:
        assert not [arm for arm, within in zip(rank["arms"], rank["within"], strict=True) if arm and not within]


def test_an_arm_with_other_collectives_is_only_recommended(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path), ["faster"], SEARCH, "other order", timeout_s=TIMEOUT_S)
    record = read(tmp_path)
    assert record.decision is not None
    assert record.decision.advised is not None
    assert record.decision.kept == ""
    assert max(runs_of(ranks[0]["arms"], "faster")) <= 2


@pytest.mark.parametrize("how", ["force", "close"])
def test_the_jobs_own_setting_is_back_between_two_steps_after(how: str, tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path), ["faster"], SEARCH, how, timeout_s=TIMEOUT_S)
    for rank in ranks:
        assert rank["done"], rank["arms"]
        after = rank["arms"][rank["done"] + (how == "close") :]
        assert not any(after)
        if how == "close":
            assert rank["arms"][rank["done"]] == "faster"  # not within the step
    assert ranks[0]["digest"] == run_ranks(digest_without_library, 2, len(ranks[0]["arms"]))[0]


def resume(rank: int, folder: str) -> dict[str, Any]:
    first = train(rank, folder, ["slower", "faster"], SEARCH)
    return {"first": first, **train(rank, folder, ["slower", "faster"], SEARCH)}


def test_a_resumed_job_knows_the_decision_and_votes_anew(tmp_path: Path) -> None:
    ranks = run_ranks(resume, 2, str(tmp_path), timeout_s=2 * TIMEOUT_S)
    assert ranks[0]["arms"] == ranks[1]["arms"]
    arms = ranks[0]["arms"]
    assert "slower" not in arms
    assert max(runs_of(arms, "faster")) > 8
    assert not any(arms[:4])  # not before the first window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decide": "recomend"}, "decide must be 'recommend', Keep"),
        ({"decide": 3}, "decide must be 'recommend', Keep"),
        ({"decide": "recommend", "arms": None}, "nothing to decide"),
        ({"decide": "recommend", "arms": [Sequential()]}, "nothing to decide"),
        ({"decide": Keep(budget=0.01)}, "budget=0.01 is above max_overhead=0.005"),
        ({"decide": Keep(), "schedule": tiny_schedule(control=True)}, "control=True turns none"),
    ],
)
def test_a_wrong_decide_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        MonitorConfig(**{"arms": Sleeping().arms(["faster"]), **options})


def test_an_arm_that_may_not_be_kept_is_at_most_recommended() -> None:
    made: list[BaseArm] = [PowerCap(300.0), Arm("other", bool, bool, equal_results=True)]
    deciding = Deciding(SEARCH, keeps=True, arms=made, least_notice_s=2.0, steps_apart=EVERY)
    with mock.patch.object(Decider, "cannot_keep") as never:
        deciding.open(None, run_info())
    never.assert_called_once_with("power_cap_300")


def test_a_job_that_is_only_timed_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIME_ONLY, "1")
    config, plan = apply_env_overrides(MonitorConfig(arms=Sleeping().arms(["faster"]), decide=Keep()))
    assert plan is not None
    assert config.decide is None


@pytest.mark.parametrize(
    ("options", "name"), [({"budget": 0}, "budget"), ({"wrong": 0.6}, "wrong"), ({"wrong": "x"}, "wrong")]
)
def test_a_wrong_keep_names_the_value(options: dict[str, Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        Keep(**options)
