"""The traffic matrix against hand-worked bytes, and against each rank and message by itself."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.communication.rank_grids import ranks_in
from overlap_callbacks.analysis.communication.sums import add_sums, job_messages, sums_of
from overlap_callbacks.analysis.communication.traffic import TREE_BYTES_PER_HOST, matrix_of, traffic_of, tree_edges
from overlap_callbacks.analysis.results.messages import JobMessages, RankMessages
from tests.analysis.communication.layouts import ACTIVATION, Layout, by_hand, row


def job(rows: dict[int, list[Any]]) -> JobMessages:
    found = job_messages(add_sums([sums_of(rank, RankMessages(tuple(of)), "") for rank, of in rows.items()]))
    assert found is not None
    return found


def on_all(operator: str, ranks: tuple[int, ...], each: int, bytes_in: int | None = None) -> JobMessages:
    return job({rank: [row(operator, "data", ranks, 1, each, bytes_in)] for rank in ranks})


def one_host(number: int) -> Any:
    return np.zeros(number, dtype=np.int64)


@pytest.mark.parametrize(
    ("operator", "each", "bytes_in", "expected"),
    [
        # Each rank sends 2 * 2/3 * 300 to the next.
        ("allreduce_", 300, 300, [[0, 400, 0], [0, 0, 400], [400, 0, 0]]),
        ("_allgather_base_", 300, 100, [[0, 200, 0], [0, 0, 200], [200, 0, 0]]),
        ("_reduce_scatter_base_", 300, 300, [[0, 200, 0], [0, 0, 200], [200, 0, 0]]),
        ("alltoall_base_", 300, 300, [[0, 100, 100], [100, 0, 100], [100, 100, 0]]),
        ("broadcast_", 300, 300, [[0, 300, 0], [0, 0, 300], [0, 0, 0]]),
        ("reduce_", 300, 300, [[0, 0, 0], [300, 0, 0], [0, 300, 0]]),
        ("barrier", 0, 0, [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
    ],
)
def test_each_kind_of_collective(operator: str, each: int, bytes_in: int, expected: list[list[float]]) -> None:
    matrix = matrix_of(on_all(operator, (0, 1, 2), each, bytes_in), one_host(3))
    assert matrix.sent.tolist() == expected
    assert matrix.unplaced_bytes == 0


def rooted(operator: str, root: int, ranks: tuple[int, ...]) -> Any:
    """Each of three ranks' records of a call that sends 100 bytes from each other rank to the root, or back."""
    reads = {r: 100 if operator == "gather_" else 300 if r == root else 0 for r in ranks}
    return {r: row(operator, "data", (0, 1, 2), 1, 300 if r == root else 100, reads[r]) for r in ranks}


@pytest.mark.parametrize("root", range(3))
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1), (1, 2)])
def test_gathers_and_scatters_pass_their_root(root: int, ranks: tuple[int, ...]) -> None:
    expected = np.zeros((3, 3))
    expected[[r for r in range(3) if r != root], root] = 100
    gathered = matrix_of(job({r: [own] for r, own in rooted("gather_", root, ranks).items()}), one_host(3))
    scattered = matrix_of(job({r: [own] for r, own in rooted("scatter_", root, ranks).items()}), one_host(3))
    assert gathered.sent.tolist() == expected.tolist()
    assert scattered.sent.tolist() == expected.T.tolist()


def test_each_rank_may_be_the_root_of_one_call() -> None:
    alike = row("gather_", "data", (0, 1, 2), 3, 100)
    rows = {r: [msgspec.structs.replace(alike, bytes=300 + 100 + 100)] for r in range(3)}
    assert matrix_of(job(rows), one_host(3)).sent.tolist() == [[0, 100, 100], [100, 0, 100], [100, 100, 0]]


def test_an_operator_that_is_not_known_is_in_no_cell_and_is_counted() -> None:
    matrix = matrix_of(on_all("mystery_", (0, 1), 50), one_host(2))
    assert (matrix.sent.sum(), matrix.unplaced_bytes) == (0, 100)


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 2), Layout(4, 1, 1), Layout(1, 4, 2), Layout(2, 3, 4, expert=True), Layout(1, 1, 9)]
)
def test_a_job_is_the_sum_of_its_ranks_and_messages(layout: Layout) -> None:
    messages = job_messages(layout.sums())
    assert messages is not None
    expected = by_hand(layout)
    matrix = matrix_of(messages, one_host(layout.world_size))
    np.testing.assert_allclose(matrix.sent, expected, rtol=1e-12)
    hosts = np.arange(layout.world_size) // 4
    by_host = matrix_of(messages, one_host(layout.world_size), hosts)
    summed = np.zeros((hosts[-1] + 1, hosts[-1] + 1))
    np.add.at(summed, np.ix_(hosts, hosts), expected)
    np.testing.assert_allclose(by_host.sent, summed, rtol=1e-12)


def test_a_rank_that_was_not_heard_is_known_from_the_others() -> None:
    layout = Layout(2, 3, 4)
    messages = job_messages(layout.sums(without=(5, 11)))
    assert messages is not None
    np.testing.assert_allclose(matrix_of(messages, one_host(24)).sent, by_hand(layout), rtol=1e-12)


def test_a_ring_enters_each_host_once() -> None:
    """Ranks 0, 2, 4, 6 are on one host and 1, 3, 5, 7 on another: two links cross hosts, not eight."""
    hosts = np.arange(8) % 2
    sent = matrix_of(on_all("allreduce_", tuple(range(8)), 800), hosts).sent
    assert np.count_nonzero(sent) == 8
    assert sent[np.ix_(hosts == 0, hosts == 1)].sum() == sent[np.ix_(hosts == 1, hosts == 0)].sum() == 1400
    assert sent[6, 1] == sent[7, 0] == 1400


def test_trees_carry_what_a_ring_carries_and_each_spans_the_hosts() -> None:
    """NCCL's trees of four nodes: 0-2, 2-1, 2-3 and its mirror 3-1, 1-2, 1-0."""
    assert sorted(tree_edges((1, 1, 1, 1))) == sorted([(1, 2), (2, 0), (3, 2), (2, 1), (1, 3), (0, 1)])
    for hosts in ((1, 1), (2, 3), (1,) * 5, (4,) * 6, (8,) * 7, (1,) * 16):
        edges = tree_edges(hosts)
        number = sum(hosts)
        assert len(edges) == 2 * (number - 1)
        assert all(0 <= child < number and 0 <= parent < number for child, parent in edges)
        messages = on_all("allreduce_", tuple(range(number)), 1000)
        numbers = np.repeat(np.arange(len(hosts)), hosts)
        tree, ring = (matrix_of(messages, numbers, algorithm=name).sent for name in ("tree", "ring"))
        assert tree.sum() == pytest.approx(ring.sum()) == 2 * (number - 1) * 1000
        assert (tree == tree.T).all()
        reached = np.linalg.matrix_power(np.eye(number) + (tree > 0), number)
        assert (reached > 0).all()


def test_the_rule_gives_small_messages_between_hosts_to_trees() -> None:
    hosts = np.arange(4)
    small, large = (on_all("allreduce_", (0, 1, 2, 3), size) for size in (1024, 4 * TREE_BYTES_PER_HOST))
    for messages, algorithm in ((small, "tree"), (large, "ring")):
        np.testing.assert_array_equal(
            matrix_of(messages, hosts, algorithm="auto").sent, matrix_of(messages, hosts, algorithm=algorithm).sent
        )
    within = matrix_of(small, one_host(4), algorithm="auto").sent
    np.testing.assert_array_equal(within, matrix_of(small, one_host(4)).sent)
    with pytest.raises(ValueError, match="algorithm must be one of auto, ring, tree, got 'nvls'"):
        matrix_of(small, hosts, algorithm="nvls")


def test_totals_name_both_conventions_and_what_crosses_hosts() -> None:
    layout = Layout(2, 2, 2, ranks_per_host=4)
    _, traffic = traffic_of(layout.sums(), 8)
    assert traffic is not None
    rows = {found.dimension: found for found in traffic.dimensions}
    # Four tensor groups of two, half with five messages and half with four; each rank sends 2 * 1/2 of the size.
    assert (rows["tensor"].messages, rows["tensor"].bytes) == (36, 36 * ACTIVATION)
    assert (rows["tensor"].sent_bytes, rows["tensor"].between_hosts_bytes) == (36 * ACTIVATION, 0)
    # Four pairs, three messages each way; sends and receives are calls, and are sent once.
    assert (rows["pipeline"].messages, rows["pipeline"].bytes) == (48, 48 * ACTIVATION)
    assert rows["pipeline"].sent_bytes == rows["pipeline"].between_hosts_bytes == 24 * ACTIVATION
    assert rows["data"].between_hosts_bytes == 0
    assert (traffic.num_steps, traffic.num_alike, traffic.unplaced_bytes) == (128, 128, 0)


def test_4096_ranks_take_no_square_of_memory_beyond_the_matrix_and_no_more_time_than_its_cells() -> None:
    """As a relation: the whole matrix takes less than 60 passes over an array of its size, and 1.5 times its memory."""
    layout = Layout(8, 8, 64)
    messages = job_messages(layout.sums())
    assert messages is not None
    hosts = np.arange(4096) // 8
    cells = np.ones((4096, 4096))
    began = time.thread_time()
    cells += 1.0
    one_pass_s = time.thread_time() - began
    size = cells.nbytes
    del cells
    tracemalloc.start()
    began = time.thread_time()
    matrix = matrix_of(messages, hosts)
    took_s = time.thread_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert matrix.sent.shape == (4096, 4096)
    assert peak < 1.5 * size
    assert took_s < 60 * one_pass_s
    assert ranks_in(messages.ranks).size == 4096


def test_of_a_rank_that_was_not_heard_and_whose_group_differs_the_mean_is_taken_once() -> None:
    """Each rank sends experts' tokens of its own size. Rank 1 is not heard: 300 is the mean of 100, 300 and 500."""
    rows = {rank: [row("alltoall_base_", "expert", (0, 1, 2, 3), 1, 100 + 200 * (rank // 2 + rank % 2))] for rank in
            (0, 2, 3)}  # fmt: skip
    assert [of[0].bytes for of in rows.values()] == [100, 300, 500]
    sent = matrix_of(job(rows), one_host(4)).sent
    assert sent.sum(axis=1).tolist() == [75, 225, 225, 375]
    # A group whose two ends are of different stages.
    ends = {rank: [row("allreduce_", "embedding", (0, rank), 1, 8)] for rank in (3,)}
    assert matrix_of(job(ends), one_host(4)).sent.sum() == 16


def test_ranks_that_were_heard_here_and_there_do_not_count_twice() -> None:
    """Of 3000 ranks every third, by chance, is heard; each pair of neighbours is heard at least once."""
    chance = np.random.default_rng(4)
    heard = {int(pair[chance.integers(2)]) for pair in np.arange(3000).reshape(1500, 2)}
    rows = {rank: [row("allreduce_", "data", (rank - rank % 2, rank - rank % 2 + 1), 1, 10)] for rank in heard}
    parts = [sums_of(rank, RankMessages(tuple(of)), "") for rank, of in rows.items()]
    found = job_messages(add_sums(parts))
    assert found is not None
    matrix = matrix_of(found, one_host(3000))
    assert matrix.sent.sum() + matrix.unplaced_bytes <= 1500 * 2 * 10
    assert matrix.sent.sum() + matrix.unplaced_bytes >= 1500 * 10
