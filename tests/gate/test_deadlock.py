from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from scipy.sparse import csgraph

from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.deadlock import CollectiveSequence, Item, find_conflict
from tests.gate.sequences import WORLD, A, B, C, collective, conflict_of, order, receive, send

# -- collectives


def test_two_groups_in_opposite_order_conflict_and_the_message_names_ranks_and_collectives():
    found = conflict_of([A, B], [B, A])
    first = "allreduce_ (number 0 of group 'a', ranks [0, 1])"
    second = "reduce_scatter_ (number 0 of group 'b', ranks [0, 1])"
    assert sorted(str(found).split("; ")) == [
        f"rank 0 issues {first} before {second}",
        f"rank 1 issues {second} before {first}",
    ]


@pytest.mark.parametrize("items", [[A, B], [A, B, A, B, C], [A, A, A], []])
def test_ranks_of_the_same_order_do_not_conflict(items):
    assert conflict_of(items, items) is None


def test_ranks_that_share_one_sequence_do_not_conflict():
    shared = order(A, B, A, C)
    assert find_conflict(dict.fromkeys(range(64), shared)) is None


def test_ranks_that_share_a_sequence_are_represented_by_the_lowest_in_a_conflict():
    ab, ba = order(A, B), order(B, A)
    assert {step.rank for step in find_conflict({5: ab, 3: ab, 7: ba, 9: ba}).steps} == {3, 7}


def test_one_rank_alone_and_no_rank_do_not_conflict():
    assert find_conflict({0: order(A, B, A)}) is None
    assert find_conflict({}) is None


def test_a_ring_of_three_ranks_conflicts_though_no_two_of_them_do():
    groups = {"x": (0, 1), "y": (1, 2), "z": (0, 2)}
    x, y, z = collective("x"), collective("y"), collective("z")
    sequences = [x, z], [y, x], [z, y]
    found = conflict_of(*sequences, groups=groups)
    assert sorted(step.rank for step in found.steps) == [0, 1, 2]
    for step, after in zip(found.steps, [*found.steps[1:], found.steps[0]], strict=True):
        assert step.second == after.first
    for without in range(3):
        rest = {rank: order(*s, groups=groups) for rank, s in enumerate(sequences) if rank != without}
        assert find_conflict(rest) is None
    assert conflict_of([x, z], [x, y], [y, z], groups=groups) is None


def test_the_number_of_a_collective_within_its_group_identifies_it():
    assert conflict_of([A, B, A], [A, B, A]) is None
    found = conflict_of([A, B, A], [A, A, B])
    assert "number 1 of group 'a'" in str(found)
    assert "number 0 of group 'b'" in str(found)
    assert "number 0 of group 'a'" not in str(found)


def test_a_longer_cycle_is_reported_with_one_edge_for_each_rank():
    found = conflict_of([A, C, B], [B, A])
    assert sorted((step.rank, step.first[:9], step.second[:9]) for step in found.steps) == [
        (0, "allreduce", "reduce_sc"),
        (1, "reduce_sc", "allreduce"),
    ]


def test_groups_of_one_name_but_other_ranks_are_other_groups():
    # Every tensor parallel group of a job may be called "tp"; its ranks distinguish it.
    tp, dp = collective("tp"), collective("dp")

    def sequence(tp_ranks, items):
        return order(*items, groups={"tp": tp_ranks, "dp": (0, 1, 2, 3)})

    def job(tp_of_2_and_3):
        return {
            0: sequence((0, 1), [tp, dp]),
            1: sequence((0, 1), [tp, dp]),
            2: sequence(tp_of_2_and_3, [dp, tp]),
            3: sequence(tp_of_2_and_3, [dp, tp]),
        }

    assert find_conflict(job((2, 3))) is None
    assert find_conflict(job((0, 1))) is not None


def test_the_ranks_of_a_large_group_are_abbreviated():
    groups = {"a": tuple(range(64)), "b": tuple(range(8))}
    found = str(conflict_of([A, B], [B, A], groups=groups))
    assert "ranks [0, ..., 63]" in found
    assert "ranks [0, 1, 2, 3, 4, 5, 6, 7]" in found


# -- coalesced members

A_COALESCED, B_COALESCED = collective("a", coalesced=1), collective("b", coalesced=1)


def test_blocks_in_opposite_order_do_not_conflict_because_sequential_steps_wait_for_neither():
    assert conflict_of([A_COALESCED, B_COALESCED], [B_COALESCED, A_COALESCED]) is None


def test_a_block_that_one_rank_issues_before_a_collective_and_another_after_it_conflicts():
    # The first rank's job may wait for the block at once, and the second rank waits for the collective.
    assert conflict_of([A_COALESCED, A_COALESCED, B], [B, A_COALESCED, A_COALESCED]) is not None
    assert conflict_of([A_COALESCED, A_COALESCED, B], [A_COALESCED, A_COALESCED, B]) is None


def test_members_of_one_block_make_no_order_among_each_other():
    assert conflict_of([A_COALESCED, B_COALESCED, C], [B_COALESCED, A_COALESCED, C]) is None


def test_a_coalesced_member_waits_for_what_precedes_it():
    assert conflict_of([A, B_COALESCED], [B, A]) is not None


def test_a_coalesced_member_does_not_hide_what_precedes_it_from_what_follows():
    assert conflict_of([A, C, B], [B, A]) is not None
    assert conflict_of([A, collective("c", coalesced=1), B], [B, A]) is not None


# -- sends and receives


def test_an_exchange_in_which_one_sends_first_does_not_conflict():
    assert conflict_of([send(0, 1), receive(1, 0)], [receive(0, 1), send(1, 0)]) is None


def test_an_exchange_in_which_both_send_first_does_not_conflict():
    # Sequential steps wait for neither, and the job has just run through it.
    assert conflict_of([send(0, 1), receive(1, 0)], [send(1, 0), receive(0, 1)]) is None


def test_an_exchange_in_which_both_post_their_receive_first_does_not_conflict():
    # No collective is involved, and the job has just run through it.
    assert conflict_of([receive(1, 0), send(0, 1)], [receive(0, 1), send(1, 0)]) is None


def test_what_one_batch_receives_the_next_may_pass_on():
    # Rank 1 passes on in a batch of its own what it received in the one before; rank 0 sends after the collective,
    # which rank 2 reaches only then.
    passing_on = [receive(0, 1, coalesced=1), send(1, 2, coalesced=2)]
    assert (
        conflict_of([A, send(0, 1)], passing_on, [receive(1, 2), A], groups={"a": (0, 2), "p2p": (0, 1, 2)}) is not None
    )


def test_a_batch_in_which_both_receive_first_does_not_conflict():
    # As of batch_isend_irecv: the members of a coalescing block start together.
    first = [receive(1, 0, coalesced=1), send(0, 1, coalesced=1)]
    second = [receive(0, 1, coalesced=1), send(1, 0, coalesced=1)]
    assert conflict_of(first, second) is None


def test_a_ring_of_batches_as_of_an_interleaved_pipeline_does_not_conflict():
    # Megatron batches, in this order: send to the previous, receive from it, send to the next, receive from it.
    size = 4

    def batch(rank):
        before, after = (rank - 1) % size, (rank + 1) % size
        return [
            send(rank, before, coalesced=1),
            receive(before, rank, coalesced=1),
            send(rank, after, coalesced=1),
            receive(after, rank, coalesced=1),
        ]

    groups = {"p2p": tuple(range(size))}
    assert conflict_of(*[batch(rank) for rank in range(size)], groups=groups) is None


def test_a_collective_after_a_batch_waits_for_its_receives():
    # Rank 0 sends only after the collective for which rank 1 waits.
    batch = [receive(0, 1, coalesced=1), send(1, 0, coalesced=1)]
    assert conflict_of([A, send(0, 1), receive(1, 0)], [*batch, A]) is not None


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_a_1f1b_pipeline_of_three_ranks_with_a_collective_at_its_end_does_not_conflict(micro_batches):
    size = 3
    groups = {"p2p": (0, 1, 2), "a": (0, 1, 2)}

    def rank_items(rank):
        def forward():
            return [receive(rank - 1, rank)] * (rank > 0) + [send(rank, rank + 1)] * (rank < size - 1)

        def backward():
            return [receive(rank + 1, rank)] * (rank < size - 1) + [send(rank, rank - 1)] * (rank > 0)

        warm_up = min(size - 1 - rank, micro_batches)
        items = [item for _ in range(warm_up) for item in forward()]
        for _ in range(micro_batches - warm_up):
            items += forward() + backward()
        return [*items, *(item for _ in range(warm_up) for item in backward()), A]

    sequences = [rank_items(rank) for rank in range(size)]
    assert Counter(i for items in sequences for i in items)[send(0, 1)] == micro_batches
    assert conflict_of(*sequences, groups=groups) is None


def test_messages_wait_for_the_collective_before_them_and_hold_up_the_one_after_them():
    assert conflict_of([A, send(0, 1)], [receive(0, 1), A]) is not None
    assert conflict_of([send(0, 1), A], [receive(0, 1), A]) is None
    # torch.distributed.send waits for its message at once, which is received after the collective.
    assert conflict_of([send(0, 1), A], [A, receive(0, 1)]) is not None
    assert conflict_of([A, send(0, 1)], [A, receive(0, 1)]) is None


def test_what_a_message_says_of_a_rank_is_what_that_rank_issues():
    text = str(conflict_of([A, send(0, 1)], [receive(0, 1), A]))
    assert "rank 0 issues allreduce_ (number 0 of group 'a', ranks [0, 1]) before send 0 to rank 1" in text
    assert "rank 1 issues receive 0 from rank 0 on group 'p2p' before allreduce_" in text
    assert "rank 1 issues send" not in text


def test_the_first_receive_takes_the_first_message_of_its_channel():
    # The second message follows the collective, and only what needs it may not come before.
    sender = [send(0, 1), A, send(0, 1)]
    assert conflict_of(sender, [receive(0, 1), A, receive(0, 1)]) is None
    assert conflict_of(sender, [receive(0, 1), receive(0, 1), A]) is not None


def test_tags_and_peers_make_channels_of_their_own():
    sender = [send(0, 1, tag=1), A, send(0, 1, tag=2)]
    assert conflict_of(sender, [receive(0, 1, tag=1), A, receive(0, 1, tag=2)]) is None
    assert conflict_of(sender, [receive(0, 1, tag=2), A, receive(0, 1, tag=1)]) is not None


def test_a_receive_from_anyone_matches_no_send():
    anyone = Item("recv_any_source_", "p2p", 0, -1, 1)
    assert conflict_of([A, send(0, 1)], [anyone, A]) is None


# -- batches that sequential steps wait for


def test_a_batch_that_exchanges_does_not_conflict_whatever_its_order():
    first = [receive(1, 0, posted=1), send(0, 1, posted=1), A]
    second = [receive(0, 1, posted=1), send(1, 0, posted=1), A]
    assert conflict_of(first, second) is None


def test_two_ranks_that_wait_for_their_send_before_they_post_their_receive_conflict():
    found = conflict_of(
        [send(0, 1, posted=1), receive(1, 0, posted=2)],
        [send(1, 0, posted=1), receive(0, 1, posted=2)],
    )
    assert sorted(str(found).split("; ")) == [
        "rank 0 issues send 0 to rank 1 on group 'p2p' before receive 0 from rank 1 on group 'p2p'",
        "rank 1 issues send 0 to rank 0 on group 'p2p' before receive 0 from rank 0 on group 'p2p'",
    ]


def test_a_collective_after_a_batch_waits_for_its_sends_too():
    assert conflict_of([send(0, 1, posted=1), A], [A, receive(0, 1)]) is not None


def test_coalescing_blocks_within_a_batch_make_no_order():
    first = [send(0, 1, posted=1, coalesced=1), receive(1, 0, posted=1, coalesced=2)]
    second = [send(1, 0, posted=1, coalesced=1), receive(0, 1, posted=1, coalesced=2)]
    assert conflict_of(first, second) is None


# -- the sequence of one rank


def seen(operator, group, **changes) -> Collective:
    fields = {
        "bytes_in": 4,
        "bytes_out": 4,
        "dtype": None,
        "coalesced": 0,
        "peer": -1,
        "tag": 0,
        "issued_ns": 0,
    }
    return Collective(operator=operator, group=group, **{**fields, **changes})


WORLD_GROUP = Group("0", "default_pg", (0, 1, 2, 3), "nccl")
PIPELINE = Group("7", "pp", (5, 2), "nccl")


def test_a_sequence_holds_global_ranks_of_its_messages_from_either_side():
    found = CollectiveSequence.of(
        [
            seen("allreduce_", WORLD_GROUP, coalesced=1),
            seen("send", PIPELINE, peer=0, tag=3),
            seen("recv_", PIPELINE, peer=0, tag=4),
            seen("recv_any_source_", PIPELINE),
        ],
        rank=2,
        incomplete=True,
    )
    assert found.items == (
        Item("allreduce_", "0", 1, -1, -1, 0),
        Item("send", "7", 0, 2, 5, 3),
        Item("recv_", "7", 0, 5, 2, 4),
        Item("recv_any_source_", "7", 0, -1, 2, 0),
    )
    assert found.groups == {"0": (0, 1, 2, 3), "7": (5, 2)}
    assert found.incomplete
    assert found.keys == (("allreduce_", "0"), ("send", "7"), ("recv_", "7"), ("recv_any_source_", "7"))


def test_the_two_sides_of_a_message_are_one_channel():
    sent = CollectiveSequence.of([seen("allreduce_", WORLD_GROUP), seen("send", PIPELINE, peer=0)], rank=2)
    received = CollectiveSequence.of([seen("recv_", PIPELINE, peer=1), seen("allreduce_", WORLD_GROUP)], rank=5)
    for item in (sent.items[1], received.items[0]):
        assert (item.source, item.target) == (2, 5)
    assert find_conflict({2: sent, 5: received}) is not None


def test_a_sequence_survives_the_wire():
    sequence = CollectiveSequence(items=(A, send(0, 1, tag=9)), groups={"a": (0, 1), "p2p": (0, 1)}, incomplete=True)
    assert CollectiveSequence.decode(sequence.encode()) == sequence


def test_equal_sequences_have_equal_digests_on_every_rank():
    on_rank_0 = CollectiveSequence.of([seen("allreduce_", WORLD_GROUP), seen("barrier", WORLD_GROUP)], rank=0)
    on_rank_1 = CollectiveSequence.of(
        [seen("allreduce_", WORLD_GROUP, issued_ns=99), seen("barrier", WORLD_GROUP)], rank=1
    )
    assert on_rank_0.digest == on_rank_1.digest == CollectiveSequence.decode(on_rank_0.encode()).digest


def test_sequences_that_differ_in_anything_have_other_digests():
    variants = [
        order(),
        order(A),
        order(A, A),
        order(A, B),
        order(B, A),
        order(collective("a", "allgather_")),
        order(A_COALESCED),
        order(A, groups={"a": (0, 1, 2)}),
        order(send(0, 1)),
        order(send(1, 0)),
        order(send(0, 1, tag=1)),
        order(receive(0, 1)),
        CollectiveSequence(items=(A,), groups={"a": WORLD}, incomplete=True),
    ]
    by_digest = defaultdict(list)
    for variant in variants:
        by_digest[variant.digest].append(variant)
    assert [same for same in by_digest.values() if len(same) > 1] == []


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([A, A], "a"),
        ([A, collective("a", "barrier"), A_COALESCED], "a"),
        ([A, B], None),
        ([A, send(0, 1)], None),
        ([send(0, 1), receive(1, 0)], None),
        ([Item("recv_any_source_", "p2p")], None),
        ([], None),
    ],
)
def test_a_single_group_is_one_whose_collectives_are_all_there_is(items, expected):
    assert order(*items).single_group == expected


def test_a_step_of_many_collectives_on_many_ranks_is_checked():
    # Each rank has a sequence of its own (its tensor and data parallel groups), as in a large job.
    size, rounds = 16, 50
    groups = {f"tp{i}": tuple(range(2 * i, 2 * i + 2)) for i in range(size // 2)}
    groups |= {f"dp{i}": tuple(range(i, size, 2)) for i in range(2)}
    sequences = []
    for rank in range(size):
        tp, dp = collective(f"tp{rank // 2}"), collective(f"dp{rank % 2}")
        sequences.append(list(itertools.chain.from_iterable([tp, tp, dp] for _ in range(rounds))))
    assert conflict_of(*sequences, groups=groups) is None
    sequences[6].sort(key=lambda item: item.group, reverse=True)  # all of its tensor parallel group first
    assert 6 in {step.rank for step in conflict_of(*sequences, groups=groups).steps}


def test_the_search_for_cycles_gets_32_bit_indices(monkeypatch):
    # SciPy 1.11.1 and 1.11.2 raise on others, and only print the error: their answer is then no answer.
    search, seen = csgraph.connected_components, []

    def watched(graph, **options):
        seen.append((graph.indices.dtype, graph.indptr.dtype))
        return search(graph, **options)

    monkeypatch.setattr(csgraph, "connected_components", watched)
    assert conflict_of([A, B], [B, A]) is not None
    assert {dtype.name for pair in seen for dtype in pair} == {"int32"}


def test_batches_of_a_sequence_are_identified_by_the_peers_ranks_in_their_groups():
    items = (
        A,
        send(0, 1, posted=1),
        receive(1, 0, posted=1),
        send(0, 1),
        send(0, 1, posted=3),
        Item("recv_any_source_", "p2p", 0, -1, 0, 0, 3),
    )
    assert order(*items).batches == (
        (("send", "p2p", 1), ("recv_", "p2p", 1)),
        (),
        (("send", "p2p", 1), ("recv_any_source_", "p2p", -1)),
    )


# -- groups whose ranks are not known


def test_collectives_of_groups_whose_ranks_are_not_known_are_not_waited_for_but_the_job_may_wait_for_them():
    groups = {"known": (0, 1), "first": (), "second": ()}
    known, first, second = (collective(name) for name in groups)
    assert conflict_of([first, second], [second, first], groups=groups) is None
    assert conflict_of([first, known], [first, known], groups=groups) is None
    conflict = conflict_of([first, known], [known, first], groups=groups)
    assert "(number 0 of group 'first', ranks unknown)" in str(conflict)


def test_a_sequence_communicates_if_any_of_its_groups_may_have_other_ranks():
    item = Item("allreduce_", "a")
    assert not CollectiveSequence((), {}).communicates
    assert not CollectiveSequence((item,), {"a": (3,)}).communicates
    assert CollectiveSequence((item,), {"a": (3, 4)}).communicates
    assert CollectiveSequence((item,), {"a": ()}).communicates
