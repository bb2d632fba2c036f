"""Fabric loops: ``attach`` takes the optimizer that ``fabric.setup`` gave, and nothing else is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks import Mode
from overlap_callbacks.integrations.pytorch import attach
from tests.distributed import run_ranks
from tests.integrations.huggingface_jobs import (
    NET_BYTES,
    NUM_STEPS,
    NUM_TOGGLING_STEPS,
    ONE_WINDOW,
    TOGGLING,
    anatomy,
    digest,
    expect_good,
    the_record,
)
from tests.monitor.jobs import dispatch_table
from tests.toggling import at_night

pytest.importorskip("lightning.fabric")
RANKS_LOAD = ("lightning.pytorch",)


class Loop:
    """A loop as Fabric's guide has it."""

    def __init__(self, rank: int, accumulate: int = 1) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
        )
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
        self.fabric.launch()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.model, self.optimizer = self.fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        self.accumulate = accumulate
        self.data = torch.Generator().manual_seed(rank)

    def backward(self) -> None:
        for micro_batch in range(self.accumulate):
            unfinished = micro_batch < self.accumulate - 1
            with self.fabric.no_backward_sync(self.model, enabled=unfinished):
                self.fabric.backward(self.model(torch.randn(4, 16, generator=self.data)).square().mean())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def anatomy(self) -> list[Any]:
        return anatomy(self.model, self.optimizer, self.optimizer.optimizer)


def _train_in_four_ways(rank: int, folder: str, accumulate: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    untouched = dispatch_table()
    ways = {"absent": None, "attached": ONE_WINDOW, "toggling": TOGGLING, "forced": ONE_WINDOW}
    for way, options in ways.items():
        loop = Loop(rank, accumulate)
        before = loop.anatomy()
        monitor = None
        if options is not None:
            monitor = attach(loop.optimizer, run_dir=Path(folder, way), **options)
            if way == "forced":
                monitor.force(Mode.SEQUENTIAL)
        modes = []
        for step in range(NUM_TOGGLING_STEPS if way == "toggling" else NUM_STEPS):
            loop.backward()
            if monitor is not None:
                assert monitor.last_step == (step or -1)  # no step is known until the first has ended
                modes.append(monitor.mode)
            loop.step()
            if step == NUM_STEPS - 1:
                found[way] = digest(loop.model)
        if monitor is not None:
            monitor.close()
            found[f"{way} sequential"] = modes[:NUM_STEPS].count(Mode.SEQUENTIAL)
        assert loop.anatomy() == before
        assert dispatch_table() == untouched
    return found


@pytest.mark.parametrize("accumulate", at_night([1, 2], [1]))
def test_weights_are_bit_identical_absent_attached_toggling_and_forced(tmp_path: Path, accumulate: int) -> None:
    for found in run_ranks(_train_in_four_ways, 2, str(tmp_path), accumulate, timeout_s=90):
        assert found["absent"] == found["attached"] == found["toggling"] == found["forced"]
        assert found["attached sequential"] == 4 + 2
        assert found["toggling sequential"] == 8
        # All but the one under way when we attached, and the recorded one.
        assert found["forced sequential"] == NUM_STEPS - 2
    for way, num_timed, num_windows in (("attached", 8, 1), ("toggling", 16, NUM_TOGGLING_STEPS // 19)):
        windows = [window for window in the_record(tmp_path / way).windows if window.complete]
        assert len(windows) == num_windows
        for window in windows:
            assert len(window.samples[0].timed) == num_timed
            # The default group serves all: without the model nothing says that its ranks are data-parallel.
            expect_good(window, [("allreduce_", 1, NET_BYTES, NET_BYTES)], "world")


def _resumed_and_evaluated(rank: int, folder: str) -> None:
    loop = Loop(rank)
    with attach(loop.optimizer, start_step=100, run_dir=folder, **ONE_WINDOW) as monitor:
        for step in range(NUM_STEPS):
            loop.backward()
            loop.step()
            if step == 8:
                with monitor.pause():
                    loop.fabric.all_reduce(torch.ones(3))  # an evaluation's


def test_a_resumed_loop_goes_on_counting_and_an_evaluation_in_a_pause_costs_its_step_only(tmp_path: Path) -> None:
    run_ranks(_resumed_and_evaluated, 2, str(tmp_path))
    (window,) = the_record(tmp_path).windows
    assert window.first_step == 103
    assert window.complete
    # The pause lay in step 109, which is the window's seventh.
    assert [block.block for block in window.samples[0].timed] == [0, 1, 2, 3, 4, 6, 7]
    assert [(c.operator, c.messages) for c in window.collectives] == [("allreduce_", 1)]
