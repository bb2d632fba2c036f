"""Arms in running jobs: windows compare the job as configured with a switch turned, and all is put back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode
from overlap_callbacks.gate.arms import Arm, BaseArm, Sequential
from overlap_callbacks.monitor.window import Window
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

REPEATED = {"repeats": 2, "every_n_steps": 20}  # 8 blocks: enough for an interval


class Slow:
    """Something of the job's that makes its steps slower, and counts how often it is turned."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.on = False
        self.turned = 0

    def turn_on(self) -> None:
        self.on = True
        self.turned += 1

    def turn_off(self) -> None:
        self.on = False

    def arm(self, name: str = "slow") -> Arm:
        return Arm(name, self.turn_on, self.turn_off, equal_results=True)

    def wait(self) -> None:
        if self.on:
            time.sleep(self.seconds)


def train_with(rank: int, folder: str, arms: list[str], steps: int = 42, **options: Any) -> dict[str, Any]:
    training, slow = Training(rank), Slow(0.02)
    made: dict[str, BaseArm] = {"slow": slow.arm(), "sequential": Sequential()}
    monitor = new_monitor(
        JsonlSink(folder), arms=[made[name] for name in arms], schedule=tiny_schedule(**{**REPEATED, **options})
    )
    seen = []
    with captured_log() as lines:
        for step in range(steps):
            with monitor.step(step):
                training.step()
                slow.wait()
                seen.append((monitor.arm, monitor.mode is Mode.SEQUENTIAL, slow.on))
        monitor.close()
    return {"losses": training.losses, "seen": seen, "on": slow.on, "turned": slow.turned, "lines": lines}


def test_an_arm_that_slows_steps_is_reported_and_restored(tmp_path: Path) -> None:
    ranks = run_ranks(train_with, 2, str(tmp_path), ["slow"])
    for rank in ranks:
        assert not rank["on"]
        assert {seen for seen in rank["seen"]} == {(None, False, False), ("slow", False, True)}
    record = read(tmp_path)
    assert not record.windows  # no steps were sequential
    assert [report.window for report in record.arms] == [0, 1]
    for report in record.arms:
        assert report.counts, report.problems
        assert report.arm.name == "slow"
        assert report.num_ranks == 2
        assert report.speedup is not None
        assert report.speedup.ci_high is not None  # there are blocks enough for an interval
        assert report.step_ms is not None
        assert report.configured_step_ms is not None
        assert report.step_ms.value >= 20  # a sleep is never shorter
        ratio = report.configured_step_ms.value / report.step_ms.value
        assert report.speedup.value == pytest.approx(ratio - 1)
        metrics = report.metrics()
        assert metrics["arm/slow_speedup"] == report.speedup.value
        assert metrics["arm/slow_equal_results"] == 1.0


def test_arms_take_turns_with_sequential_steps(tmp_path: Path) -> None:
    rank, _ = run_ranks(train_with, 2, str(tmp_path), ["sequential", "slow"], 80)
    record = read(tmp_path)
    assert [window.window for window in record.windows] == [0, 2]
    assert [report.window for report in record.arms] == [1, 3]
    assert all(window.valid for window in record.windows)
    assert {seen for seen in rank["seen"]} == {(None, False, False), (None, True, False), ("slow", False, True)}


def train_profiled(rank: int, folder: str) -> None:
    train_with(rank, folder, ["slow"], profiled_steps=8, every_n_steps=40)


def test_profiled_arms_have_figures_of_kernels_and_no_doubt_that_they_overlap(tmp_path: Path) -> None:
    run_ranks(train_profiled, 2, str(tmp_path))
    report = read(tmp_path).arms[0]
    assert report.counts, report.problems
    assert report.compute_slowdown is not None
    assert report.exposed_comm_ms is not None
    assert report.exposed_comm_change_ms is not None


def train_to_the_end(rank: int, how: str) -> dict[str, Any]:
    """Ends a monitor, or its window, in the midst of a step in which an arm is turned."""
    training, slow = Training(rank), Slow()
    monitor = new_monitor(arms=[slow.arm()], schedule=tiny_schedule(**REPEATED))
    within: list[bool] = []
    after: list[bool] = []
    step = 0
    with captured_log() as lines:
        for _ in range(12):
            if how == "force" and slow.on:
                monitor.force(Mode.OVERLAPPED)
            if how == "jump" and slow.on:
                step += 5
            with contextlib.suppress(KeyError), monitor.step(step):
                training.step()
                if slow.turned and not slow.on:
                    after.append(monitor.in_window)
                if slow.on:
                    if how == "close":
                        monitor.close()
                        within.append(slow.on)
                    elif how == "exception":
                        raise KeyError("the user's own")
                    elif how == "error of ours":
                        setattr(Window, "end_step", fail)  # noqa: B010 - of this rank's process alone
            step += 1
    on = slow.on
    monitor.close()
    return {"on": on, "within": within, "turned": slow.turned, "after": after, "lines": lines}


def fail(*_: object) -> None:
    raise LookupError("planted")


@pytest.mark.parametrize("how", ["close", "exception", "force", "jump", "error of ours"])
def test_an_arm_is_put_back_however_its_window_ends(how: str) -> None:
    for rank in run_ranks(train_to_the_end, 2, how):
        assert rank["turned"] == 1
        assert not rank["on"]
        assert rank["within"] == ([True] if how == "close" else [])  # only between steps, even then
        assert rank["after"]
        assert not any(rank["after"])  # the window has ended, and so have its other steps with the arm
        assert any("planted" in line for line in rank["lines"]) is (how == "error of ours")


def train_with_a_broken_arm(rank: int) -> dict[str, Any]:
    state = []

    def fail() -> None:
        state.append("on")
        raise OSError("no such switch")

    training = Training(rank)
    monitor = new_monitor(arms=[Arm("broken", fail, lambda: state.append("off"), equal_results=True)])
    with captured_log() as lines:
        for step in range(12):
            with monitor.step(step):
                training.step()
        active = monitor.active
        monitor.close()
    return {"state": state, "active": active, "lines": lines}


def test_an_arm_that_cannot_be_turned_ends_measuring_and_is_put_back() -> None:
    for rank in run_ranks(train_with_a_broken_arm, 2):
        assert rank["state"][:2] == ["on", "off"]
        assert not rank["active"]
        (line,) = [line for line in rank["lines"] if "no such switch" in line]
        assert "a function of the arm broken raised OSError('no such switch') [OC140]" in line
        assert "internal error" not in line


def train_with_unlike_arms(rank: int) -> dict[str, Any]:
    training, slow = Training(rank), Slow()
    monitor = new_monitor(arms=[slow.arm("one" if rank else "another")])
    with captured_log() as lines:
        for step in range(12):
            with monitor.step(step):
                training.step()
        monitor.close()
    return {"turned": slow.turned, "lines": lines}


def test_ranks_with_other_arms_are_found() -> None:
    first, second = run_ranks(train_with_unlike_arms, 2)
    assert first["turned"] == second["turned"] == 0
    assert any("set up differently" in line and "arms" in line for line in first["lines"])


def weights(rank: int, arm: bool) -> list[torch.Tensor]:
    training, slow = Training(rank), Slow()
    monitor = new_monitor(arms=[slow.arm()]) if arm else None
    for step in range(20):
        with monitor.step(step) if monitor is not None else contextlib.nullcontext():
            training.step()
    if monitor is not None:
        assert slow.turned
        monitor.close()
    dist.barrier()
    return [parameter.detach() for parameter in training.model.parameters()]


def test_weights_are_the_same_with_an_arm() -> None:
    with_arm, without = (run_ranks(weights, 2, arm) for arm in (True, False))
    for one, other in zip(with_arm, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Arm("a b", int, int, equal_results=True), "name must be 1 to 60 letters, digits and underscores"),
        (lambda: Arm("a", 1, int, equal_results=True), "on must be a function without arguments, got 1"),  # type: ignore[arg-type]
        (lambda: new_monitor(arms=[]), "arms is empty"),
        (lambda: new_monitor(arms=[Sequential(), Sequential()]), "arms has sequential more than once"),
        (lambda: new_monitor(arms=["sequential"]), "arms must be a list of arms, got 'sequential'"),
        (lambda: new_monitor(arms=Sequential()), "arms must be a list of arms, such as"),
    ],
)
def test_wrong_arms_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
