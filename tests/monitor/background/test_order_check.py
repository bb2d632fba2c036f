"""Ranks that issue the collectives of two groups in different orders must never be serialised: that would deadlock."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode
from overlap_callbacks.gate.collectives import Group
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence
from tests.distributed import captured_log, run_mortal_ranks, run_ranks
from tests.monitor.jobs import KeptReports, kept_logs, new_monitor, two_groups

NUM_STEPS = 20


def reduce_on(groups: Sequence[dist.ProcessGroup]) -> list[float]:
    """Asynchronous all-reduces of 1, 2, ... issued on the groups in turn, all waited for at the end."""
    tensors = [torch.tensor([float(number)]) for number in range(1, len(groups) + 1)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for work in works:
        work.wait()
    return [tensor.item() for tensor in tensors]


def train_in_order(rank: int, orders: list[list[int]], forced: bool = False) -> dict[str, Any]:
    groups = two_groups()
    mine = [groups[index] for index in orders[rank]]
    alone = [reduce_on(mine) for _ in range(3)]
    sink = KeptReports()
    monitor = new_monitor(sink)
    if forced:
        monitor.force(Mode.SEQUENTIAL)
    modes, results = [], []
    with captured_log() as lines, kept_logs() as logs:
        for _ in range(NUM_STEPS):
            with monitor.step():
                modes.append(monitor.mode)
                results.append(reduce_on(mine))
        active = monitor.active
        monitor.close()
    return {
        "names": [Group.of(group).label for group in groups],
        "alone": alone,
        "results": results,
        "modes": modes,
        "serialised": sum(c.start is not None for log in logs for c in log.collectives),
        "lines": lines,
        "active": active,
        "reports": sink.facts(),
    }


OPPOSITE = [[0, 1], [1, 0]]
ALIKE = [[0, 1], [0, 1]]


@pytest.mark.parametrize("forced", [False, True])
def test_opposite_orders_are_refused_with_a_warning_and_training_goes_on_overlapped(forced):
    for found in run_ranks(train_in_order, 2, OPPOSITE, forced):
        # Both add up a 1 from one rank and a 2 from the other.
        assert found["alone"] == [[3.0, 3.0]] * 3
        assert found["results"] == [[3.0, 3.0]] * NUM_STEPS
        assert found["modes"] == [Mode.OVERLAPPED] * NUM_STEPS
        assert found["serialised"] == 0
        assert found["lines"]
        for line in found["lines"]:
            assert "rank 0 issues" in line
            assert "rank 1 issues" in line
            assert all(line.count(repr(name)) == 2 for name in found["names"])


def test_after_a_refusal_measuring_is_switched_off_and_the_window_is_reported_as_incomplete():
    found = run_ranks(train_in_order, 2, OPPOSITE)
    assert [rank["active"] for rank in found] == [False, False]
    assert [len(rank["lines"]) for rank in found] == [1, 1]
    (report,) = found[0]["reports"]
    assert not report["complete"]
    assert any("would deadlock" in problem for problem in report["problems"])


def exchange_in_batches(rank: int, send_first: bool) -> dict[str, Any]:
    """Two batches a step, a send and a receive, which the job waits for at the step's end only."""
    sink = KeptReports()
    monitor = new_monitor(sink)
    modes, results = [], []
    with captured_log() as lines:
        for step in range(NUM_STEPS):
            with monitor.step(step):
                modes.append(monitor.mode)
                received = torch.zeros(1)
                sent = torch.full((1,), float(rank + step))
                posts = [
                    lambda sent=sent: dist.isend(sent, 1 - rank),
                    lambda received=received: dist.irecv(received, 1 - rank),
                ]
                if not send_first and rank == 1:
                    posts.reverse()
                works = [work for post in posts for work in monitor.post(post, lambda work: [work])[1]]
                for work in works:
                    work.wait()
                results.append(received.item())
        monitor.close()
    return {"modes": modes, "results": results, "lines": lines}


@pytest.mark.parametrize("send_first", [True, False])
def test_batches_that_would_each_wait_for_a_send_that_nobody_receives_yet_are_refused(send_first):
    for rank, found in enumerate(run_ranks(exchange_in_batches, 2, send_first)):
        assert found["results"] == [1 - rank + step for step in range(NUM_STEPS)]
        if send_first:
            assert found["modes"] == [Mode.OVERLAPPED] * NUM_STEPS
            (line,) = found["lines"]
            assert "rank 0 issues send" in line
            assert "rank 1 issues send" in line
        else:
            assert found["modes"].count(Mode.SEQUENTIAL) > 3
            assert found["lines"] == []


def test_equal_orders_on_two_groups_are_serialised():
    found = run_ranks(train_in_order, 2, ALIKE)
    for rank in found:
        assert rank["results"] == [[2.0, 4.0]] * NUM_STEPS
        assert rank["lines"] == []
        assert rank["active"]
        # Windows at 2, 7, 12 and one cut short at 17, each of 2 sequential steps of 2 collectives.
        assert rank["modes"].count(Mode.SEQUENTIAL) == rank["serialised"] // 2 >= 6
    assert [report["complete"] for report in found[0]["reports"]][:3] == [True] * 3


def train_in_a_ring(rank: int) -> dict[str, Any]:
    """Each pair of ranks has a group; every rank issues on the pair that it begins before the pair that it ends."""
    pairs = [dist.new_group(sorted((first, (first + 1) % 3))) for first in range(3)]
    mine = [pairs[rank], pairs[rank - 1]]
    sink = KeptReports()
    monitor = new_monitor(sink)
    modes, results = [], []
    with captured_log() as lines:
        for _ in range(NUM_STEPS):
            with monitor.step():
                modes.append(monitor.mode)
                results.append(reduce_on(mine))
        monitor.close()
    return {"modes": modes, "results": results, "lines": lines}


def test_a_cycle_over_three_ranks_is_refused_and_names_all_three():
    for found in run_ranks(train_in_a_ring, 3):
        assert found["results"] == [[3.0, 3.0]] * NUM_STEPS
        assert found["modes"] == [Mode.OVERLAPPED] * NUM_STEPS
        (line,) = found["lines"]
        assert all(f"rank {rank} issues" in line for rank in range(3))


# -- why the check matters


def serialise(rank: int, orders: list[list[int]]) -> str:
    """Serialise each rank's own order, as nobody had checked it."""
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=2)) for _ in range(2)]
    mine = [groups[index] for index in orders[rank]]
    reduce_on(mine)
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=True, expected=ExpectedSequence([("allreduce_", group.group_name) for group in mine]))
    try:
        reduce_on(mine)
    except RuntimeError:
        return "hung until the groups' timeout"
    log = gate.end_step()
    return "done" if all(c.start is not None for c in log.collectives) else "not serialised"


def test_without_the_check_opposite_orders_do_hang_once_serialised():
    outcomes = run_mortal_ranks(serialise, 2, OPPOSITE)
    assert [outcome.value for outcome in outcomes] == ["hung until the groups' timeout"] * 2


def test_without_the_check_equal_orders_do_not_hang():
    assert run_ranks(serialise, 2, ALIKE) == ["done", "done"]


# -- programs that change after they were checked


def train_with_a_late_change(rank: int) -> dict[str, Any]:
    """Both ranks in the same order in the recorded step, in opposite ones later."""
    groups = two_groups()
    monitor = new_monitor(sink := KeptReports())
    results = []
    with captured_log() as lines:
        for step in range(7):
            swapped = step > 2 and rank == 1
            with monitor.step():
                results.append(reduce_on(groups[::-1] if swapped else groups))
        monitor.close()
    return {"results": results, "lines": lines, "reports": sink.facts()}


def test_a_step_that_departs_from_the_checked_order_is_let_through_and_left_out():
    found = run_ranks(train_with_a_late_change, 2)
    for rank in found:
        assert rank["results"] == [[2.0, 4.0]] * 3 + [[3.0, 3.0]] * 4
        assert rank["lines"] == []
    (report,) = found[0]["reports"]
    assert any("rank 1: a sequential step was left out" in problem for problem in report["problems"])
    assert report["blocks"][1] == [0, 3]


# -- point-to-point


def train_a_pipeline(rank: int) -> dict[str, Any]:
    """Both ranks send before they receive, as an exchange of halos does, and reduce afterwards."""
    monitor = new_monitor(sink := KeptReports())
    results = []
    with captured_log() as lines, kept_logs() as logs:
        for step in range(NUM_STEPS):
            with monitor.step():
                received, total = torch.zeros(1), torch.ones(1)
                sending = dist.isend(torch.tensor([10.0 * step + rank]), 1 - rank)
                dist.irecv(received, 1 - rank).wait()
                sending.wait()
                dist.all_reduce(total)
                results.append((received.item(), total.item()))
        monitor.close()
    serialised = {c.operator for log in logs for c in log.collectives if c.start is not None}
    return {"results": results, "lines": lines, "serialised": serialised, "reports": sink.facts()}


def test_an_exchange_of_messages_is_not_refused_and_only_the_collective_is_serialised():
    found = run_ranks(train_a_pipeline, 2)
    for rank, of_rank in enumerate(found):
        assert of_rank["results"] == [(10.0 * step + 1 - rank, 2.0) for step in range(NUM_STEPS)]
        assert of_rank["lines"] == []
        assert of_rank["serialised"] == {"allreduce_"}
    assert [report["complete"] for report in found[0]["reports"]][:3] == [True] * 3
    for report in found[0]["reports"][:3]:
        # No profile tells whether the messages ran beside compute.
        assert any(problem.startswith("2 messages a step were not serialised") for problem in report["problems"])
        assert not report["valid"]


# -- nothing to serialise


def train_without_collectives(rank: int) -> dict[str, Any]:
    """Steps whose communication the gate does not see, as in replays of CUDA graphs; groups of one rank have none."""
    alone = [dist.new_group([number]) for number in range(2)][rank]
    monitor = new_monitor(sink := KeptReports())
    with captured_log(level=20) as lines, kept_logs() as logs:
        for _ in range(NUM_STEPS):
            with monitor.step():
                dist.all_reduce(torch.ones(1), group=alone)
        active = monitor.active
        monitor.close()
    serialised = sum(c.start is not None for log in logs for c in log.collectives)
    return {"lines": lines, "active": active, "serialised": serialised, "reports": sink.facts()}


def test_where_no_rank_communicates_as_far_as_is_seen_nothing_is_compared_and_a_sentence_says_why():
    found = run_ranks(train_without_collectives, 2)
    assert all(rank["active"] and not rank["serialised"] for rank in found)
    assert any("issued no collectives that could be serialised" in line for line in found[0]["lines"])
    for report in found[0]["reports"]:
        assert not report["complete"]
        assert any("replays of CUDA graphs" in problem for problem in report["problems"])
