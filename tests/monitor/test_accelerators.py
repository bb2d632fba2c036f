"""A job on an accelerator that the library does not know: measured, without its kernels, and the report says so."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.step_vectors import FORWARD, OPTIMIZER
from tests.distributed import captured_log, run_ranks
from tests.monitor import toy_accelerator
from tests.monitor.jobs import KeptReports, Training, new_monitor, run_steps, tiny_schedule
from tests.monitor.toy_accelerator import OnToy

pytestmark = pytest.mark.skipif(toy_accelerator.REGISTER is None, reason="this torch has no devices in Python")

NO_KERNELS = "kernel times are missing: the library does not read profiles of devices of type 'toy' yet [OC352]"
NO_POWER = "no power: nothing is known of devices by 'toy' [OC401]"
STEPS = 40


def train_on_a_toy(rank: int, tells: bool) -> dict[str, Any]:
    """A job that computes on one stream and communicates on another.

    Args:
        rank: of the process.
        tells: whether the device's module tells that it is in use.
    """
    toy = toy_accelerator.install()
    if not tells:
        del toy_accelerator.Module.is_initialized
    weights, gradients = OnToy(torch.full((64, 64), 0.01)), OnToy(torch.ones(64, 64))
    schedule = tiny_schedule(every_n_steps=20, profiled_steps=2)
    monitor = new_monitor(sink := KeptReports(), schedule=schedule)
    waits: dict[str, set[tuple[str, ...]]] = {"overlapped": set(), "sequential": set()}
    with captured_log() as lines:
        for _ in range(STEPS):
            toy.side.waited_for.clear()
            with monitor.step():
                mode = monitor.mode.value
                with toy.stream(toy.side):
                    work = dist.all_reduce(gradients, async_op=True)
                weights = weights @ weights
                work.wait()
            waits[mode].add(tuple(toy.side.waited_for))
    active = monitor.active
    monitor.close()
    return {
        "lines": [line.partition(": ")[2] for line in lines], "active": active, "waits": waits,
        "sum": gradients.host[0, 0].item(), "reports": sink.facts(), "devices": [r.device for r in sink.reports],
    }  # fmt: skip


def test_a_job_on_another_accelerator_is_measured_and_said_to_lack_its_kernels() -> None:
    ranks = run_ranks(train_on_a_toy, 2, True)
    for rank in ranks:
        assert rank["active"]
        assert rank["sum"] == 2.0**STEPS
        # Only in sequential steps does the stream that communicates wait for the one that computes.
        assert rank["waits"] == {"overlapped": {()}, "sequential": {("compute",)}}
        assert rank["lines"] == [f"{NO_POWER}; the rest is measured", f"{NO_KERNELS}; the rest is measured"]
    assert ranks[0]["devices"] == [toy_accelerator.DEVICE_NAME] * 2
    for report in ranks[0]["reports"]:
        assert (report["complete"], report["valid"], report["ranks"]) == (True, True, [0, 1])
        assert report["figures"] == ["e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential"]
        assert report["collectives"] == [("allreduce_", 1, 64 * 64 * 4, 64 * 64 * 4)]
        assert NO_KERNELS in report["problems"]


def test_a_job_on_an_accelerator_that_cannot_be_timed_is_not_measured_and_one_line_says_so() -> None:
    for rank in run_ranks(train_on_a_toy, 2, False):
        assert not rank["active"]
        assert rank["reports"] == []
        assert rank["sum"] == 2.0**STEPS
        assert [line for line in rank["lines"] if "'toy'" in line] == rank["lines"]
        assert "cannot be timed" in rank["lines"][-1]


def train_beside_a_toy(rank: int) -> tuple[list[str], bool, list[str]]:
    toy_accelerator.install(initialise=False)
    monitor = new_monitor(sink := KeptReports())
    with captured_log() as lines:
        run_steps(Training(rank), monitor, 10)
    active = monitor.active
    monitor.close()
    return lines, active, [report.device for report in sink.reports]


def test_a_job_on_the_cpu_of_a_machine_with_another_accelerator_is_measured_on_the_cpu() -> None:
    found = run_ranks(train_beside_a_toy, 2)
    assert all(active and lines == [] for lines, active, _ in found)
    assert set(found[0][2]) == {"cpu"}


def train_until_the_device_refuses_marks(rank: int, strict: bool) -> dict[str, Any]:
    toy = toy_accelerator.install()
    weights = OnToy(torch.ones(4, 4))
    monitor = new_monitor(KeptReports(), strict=strict, schedule=tiny_schedule(first_step=10_000))

    def refuse(event: toy_accelerator.Event, stream: toy_accelerator.Stream) -> None:
        raise RuntimeError("the device is lost")

    refusing = mock.patch.object(toy.Event, "record", refuse)
    raised, done = "", 0
    with captured_log() as lines:
        for done in range(10):
            try:
                with monitor.step():
                    if done == 4:
                        refusing.start()
                    monitor.enter(FORWARD)
                    weights = weights + weights
                    monitor.enter(OPTIMIZER)
            except RuntimeError as error:
                raised = str(error)
                break
    active, steps = monitor.active, monitor._driver.ring.vectors().steps.tolist()
    monitor.close()
    refusing.stop()
    return {
        "lines": [line for line in lines if "the device is lost" in line], "raised": raised, "active": active,
        "sum": weights.host[0, 0].item(), "steps": done + 1, "marked": steps,
    }  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_a_mark_that_a_device_refuses_ends_measuring_and_not_the_job(strict: bool) -> None:
    (found,) = run_ranks(train_until_the_device_refuses_marks, 1, strict)
    assert not found["active"]
    assert found["marked"] == [1, 2, 3]  # marks are events once a step has begun; the fifth has no end
    if strict:
        assert (found["raised"], found["steps"], found["lines"]) == ("the device is lost", 6, [])
    else:
        assert (found["raised"], found["steps"], found["sum"]) == ("", 10, 2.0**10)
        (line,) = found["lines"]
        assert "measuring" in line
