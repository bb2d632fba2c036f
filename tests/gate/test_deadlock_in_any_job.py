"""Any job: the order check refuses exactly the orders in which running the ranks one wait at a time would hang."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gate.sequences import GROUPS, collective, conflict_of, receive, send


@st.composite
def jobs_in_batches(draw):
    """Ranks, groups, and each rank's collectives and batches of messages, in any order and cut anywhere."""
    size, groups, events = draw(global_orders())
    events = [(collective(event[0].group),) if len(event) == 1 else event for event in events]
    mixed = draw(st.booleans())
    sequences = []
    for rank in range(size):
        items = list(items_of(rank, events, groups))
        if mixed:
            items = draw(st.permutations(items))
        number, batched = 1, []
        for item in items:
            message = item.group == "p2p"
            number += not message or draw(st.booleans())
            batched.append(msgspec.structs.replace(item, posted=number) if message else item)
        sequences.append(batched)
    return groups, sequences


def hangs_in_batches(sequences, groups) -> bool:
    """Run the ranks: each waits in a collective for its members, and in a batch until all its messages have met."""
    batches = [[list(found) for _, found in itertools.groupby(items, _batch)] for items in sequences]
    position = [0] * len(batches)
    posted: list[Counter] = [Counter() for _ in batches]
    begun = [-1] * len(batches)
    while any(at < len(found) for at, found in zip(position, batches, strict=True)):
        heads = [found[at] if at < len(found) else None for at, found in zip(position, batches, strict=True)]
        progress = False
        for rank, head in enumerate(heads):
            if head is not None and head[0].posted and begun[rank] < position[rank]:
                begun[rank] = position[rank]
                posted[rank].update((item.source, item.target) for item in head)
                progress = True
        for rank, head in enumerate(heads):
            if head is None:
                continue
            if head[0].posted:
                channels = {(item.source, item.target) for item in head}
                other = {channel: channel[0] + channel[1] - rank for channel in channels}
                ready = [rank] if all(posted[other[c]][c] >= posted[rank][c] for c in channels) else []
            else:
                members = groups[head[0].group]
                ready = members if rank == members[0] and all(heads[member] == head for member in members) else []
            for member in ready:
                position[member] += 1
                progress = True
        if not progress:
            return True
    return False


def _batch(item):
    _batch.single = getattr(_batch, "single", 0) + 1
    return ("batch", item.posted) if item.posted else ("alone", _batch.single)


def test_the_oracle_of_batches_recognises_hangs():
    crossed = [[send(0, 1, posted=1), receive(1, 0, posted=2)], [send(1, 0, posted=1), receive(0, 1, posted=2)]]
    assert hangs_in_batches(crossed, GROUPS)
    together = [[msgspec.structs.replace(item, posted=1) for item in items] for items in crossed]
    assert not hangs_in_batches(together, GROUPS)


@settings(max_examples=300, deadline=None)
@given(jobs_in_batches())
def test_ranks_that_post_batches_conflict_exactly_where_running_them_hangs(job):
    groups, sequences = job
    conflicts = conflict_of(*sequences, groups=groups) is not None
    assert conflicts == hangs_in_batches(sequences, groups)


@st.composite
def global_orders(draw):
    """Ranks, groups, and events in one order that every rank could follow."""
    size = draw(st.integers(2, 5))
    members = st.sets(st.integers(0, size - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
    groups = {f"g{i}": ranks for i, ranks in enumerate(draw(st.lists(members, min_size=1, max_size=4)))}
    groups["p2p"] = tuple(range(size))
    events = []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.booleans()):
            source, target = draw(st.permutations(range(size)))[:2]
            events.append((send(source, target), receive(source, target)))
        else:
            name = draw(st.sampled_from([name for name in groups if name != "p2p"]))
            events.append((collective(name, coalesced=draw(st.booleans()) and draw(st.booleans())),))
    return size, groups, events


def items_of(rank, events, groups):
    for event in events:
        if len(event) == 1:
            if rank in groups[event[0].group]:
                yield event[0]
        elif rank == event[0].source:
            yield event[0]
        elif rank == event[0].target:
            yield event[1]


@given(global_orders())
def test_ranks_that_follow_one_global_order_each_leaving_out_what_is_not_theirs_never_conflict(job):
    size, groups, events = job
    sequences = [list(items_of(rank, events, groups)) for rank in range(size)]
    assert conflict_of(*sequences, groups=groups) is None


def hangs(sequences, groups) -> bool:
    """Run the ranks, each of which waits in a collective for all members, and with a message for its other end."""
    position = [0] * len(sequences)
    while any(at < len(items) for at, items in zip(position, sequences, strict=True)):
        heads = [items[at] if at < len(items) else None for at, items in zip(position, sequences, strict=True)]
        ready: list[int] = []
        for rank, item in enumerate(heads):
            if item is None:
                continue
            if item.operator == "send":
                met = heads[item.target] == receive(item.source, item.target)
                ready += [rank, item.target] if met else []
            elif item.operator != "recv_":
                members = groups[item.group]
                together = rank == members[0] and all(heads[member] == item for member in members)
                ready += members if together else []
        if not ready:
            return True
        for rank in ready:
            position[rank] += 1
    return False


@settings(max_examples=300, deadline=None)
@given(global_orders(), st.data())
def test_ranks_that_go_their_own_ways_conflict_exactly_where_running_them_one_by_one_hangs(job, data):
    size, groups, events = job
    events = [(collective(event[0].group),) if len(event) == 1 else event for event in events]  # none is coalesced
    sequences = [data.draw(st.permutations(list(items_of(rank, events, groups)))) for rank in range(size)]
    conflicts = conflict_of(*sequences, groups=groups) is not None
    messages = [[item for item in items if item.operator in ("send", "recv_")] for items in sequences]
    if hangs(messages, groups):
        # Messages that hang by themselves are no sign of a hang: they cannot have been waited for at once.
        assert hangs(sequences, groups) >= conflicts
    else:
        assert conflicts == hangs(sequences, groups)


@given(global_orders(), st.data())
def test_each_leg_of_a_conflict_is_an_order_that_its_rank_has_and_ends_where_the_next_begins(job, data):
    size, groups, events = job
    events = [event for event in events if len(event) == 1 and not event[0].coalesced]
    sequences = [data.draw(st.permutations(list(items_of(rank, events, groups)))) for rank in range(size)]
    found = conflict_of(*sequences, groups=groups)
    if found is None:
        return
    issued = []
    for items in sequences:
        counts: Counter = Counter()
        names = []
        for item in items:
            names.append(f"(number {counts[item.group]} of group {item.group!r}")
            counts[item.group] += 1
        issued.append(names)
    for step, after in zip(found.steps, [*found.steps[1:], found.steps[0]], strict=True):
        first, second = (text.split(" ", 1)[1].split(", ranks")[0] for text in (step.first, step.second))
        assert issued[step.rank].index(first) < issued[step.rank].index(second)
        assert step.second == after.first
        assert step.rank != after.rank
