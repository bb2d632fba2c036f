"""Real jobs in which ranks die leave no key of ours in the job's store."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.monitor.background import tree
from tests.distributed import die, run_mortal_ranks
from tests.monitor.jobs import KeptReports, new_monitor, tiny_schedule, wait_until

RANKS = 5
# With a fan-in of two, rank 0 hears ranks 1, 2 and 4, and rank 2 hears rank 3.
RECORDED, RULED, REPORTED = 2, 4, 8  # in the window's first step; in a later one; when the window is done


def keys_of(store: Any) -> set[str]:
    """Its keys; torch before 2.10 tells their number only, so they have numbers as names."""
    return set(store.list_keys() if hasattr(store, "list_keys") else map(str, range(store.num_keys())))


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def train_until_some_die(rank: int, dead: list[int], at: int, settle: bool) -> dict[str, Any]:
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1))
    for _ in range(2):  # Gloo's own keys come with its first collectives, and on some ranks later than on others
        dist.barrier()
    ready = [f"test/ready/{other}" for other in range(RANKS)]
    store.set(ready[rank], b"-")
    wait_until(lambda: store.check(ready))
    before = keys_of(store)
    dist.barrier()
    living = [other for other in range(RANKS) if other not in dead]
    passed = [f"test/passed/{other}" for other in range(RANKS)]
    dying = [f"test/dying/{other}" for other in dead]
    closed = [f"test/closed/{other}" for other in living]
    with mock.patch.object(tree, "FAN_IN", 2):
        sink = KeptReports()
        # Ranks that die are waited for. Where none does, a busy machine has the time that it needs.
        patience = {"order_timeout_s": 1.0, "report_timeout_s": 3.0} if dead else {}
        monitor = new_monitor(sink, schedule=tiny_schedule(every_n_steps=50), **patience)
        with contextlib.suppress(RuntimeError):  # peers are gone
            for step in range(12):
                monitor.step_begin(step)
                if step <= at:  # ranks that are not next to a dead one would wait for it
                    dist.all_reduce(torch.ones(1))
                if step == at and dead:
                    store.set(passed[rank], b"-")
                if step == at and rank in dead:
                    wait_until(lambda: store.check(passed))
                    time.sleep(1.0)  # the others have what they need of it
                    store.set(f"test/dying/{rank}", str(os.getpid()))
                    die()
                monitor.step_end(step)
        # What is sent when the others have left, nobody could take away.
        wait_until(lambda: store.check(dying) and all(is_gone(int(store.get(key))) for key in dying))
        monitor.close(None if settle else 8.0)
    store.set(f"test/closed/{rank}", b"-")
    wait_until(lambda: store.check(closed))
    new, own = keys_of(store) - before, {*closed, *dying, *(passed if dead else ())}
    left = sorted(new - own) if own <= new else sorted(new)[len(own) :]
    return {"left": left, "reports": sink.facts()}


@pytest.mark.parametrize(
    ("dead", "at", "settle"),
    [
        ([], 100, True),
        ([], 100, False),
        ([3], RECORDED, True),
        pytest.param([2], RULED, True, marks=pytest.mark.nightly),
        ([0], RULED, True),
        pytest.param([2, 3], REPORTED, True, marks=pytest.mark.nightly),
        ([0, 2], REPORTED, True),
        ([4], REPORTED, False),
    ],
)
def test_no_key_is_left_whichever_rank_dies(dead: list[int], at: int, settle: bool) -> None:
    outcomes = run_mortal_ranks(train_until_some_die, RANKS, dead, at, settle, timeout_s=90)
    living = [outcome for outcome in outcomes if outcome.rank not in dead]
    assert all(outcome.returned for outcome in living), "\n".join(map(str, living))
    assert [outcome.value["left"] for outcome in living] == [[]] * len(living)
    if not dead:
        (report,) = outcomes[0].value["reports"]
        assert report["complete"]
        assert report["ranks"] == list(range(RANKS))
