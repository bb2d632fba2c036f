"""A process without a process group: the parts of its steps are timed, and what changes is told."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import OverlapMonitor, Schedule
from overlap_callbacks.analysis.step_vectors import AFTER_BACKWARD, BACKWARD, FORWARD, OPTIMIZER
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.monitor import step_ring, stretches
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import captured_log
from tests.margins import PATIENCE_S

STRETCH = 128
MANY_STEPS, STRETCHES = 10_000_000, 4 * 512


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(steps: int, folder: Path | None, before: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = None if folder is None else attach(optimizer, model=model, run_dir=folder, power=False)
    for step in range(steps):
        before(step)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    return model.weight.detach()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def parts_of(record: Record) -> set[str]:
    return {part for stretch in record.frontier for part in stretch.frontier_ns}


def test_the_parts_of_its_steps_are_timed_and_nothing_else_is_said_to_be_missing(tmp_path: Path) -> None:
    with captured_log(logging.WARNING) as lines:
        weights = train(3 * STRETCH + 5, tmp_path)
    assert weights.equal(train(3 * STRETCH + 5, None))
    record = read(tmp_path)
    assert parts_of(record) >= {"input", "forward", "backward", "optimizer"}
    (goodput,) = record.goodput
    assert goodput.total_s > 0
    assert record.runs[-1].world_size == 1
    assert [line.rpartition("[")[2] for line in lines] == ["OC107]"], lines


def test_a_group_that_is_made_later_is_used(tmp_path: Path) -> None:
    def make_group(step: int) -> None:
        if step == 2 * STRETCH:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    with captured_log(logging.WARNING) as lines:
        train(5 * STRETCH, tmp_path, make_group)
    assert not [line for line in lines if "switched" in line], lines
    record = read(tmp_path)
    assert [run.backend for run in record.runs] == ["", "gloo"]
    assert {stretch.first_step for stretch in record.frontier} >= {0, 3 * STRETCH}


@pytest.mark.nightly
@pytest.mark.alone
def test_input_that_grows_is_told(tmp_path: Path) -> None:
    def load(step: int) -> None:
        time.sleep(0.001 + 0.01 * (step >= 26 * STRETCH))

    train(50 * STRETCH, tmp_path, load)
    slower = [change for change in read(tmp_path).changes if change.step_ms > 0]
    assert [(change.cause, change.ranks) for change in slower] == [("input", ())]
    assert slower[0].first_step == pytest.approx(26 * STRETCH, abs=2 * STRETCH)


@pytest.mark.nightly
@pytest.mark.alone
def test_ten_million_steps_leave_memory_constant(tmp_path: Path) -> None:
    """Steps of 10 ms, by a clock that only marks turn. In its second half the job keeps nothing more."""
    chance = random.Random(0)
    parts_ns = [round(2e6 * chance.lognormvariate(0.0, 0.05)) for _ in range(9973)]
    clock = SimpleNamespace(perf_counter_ns=itertools.accumulate(itertools.cycle(parts_ns)).__next__)
    schedule = Schedule(repeats=30, every_n_steps=5000)  # long windows make long stretches
    of_all, used = MANY_STEPS // STRETCHES, list[tuple[int, int]]()
    with mock.patch.object(step_ring, "time", clock):
        monitor = OverlapMonitor(schedule=schedule, sinks=[JsonlSink(tmp_path)], power=False)
        enter = monitor.enter
        for step in range(MANY_STEPS):
            monitor.step_begin(step)
            enter(FORWARD)
            enter(BACKWARD)
            enter(AFTER_BACKWARD)
            enter(OPTIMIZER)
            monitor.step_end()
            if step % STRETCHES == STRETCHES - 1:  # the reporting thread keeps up, as in a job
                monitor._driver.slot._session.reporter._worker.ask(lambda: None, PATIENCE_S)  # type: ignore[union-attr]
                if step // STRETCHES + 1 in (of_all // 2, of_all):  # marks that are not read yet are kept too
                    gc.collect()
                    used.append((sys.getallocatedblocks(), resident_bytes()))
        monitor.close()
    (blocks, num_bytes), (blocks_later, bytes_later) = used
    assert blocks_later - blocks < MANY_STEPS / 2000  # one thing kept of each stretch would be twice as many
    assert bytes_later - num_bytes < MANY_STEPS / 2
    record = read(tmp_path)
    assert record.frontier[-1].last_step >= MANY_STEPS - 2 * STRETCHES
    assert not record.changes


@pytest.mark.parametrize(("step_s", "told_s"), [(0.1, 12.8), (1.0, 30.0), (5.0, 40.0), (9.0, 45.0), (11.0, 55.0)])
def test_the_first_steps_are_looked_at_within_the_first_minute(
    step_s: float, told_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    reporter = SimpleNamespace(submit_stretch=lambda number, key: looked.append(now_s) if number < 0 else None)
    slot: Any = SimpleNamespace(
        config=SimpleNamespace(schedule=Schedule(first_step=10_000, every_n_steps=500)),
        acquire_for_parts=lambda opens: SimpleNamespace(reporter=reporter),
    )
    now_s = 0.0
    monkeypatch.setattr(stretches.clocks, "now", lambda: round(now_s * 1e9))
    own = stretches.Stretches(slot)
    for step in range(600):
        now_s = step * step_s
        own.step_began(step)
    assert looked == [pytest.approx(told_s)]
