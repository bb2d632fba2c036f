"""Coalescing blocks of torch: nothing is waited for that has not started, with the real code of c10d."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake", which can open a group with a device

from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.serialiser import NotSerialised
from overlap_callbacks.gate.step_log import ExpectedSequence
from tests.distributed import run_ranks
from tests.margins import PATIENCE_S

CPU = torch.device("cpu")


def all_reduces(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(3), group=group)


def all_gathers(group: dist.ProcessGroup) -> None:
    dist.all_gather_into_tensor(torch.zeros(4), torch.ones(2), group=group)


def reduce_scatters(group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4), group=group)


def in_sequential_step(use: Callable[[], Any]) -> tuple[list[tuple[str, bool]], dict[NotSerialised, int]]:
    """A sequential step's collectives, which of them were serialised, and the work that was not."""
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    use()
    keys = [c.key for c in gate.end_step().collectives]
    gate.begin_step(sequential=True, expected=ExpectedSequence(keys))
    use()
    log = gate.end_step()
    gate.close()
    assert gate.last_error is None, repr(gate.last_error)
    assert log.divergence is None
    return [(c.operator, c.start is not None) for c in log.collectives], dict(log.not_serialised)


def blocks(rank: int) -> dict[tuple[str, bool, bool], Any]:
    """What becomes of each kind of block, by operator, whether it has a device, and whether it is asynchronous."""
    group, found = dist.new_group([0, 1], backend="fake"), {}
    for issue in (all_reduces, all_gathers, reduce_scatters):
        for device in (None, CPU):
            for async_ops in (False, True):

                def use(issue: Callable[..., None] = issue, device: Any = device, async_ops: bool = async_ops) -> None:
                    with dist._coalescing_manager(group, device=device, async_ops=async_ops):
                        issue(group)

                found[issue.__name__, device is not None, async_ops] = in_sequential_step(use)
    return found


def test_what_a_block_with_a_device_issues_at_its_end_is_not_waited_for_and_without_one_it_is():
    operators = {
        "all_reduces": "allreduce_coalesced_",
        "all_gathers": "allgather_into_tensor_coalesced_",
        "reduce_scatters": "reduce_scatter_tensor_coalesced_",
    }
    for found in run_ranks(blocks, 2):
        assert len(found) == 12
        for (issue, with_device, _), (collectives, let_pass) in found.items():
            assert collectives == [(operators[issue], not with_device)]
            assert let_pass == ({NotSerialised.COALESCING_BLOCK: 1} if with_device else {})


def beside_blocks(rank: int) -> list[Any]:
    group, other = (dist.new_group([0, 1], backend="fake") for _ in range(2))

    def on_another_group() -> None:
        with dist._coalescing_manager(group, device=CPU):
            dist.all_reduce(torch.ones(2), group=other)

    def member() -> None:
        with dist._coalescing_manager(group, device=CPU):
            dist.broadcast(torch.ones(2), 0, group=group)

    def after() -> None:
        with dist._coalescing_manager(group, device=CPU):
            pass
        dist.all_reduce(torch.ones(2), group=group)

    def coalesced_without_a_block() -> None:
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)], group=group)

    return [in_sequential_step(use) for use in (on_another_group, member, after, coalesced_without_a_block)]


def test_while_a_block_is_open_nothing_is_waited_for_and_after_it_collectives_are_again():
    for on_another_group, member, after, without_a_block in run_ranks(beside_blocks, 2):
        assert on_another_group == ([("allreduce_", False)], {NotSerialised.COALESCING_BLOCK: 1})
        assert member == ([("broadcast_", False)], {NotSerialised.COALESCING_BLOCK: 1})
        assert after == ([("allreduce_", True)], {})
        assert without_a_block == ([("allreduce_coalesced_", True)], {})


def nested(rank: int) -> list[tuple[int, int]]:
    groups = [dist.new_group([0, 1], backend="fake") for _ in range(2)]
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    for _ in range(2):
        with dist._coalescing_manager(groups[0], device=CPU), dist._coalescing_manager(groups[1], device=CPU):
            for group in groups * 2:
                dist.broadcast(torch.ones(2), 0, group=group)
    found = gate.end_step().collectives
    gate.close()
    names = [group.group_name for group in groups]
    return [(names.index(one.group.name), one.coalesced) for one in found]


def test_blocks_of_two_groups_that_are_open_at_once_are_one_block_for_each_group():
    first, second = [(0, 1), (1, 2)] * 2, [(0, 3), (1, 4)] * 2
    assert run_ranks(nested, 2) == [first + second] * 2


WITHOUT_PRIVATE_NAMES = """
import torch.distributed.distributed_c10d as c10d
del c10d._coalescing_manager
del c10d._world
from overlap_callbacks.gate.process_groups import CoalescingBlocks
from overlap_callbacks.gate.collectives import operator_specs
blocks = CoalescingBlocks()
print(sorted({blocks.is_held_back(spec) for spec in operator_specs() if spec.ends_block}))
print(any(blocks.is_held_back(spec) for spec in operator_specs() if not spec.ends_block))
"""


def test_without_torchs_private_names_what_may_end_a_block_is_held_back_and_the_library_loads():
    command = [sys.executable, "-c", WITHOUT_PRIVATE_NAMES]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stdout.split() == ["[True]", "False"], ended.stderr
