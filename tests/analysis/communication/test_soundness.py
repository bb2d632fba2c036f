"""Records of jobs are sound; made-up ones do not take the machine."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.communication.sums import add_sums, job_messages, sums_of
from overlap_callbacks.analysis.communication.traffic import are_sound
from overlap_callbacks.analysis.results.messages import HostShape, JobMessages, RankMessages
from tests.analysis.communication.layouts import Layout, row

HUGE = ((0, ((1, 10**12),)),)


def messages_of(layout: Layout, **options: Any) -> JobMessages:
    found = job_messages(layout.sums(**options))
    assert found is not None
    return found


@pytest.mark.parametrize("layout", [Layout(2, 3, 4, expert=True), Layout(8, 8, 8), Layout(1, 1, 2, ranks_per_host=1)])
def test_messages_of_a_job_are_sound(layout: Layout) -> None:
    assert are_sound(messages_of(layout), layout.world_size)
    assert are_sound(messages_of(layout, without=(1,)), layout.world_size)


def test_groups_without_any_order_are_sound() -> None:
    ranks = np.random.default_rng(0).permutation(400).reshape(200, 2).tolist()
    rows = {rank: row("allreduce_", "data", tuple(pair), 1, 8) for pair in ranks for rank in pair}
    found = job_messages(add_sums([sums_of(rank, RankMessages((of,)), f"h{rank % 7}") for rank, of in rows.items()]))
    assert found is not None
    assert are_sound(found, 400)


@pytest.mark.parametrize(
    "changes",
    [
        {"firsts": HUGE}, {"offsets": HUGE}, {"ranks": HUGE}, {"offsets": ((-(10**9), ()),)}, {"firsts": ((-1, ()),)},
        {"num_members": 0}, {"bytes": -1}, {"sizes": ((10**9, 1, 1),)}, {"firsts": ()}, {"stage": 10**9},
        {"firsts": ((0, ((0, 8),) * 2),)}, {"group_size": 10**9}, {"offsets": ((0, ()),) * 1000},
    ],
)  # fmt: skip
def test_what_cannot_be_is_not_sound(changes: dict[str, Any]) -> None:
    messages = messages_of(Layout(2, 2, 2))
    first, *others = messages.groups
    changed = msgspec.structs.replace(messages, groups=(msgspec.structs.replace(first, **changes), *others))
    assert not are_sound(changed, 8)


def test_hosts_and_jobs_that_cannot_be_are_not_sound() -> None:
    messages = messages_of(Layout(2, 2, 2))
    assert not are_sound(messages, 4)
    assert not are_sound(messages, 10**9)
    for shape in (HostShape(HUGE, ((0, ()),)), HostShape(((0, ()),), HUGE), HostShape((), ((0, ()),))):
        assert not are_sound(msgspec.structs.replace(messages, hosts=(shape,)), 8)
