"""Who else communicated, by the counts of the groups. Real groups of Gloo are asked in other files of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks.gate import process_groups
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.process_groups import SequenceNumbers


class CountingGroup:
    """A process group that only has its count read."""

    def __init__(self, backend: str) -> None:
        self.described = Group("7", "data", (0, 1), backend)
        self.count = 5

    def _get_sequence_number_for_group(self) -> int:
        if self.count < 0:
            raise RuntimeError("this backend does not yet support sequence numbers")
        return self.count


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[CountingGroup]:
    alive: list[CountingGroup] = []
    monkeypatch.setattr(process_groups, "groups_of_rank", lambda: tuple(alive))
    monkeypatch.setattr(Group, "of", lambda group, dimensions: group.described)
    return alive


def seen(group: CountingGroup, *operators: str, coalesced: int = 0) -> list[Collective]:
    return [Collective(operator, group.described, 4, 4, None, coalesced, -1, 0, 0) for operator in operators]


@pytest.mark.parametrize(
    ("backend", "operators", "coalesced", "counted", "told"),
    [
        ("gloo", ["allreduce_", "send"], 0, 2, False),
        ("gloo", ["allreduce_", "send"], 0, 3, True),
        ("gloo", [], 0, 1, True),
        # Gloo counts these several times, which looks like foreign collectives.
        ("gloo", ["reduce_scatter_"], 0, 9, False),
        # NCCL counts sends and receives apart ...
        ("nccl", ["allreduce_", "send", "recv_"], 0, 1, False),
        ("nccl", ["allreduce_", "send", "recv_"], 0, 2, True),
        ("cpu:gloo,cuda:nccl", ["send"], 0, 1, True),
        # ... but for the block that they are members of, in some versions of torch.
        ("nccl", ["send", "recv_"], 1, 1, False),
        ("nccl", ["allreduce_coalesced_"], 0, 2, False),
        ("nccl", ["allreduce_coalesced_"], 0, 3, True),
        ("nccl", ["broadcast_", "broadcast_"], 1, 1, False),
    ],
)
def test_a_group_is_named_only_where_it_counted_more_than_the_calls_seen_can_explain(
    groups: list[CountingGroup], backend: str, operators: list[str], coalesced: int, counted: int, told: bool
) -> None:
    group = CountingGroup(backend)
    groups.append(group)
    numbers = SequenceNumbers()
    group.count += counted
    names = numbers.foreign_groups(seen(group, *operators, coalesced=coalesced), {})
    assert names == (("data (7)",) if told else ())


def test_a_group_that_came_or_went_in_the_step_is_not_asked(groups: list[CountingGroup]) -> None:
    gone, new = CountingGroup("gloo"), CountingGroup("gloo")
    groups.append(gone)
    numbers = SequenceNumbers()
    groups[:] = [new]
    gone.count += 1
    new.count += 1
    assert numbers.foreign_groups([], {}) == ()


def test_where_a_backend_does_not_count_no_group_is_reported_and_the_count_is_incomplete(
    groups: list[CountingGroup],
) -> None:
    group: Any = CountingGroup("fake")
    group.count = -1
    groups.append(group)
    numbers = SequenceNumbers()
    assert not numbers.complete
    assert numbers.foreign_groups([], {}) == ()
