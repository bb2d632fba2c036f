"""A process without a process group: the parts of its steps are timed, and what changes is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report.record import Record, read
from tests.distributed import captured_log

STRETCH = 128


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
