"""What the order check cannot foresee: an order that changes later, checks that overlap, numbers that come again."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from overlap_callbacks import Mode, OverlapMonitor, Schedule
from overlap_callbacks.gate.deadlock import CollectiveSequence, Item
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker, Ruling
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.submissions import RecordedKinds
from overlap_callbacks.monitor.config import MonitorConfig
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports

SCHEDULE = Schedule(every_n_steps=17, first_step=2, repeats=2, steps_per_block=1, profiled_steps=0)


def _reduce_on(*groups: dist.ProcessGroup) -> list[float]:
    works = []
    for group in groups:
        tensor = torch.ones(4)
        works.append((tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for _, work in works:
        work.wait()
    return [tensor[0].item() for tensor, _ in works]


def _vary(rank: int) -> dict[str, Any]:
    first, second = (dist.new_group([0, 1], timeout=datetime.timedelta(seconds=30)) for _ in range(2))
    sink = KeptReports()
    config = MonitorConfig(schedule=SCHEDULE, sinks=[sink], max_overhead=None, report_timeout_s=2.0)
    monitor = OverlapMonitor.from_config(config, Gate(patience_s=0.5))
    results, varied = [], False
    with captured_log() as lines:
        for step in range(40):
            with monitor.step(step):
                if step == SCHEDULE.first_step + 2:  # the first window is granted; later ones are waited for in vain
                    checks = monitor._driver.slot._session.order_checker  # type: ignore[union-attr]
                    checks._timeout_s, checks.patience_s = 1.0, 1.0
                # Once in a sequential step, after the check has passed, and waiting for each.
                if rank == 1 and monitor.mode is Mode.SEQUENTIAL and not varied:
                    varied = True
                    results.append([*_reduce_on(second), *_reduce_on(first)])
                else:
                    results.append(_reduce_on(first, second))
        active = monitor.active
        monitor.close()
    return {"results": results, "lines": lines, "active": active}


def test_an_order_that_changes_after_the_check_costs_some_seconds_and_the_measuring_but_hangs_nothing() -> None:
    found = run_ranks(_vary, 2, timeout_s=60)
    assert all(rank["results"] == [[2.0, 2.0]] * 40 for rank in found)
    # The rank that keeps to the order waits in vain, lets go and says so.
    stuck = [line for rank in found for line in rank["lines"] if "did not finish within 0.5 s" in line]
    assert stuck
    assert not found[0]["active"]


def test_a_check_that_is_late_does_not_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def check_order(exchange: Any, key: str, *_: Any, **__: Any) -> Ruling:
        if key == "first":
            release.wait(10)
            return Ruling(Decision.GRANTED)
        return Ruling(Decision.CONFLICT, "a cycle")

    monkeypatch.setattr("overlap_callbacks.monitor.background.order_check.check_order", check_order)
    errors: list[Exception] = []
    channel = StoreChannel(Job(1, 2, "gloo"), "prefix", Connection(HashStore))
    checks = OrderChecker(channel, timeout_s=0.05, budget=WindowBudget(None), on_error=errors.append)
    order = RecordedKinds((CollectiveSequence(items=(Item("allreduce_", "0"),), groups={"0": (0, 1)}),))
    checks.start("first", order, 0)
    assert checks.await_ruling().decision is Decision.LATE
    checks.start("second", order, 1)
    assert checks.await_ruling().decision is not Decision.GRANTED  # the first is still under way
    release.set()
    rulings = []
    for number in range(200):  # until the thread is free again
        checks.start(f"later {number}", order, 2 + number)
        rulings.append(checks.await_ruling().decision)
        if rulings[-1] is Decision.CONFLICT:
            break
    checks.close(5.0)
    assert rulings[-1] is Decision.CONFLICT
    assert Decision.GRANTED not in rulings
    assert not errors


def _number_by_epoch(rank: int) -> dict[str, Any]:
    sink = KeptReports()
    monitor = OverlapMonitor(SCHEDULE, [sink], max_overhead=None, order_timeout_s=20.0)
    modes = []
    for _ in range(3):
        for step in range(19):
            with monitor.step(step):
                modes.append(monitor.mode)
                _reduce_on(dist.group.WORLD)
    monitor.close()
    return {"modes": modes, "complete": [report.complete for report in sink.reports] if rank == 0 else []}


def test_a_loop_that_restarts_its_step_numbers_each_epoch_measures_the_same_on_all_ranks() -> None:
    first, second = run_ranks(_number_by_epoch, 2)
    assert first["modes"] == second["modes"]
    for epoch in range(3):
        assert Mode.SEQUENTIAL in first["modes"][19 * epoch : 19 * (epoch + 1)]
    assert first["complete"] == [True] * 3
