"""Who comes last to collectives: by hand, in any tree of ranks, and of thousands of ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.communication.placement import UNKNOWN, equal_hosts
from overlap_callbacks.analysis.job.arrivals import (
    MAX_LAST,
    MAX_OPEN,
    ArrivalSums,
    add_arrivals,
    add_transfers,
    arrivals_of,
    reported_arrivals,
    transfers_of,
    with_transfers,
)
from overlap_callbacks.analysis.job.waiting import GroupTransfer
from overlap_callbacks.analysis.results.arrivals import (
    ONE_HOST,
    SEVERAL_HOSTS,
    UNKNOWN_HOSTS,
    Lateness,
    TimedCall,
    TimedCalls,
)
from overlap_callbacks.analysis.results.window import CollectiveTime

TRANSFER_US = 100
SIZE = 4096


def calls_of(
    ranks: Sequence[int], rank: int, late: dict[int, int], dimension: str = "data", calls: int = 4
) -> TimedCalls:
    """A rank's times if each rank comes this many microseconds after the first."""
    last = max(late.get(other, 0) for other in ranks)
    time_us = TRANSFER_US + last - late.get(rank, 0)
    timed = tuple(TimedCall(step, 0, SIZE, time_us) for step in range(calls))
    return TimedCalls("allreduce_", f"{dimension} {ranks[0]}", ranks[0], len(ranks), dimension, timed)


def in_any_tree(parts: Iterable[ArrivalSums], seed: int) -> ArrivalSums:
    chance = np.random.default_rng(seed)
    parts = list(parts)
    while len(parts) > 1:
        parts = [parts[at] for at in chance.permutation(len(parts))]
        sizes = chance.integers(1, 6, size=len(parts))
        bounds = [0, *[b for b in np.cumsum(sizes).tolist() if b < len(parts)], len(parts)]
        parts = [add_arrivals(parts[low:high]) for low, high in itertools.pairwise(bounds)]
    return parts[0]


def test_the_rank_that_comes_last_has_the_least_time_and_the_others_wait_for_it() -> None:
    ranks, late = range(4), {2: 700, 1: 100}
    parts = [arrivals_of(rank, [calls_of(ranks, rank, late)], "node") for rank in ranks]
    found, transfers = reported_arrivals(add_arrivals(parts), equal_hosts(4, 4))
    assert found is not None
    # Ranks 0 and 3 wait for 700 us, rank 1 for 600; each spends 100 us on the transfer.
    (row,) = found.ranks
    assert row == Lateness(2, 0, "data", 4, 4, 4, 4, 0.25, pytest.approx(2000 / 3 / 1e3), pytest.approx(2000 / 2400))
    (waiting,) = found.dimensions
    assert (waiting.calls, waiting.transfer_ms, waiting.waiting_ms) == (4, 0.1, 0.5)
    assert (found.num_steps, found.hosts) == (4, ())
    (size,) = transfers
    assert (size.size, size.calls, size.bytes, size.transfer_ms) == (12, 4, 4 * SIZE, 0.4)
    assert size.reach == ONE_HOST


def job(num_hosts: int, per_host: int, late: dict[int, int]) -> list[ArrivalSums]:
    """Tensor groups within hosts, data groups across them."""
    world_size = num_hosts * per_host
    parts = []
    for rank in range(world_size):
        first = rank - rank % per_host
        tensor = calls_of(range(first, first + per_host), rank, late, "tensor")
        # A tensor group leaves its collective together, with its last rank.
        after = {
            r: max(late.get(o, 0) for o in range(r - r % per_host, r - r % per_host + per_host))
            for r in range(world_size)
        }
        data = calls_of(range(rank % per_host, world_size, per_host), rank, after, "data")
        parts.append(arrivals_of(rank, [tensor, data], f"node {rank // per_host}"))
    return parts


@pytest.mark.parametrize("seed", range(6))
def test_any_tree_of_ranks_gives_the_same(seed: int) -> None:
    parts = job(5, 4, {6: 900, 13: 300, 14: 300})
    found = reported_arrivals(in_any_tree(parts, seed), equal_hosts(20, 4))
    assert found == reported_arrivals(add_arrivals(parts), equal_hosts(20, 4))
    assert found[0] is not None
    assert found[0].ranks[0].rank == 6
    assert found[0].ranks[0].dimension == "tensor"
    # All ranks of its host are last in their data groups: the host is.
    host = found[0].hosts[0]
    assert (host.host, host.dimension, host.times_last, host.calls, host.chance) == (1, "data", 16, 16, 0.2)
    assert {(row.dimension, row.reach) for row in found[1]} == {("tensor", ONE_HOST), ("data", SEVERAL_HOSTS)}


def test_a_rank_that_was_not_heard_is_left_out_and_what_one_did_not_time_is_too() -> None:
    ranks, late = range(4), {2: 700}
    heard = [arrivals_of(rank, [calls_of(ranks, rank, late)], "") for rank in (0, 2)]
    third = calls_of(ranks, 3, late)
    heard.append(arrivals_of(3, [msgspec.structs.replace(third, calls=third.calls[1:])], ""))
    found, transfers = reported_arrivals(add_arrivals(heard), np.full(4, UNKNOWN))
    assert found is not None
    assert [(row.rank, row.times_last, row.calls, row.host) for row in found.ranks] == [(2, 3, 3, UNKNOWN)]
    assert [row.reach for row in transfers] == [UNKNOWN_HOSTS]
    alone = arrivals_of(0, [calls_of(ranks, 0, late)], "")
    assert reported_arrivals(alone, np.full(4, UNKNOWN)) == (None, ())
    assert reported_arrivals(ArrivalSums(), np.full(4, UNKNOWN)) == (None, ())


def test_groups_of_several_stages_give_only_transfers() -> None:
    ranks, late = range(4), {2: 700}
    for stages, told in (((0, 0, 0, 0), True), ((0, 0, 1, 1), False)):
        parts = [arrivals_of(rank, [calls_of(ranks, rank, late)], "node", stages[rank]) for rank in ranks]
        found, transfers = reported_arrivals(add_arrivals(parts), equal_hosts(4, 4))
        assert (found is not None) == told
        assert [row.transfer_ms for row in transfers] == [0.4]


def test_of_4096_ranks_a_part_stays_small_and_the_late_one_is_found() -> None:
    late = {1234: 5000}
    leaves = []
    began = time.thread_time()
    parts = [
        arrivals_of(
            rank,
            [
                calls_of(range(rank - rank % 8, rank - rank % 8 + 8), rank, late, "tensor", 32),
                calls_of(range(rank % 8, 4096, 8), rank, {r: 5000 for r in range(1232, 1240)}, "data", 32),
            ],
            f"node {rank // 8}",
        )
        for rank in range(4096)
    ]
    made = time.thread_time() - began
    began = time.thread_time()
    for at in range(0, 4096, 64):
        leaves.append(add_arrivals(parts[at : at + 64]))
    root = add_arrivals(leaves)
    assert time.thread_time() - began < 20 * made
    assert max(len(msgspec.msgpack.encode(part)) for part in [*leaves, root]) < 40_000
    found, transfers = reported_arrivals(root, equal_hosts(4096, 8))
    assert found is not None
    assert (found.ranks[0].rank, found.ranks[0].dimension) == (1234, "tensor")
    assert (found.hosts[0].host, found.hosts[0].times_last) == (154, 8 * 32)
    assert len(msgspec.json.encode(found)) + len(msgspec.json.encode(transfers)) < 6_000


def test_what_a_part_keeps_is_bounded() -> None:
    """Groups whose ranks never all report, and ranks that come last once each."""

    def alone(rank: int) -> ArrivalSums:
        groups = [[first, first + 5000] for first in range(rank, rank + 40)]
        return arrivals_of(rank, [calls_of(group, rank, {}) for group in groups], "")

    parts = [alone(rank) for rank in range(0, 4000, 50)]
    assert len(add_arrivals(parts).open) == MAX_OPEN
    pairs = [
        arrivals_of(rank, [calls_of([rank - rank % 2, rank - rank % 2 + 1], rank, {rank | 1: 2})], "")
        for rank in range(4 * MAX_LAST)
    ]
    assert len(add_arrivals(pairs).last) == MAX_LAST


@pytest.mark.parametrize("seed", range(4))
def test_waiting_is_charged_to_the_rank_that_comes_last_alone(seed: int) -> None:
    times_us = {0: [5000] * 4 + [25_000], 1: [5001] * 4 + [5000]}
    parts = []
    for rank in range(4):
        own = times_us.get(rank, [9000, 9000, 9000, 9000, 25_000])
        calls = tuple([TimedCall(step, 0, SIZE, time_us) for step, time_us in enumerate(own)])
        parts.append(arrivals_of(rank, [TimedCalls("allreduce_", "", 0, 4, "data", calls)], "node"))
    found, _ = reported_arrivals(in_any_tree(parts, seed), equal_hosts(4, 4))
    assert found is not None
    # Ranks 0 and 1 come together, within the resolution, to the first four.
    assert [(row.rank, row.times_last, row.steps_blamed, row.waiting_ms) for row in found.ranks] == [(1, 1, 1, 20.0)]


def on_two_hosts(times_us: Sequence[Sequence[int]], seed: int) -> Any:
    """Who is charged with the calls of a group on two hosts, two ranks each: ranks, and hosts with their steps."""
    parts = []
    for rank, of_rank in enumerate(times_us):
        calls = tuple([TimedCall(call // 2, call % 2, SIZE, time_us) for call, time_us in enumerate(of_rank)])
        parts.append(arrivals_of(rank, [TimedCalls("allreduce_", "", 0, 4, "data", calls)], f"node {rank // 2}"))
    found, _ = reported_arrivals(in_any_tree(parts, seed), equal_hosts(4, 2))
    assert found is not None
    ranks = [(row.rank, row.times_last) for row in found.ranks]
    for row in found.hosts:
        assert row.lost_fraction == pytest.approx(
            sum(sum(times) - 4 * min(times) for times in zip(*times_us, strict=True)) / sum(map(sum, times_us))
        )
    return ranks, [(row.host, row.times_last, row.steps_blamed) for row in found.hosts]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_one_host_that_come_together_charge_their_host(seed: int) -> None:
    # The two of the second host within a microsecond, all four calls of two steps.
    assert on_two_hosts([[900] * 4, [901] * 4, [100] * 4, [101] * 4], seed) == ([], [(1, 4, 2)])
    # Now the one, now the other of its ranks alone: no rank is worst in a step, and the host is.
    apart = [[900] * 4, [900] * 4, [100, 200] * 2, [200, 100] * 2]
    assert on_two_hosts(apart, seed) == ([(2, 2), (3, 2)], [(1, 4, 2)])


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_two_hosts_that_come_together_charge_nobody(seed: int) -> None:
    assert on_two_hosts([[900] * 4, [101] * 4, [100] * 4, [900] * 4], seed) == ([], [])


def test_where_hosts_are_not_known_none_is_charged() -> None:
    for hosts in (("", "", "", ""), ("a", "a", "a", "a")):
        parts = []
        for rank, time_us in enumerate((900, 900, 100, 100)):
            calls = (TimedCall(0, 0, SIZE, time_us),)
            parts.append(arrivals_of(rank, [TimedCalls("allreduce_", "", 0, 4, "data", calls)], hosts[rank]))
        found, _ = reported_arrivals(add_arrivals(parts), np.full(4, 0 if hosts[0] else UNKNOWN))
        assert found is not None
        assert (found.ranks, found.hosts) == ((), ())


def test_of_too_many_late_ranks_those_are_kept_for_which_others_wait_longest() -> None:
    pairs = []
    for pair in range(MAX_LAST + 1):
        # Each is late more often than the last one, for whom others wait longest.
        calls, late_us = (1, 10**6) if pair == MAX_LAST else (4, 100)
        ranks = [2 * pair, 2 * pair + 1]
        pairs += [arrivals_of(rank, [calls_of(ranks, rank, {ranks[0]: late_us}, calls=calls)], "") for rank in ranks]
    kept = add_arrivals([add_arrivals(pairs[at : at + 2]) for at in range(0, len(pairs), 2)]).last
    assert len(kept) == MAX_LAST
    assert kept[0].rank == 2 * MAX_LAST


@pytest.mark.parametrize(
    ("times_us", "sizes", "transfer_us", "late", "waiting_us"),
    [
        ((2000, 6000), (1, 3), 6000, None, 0),  # the larger share takes longer, and nobody waits
        ((2000, 11_000), (1, 3), 6000, 0, 1000),  # rank 0 comes last: that much is sure
        ((12_000, 6000), (1, 3), 6000, 1, 6000),
        ((4000, 4000), (1, 3), 4000, None, 0),
        ((4000, 9000), (0, 3), 9000, None, 0),
        ((5000, 2000), (3, 3), 2000, 1, 3000),  # equal shares
        ((5000, 2000), (0, 0), 2000, 1, 3000),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_an_all_to_all_is_one_transfer_bound_by_its_largest_share(
    times_us: tuple[int, int], sizes: tuple[int, int], transfer_us: int, late: int | None, waiting_us: int, turned: bool
) -> None:
    parts = []
    for rank, (time_us, size) in enumerate(zip(times_us, sizes, strict=True)):
        timed = TimedCalls("alltoall_base_", "ep", 0, 2, "expert", (TimedCall(0, 0, SIZE * size, time_us),))
        parts.append(arrivals_of(rank, [timed], "node"))
    found, transfers = reported_arrivals(add_arrivals(parts[::-1] if turned else parts), equal_hosts(2, 2))
    assert found is not None
    (waiting,) = found.dimensions
    assert [row.transfer_ms for row in transfers] == [transfer_us / 1e3]
    assert [row.bytes for row in transfers] == [SIZE * max(sizes)]
    assert (waiting.transfer_ms, waiting.waiting_ms) == (transfer_us / 1e3, waiting_us / 1e3 / 2)
    assert [(row.rank, row.waiting_ms) for row in found.ranks] == ([] if late is None else [(late, waiting_us / 1e3)])


@pytest.mark.parametrize("apart_us", [1, 2])
def test_all_to_alls_that_end_within_the_resolution_of_the_times_charge_nobody(apart_us: int) -> None:
    late = []
    for size in range(1, 300):
        timed = [
            TimedCalls("alltoall_base_", "ep", 0, 2, "expert", (TimedCall(0, 0, size, time_us),))
            for time_us in (1000 + size, 1000 + size + apart_us)
        ]
        parts = [arrivals_of(rank, [of_rank], "node") for rank, of_rank in enumerate(timed)]
        found, _ = reported_arrivals(add_arrivals(parts), equal_hosts(2, 2))
        assert found is not None
        late.append([row.rank for row in found.ranks])
    assert late == [[0] if apart_us > 1 else []] * 299


def shown(kernels_ms: Sequence[float], sizes: Sequence[int], operator: str = "alltoall_base_") -> CollectiveTime:
    """The row of rank 0, of ranks whose kernels take these times for these bytes."""
    rows = [
        CollectiveTime(operator, "ep (7)", len(sizes), "nccl", 1, size, size // 2, None, kernels_ms=ms, first_rank=0)
        for ms, size in zip(kernels_ms, sizes, strict=True)
    ]
    kind = "all_to_all" if operator.startswith("alltoall") else "all_reduce"
    compared = [GroupTransfer(0, "7", kind, 1e3 * min(kernels_ms))]
    (row,) = with_transfers(rows[:1], add_transfers([transfers_of([row]) for row in rows]), compared)
    return row


def test_the_bandwidth_of_all_to_alls_is_that_of_the_largest_share() -> None:
    # 30 MB in 6 ms are 5 GB/s, of which half pass a link; the row of rank 0 has its own 10 MB.
    row = shown((4.0, 6.0), (10_000_000, 30_000_000))
    assert row.transfer_ms == pytest.approx(2.0)
    assert row.size_bytes / 1e6 / (row.transfer_ms or 0.0) == pytest.approx(5.0)
    assert shown((6.0, 4.0), (30_000_000, 10_000_000)).transfer_ms == 6.0
    # Many sizes: those that are kept have the highest rates.
    sizes = [1_000_000 * (rank + 1) for rank in range(20)]
    assert shown([6.0] * 20, sizes).transfer_ms == pytest.approx(6.0 / 20)
    assert shown((4.0, 3.0), (10_000_000, 10_000_000)).transfer_ms == 3.0
    assert shown((4.0, 6.0), (10_000_000, 30_000_000), "allreduce_").transfer_ms == 4.0
