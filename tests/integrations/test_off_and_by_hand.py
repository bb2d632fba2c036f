"""``OVERLAP_CALLBACKS=off`` on all ranks or on one, and monitors that are made by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from overlap_callbacks import JsonlSink, OverlapMonitor
from overlap_callbacks.monitor.background.roll_call import RollCall
from tests.distributed import captured_log, run_ranks
from tests.integrations.test_attach import check_unchanged, our_keys, train
from tests.monitor.jobs import Training, own_threads


def attach_off(rank: int, which: tuple[int, ...]) -> dict[str, Any]:
    waited: list[float] = []

    def wait(call: RollCall, timeout_s: float = 3.0) -> Any:
        waited.append(timeout_s)
        return original(call, timeout_s)

    original = RollCall.wait
    with mock.patch.object(RollCall, "wait", wait):
        found = train(rank, {"sinks": []}, {"OVERLAP_CALLBACKS": "off"} if rank in which else {})
    return {**found, "waited": waited}


def test_a_rank_that_is_off_waits_for_nobody_and_leaves_nothing() -> None:
    ranks = run_ranks(attach_off, 2, (0, 1))
    check_unchanged(ranks)
    for found in ranks:
        assert not any(found["waited"])
        assert (found["active"], found["later"]) == (False, [])
    assert ranks[0]["lines"] == ["overlap-callbacks: switched off by OVERLAP_CALLBACKS=off [OC103]"]


def test_ranks_that_are_not_off_learn_at_attach_that_one_is() -> None:
    ranks = run_ranks(attach_off, 3, (1,))
    check_unchanged(ranks)
    assert not any(ranks[1]["waited"])
    assert not any(found["active"] for found in ranks)
    (line,) = ranks[0]["lines"]
    assert line.endswith("training goes on: rank 1: switched off by OVERLAP_CALLBACKS=off [OC110]")


def make_by_hand(rank: int, folder: str) -> dict[str, Any]:
    """Only rank 0 writes the record, and cannot."""
    training = Training(rank)
    with captured_log(logging.INFO) as lines:
        monitor = OverlapMonitor(sinks=[JsonlSink(Path(folder) / "a file" / "run")])
        before = monitor.active, own_threads(), our_keys()
        dist.barrier()  # the other rank's keys are not there before this one has looked
        monitor.attached(0, "step_begin() was never called")
        after = monitor.active
        training.step()
        monitor.close()
    dist.barrier()
    return {"before": before, "after": after, "lines": lines, "threads": own_threads(), "keys": our_keys()}


def test_a_monitor_made_by_hand_holds_the_roll_call_where_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    ranks = run_ranks(make_by_hand, 2, str(tmp_path))
    for found in ranks:
        assert found["before"] == (True, [], [])
        assert not found["after"]
        assert (found["threads"], found["keys"]) == ([], [])
    assert any("measuring is switched off on all ranks, training goes on" in line for line in ranks[0]["lines"])
    assert ranks[1]["lines"] == []
