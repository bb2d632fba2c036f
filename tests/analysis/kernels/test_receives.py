from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.receives import Transfers, transfer_starts
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.times import KernelSums, profiled_block
from overlap_callbacks.analysis.results.mode import Mode
from tests.columns import EPOCH_NS, MS, REDUCE, columns
from tests.issued import FakeCollective, FakeGroup, issue

C, M = Kind.COMPUTE, Kind.COMMUNICATION
P2P = "ncclDevKernel_SendRecv(args)"


Issued = FakeCollective
GROUP = FakeGroup("pipeline", ranks=(0, 1, 2, 3, 4))


def receive(size: int = 100, **more: Any) -> Issued:
    return issue("recv_", "pipeline", 0, bytes_out=size, **{"peer": 0, "of": GROUP, **more})


def send(size: int = 100, **more: Any) -> Issued:
    return issue("send", "pipeline", size, bytes_out=0, **{"peer": 0, "of": GROUP, **more})


def found_transfers(rows: list[Any], issued: dict[int, list[Issued]]) -> Transfers:
    return transfer_starts(align(columns(rows), issued))


def starts_ms(rows: list[Any], issued: dict[int, list[Issued]]) -> list[float] | None:
    starts = found_transfers(rows, issued).start_ns
    return None if starts is None else ((starts - EPOCH_NS) / MS).tolist()


def test_a_receive_waits_for_its_time_beyond_the_shortest_of_its_size() -> None:
    rows = [(P2P, M, 0, 0, 10), ("gemm", C, 0, 10, 20), (P2P, M, 0, 20, 23), (P2P, M, 1, 30, 35)]
    issued = {0: [receive(), receive()], 1: [receive()]}
    assert starts_ms(rows, issued) == [7, 10, 20, 32]


def test_receives_from_other_peers_say_nothing_of_its_transfer() -> None:
    rows = [(P2P, M, 0, 0, 10), (P2P, M, 0, 20, 23), (P2P, M, 0, 30, 31)]
    assert starts_ms(rows, {0: [receive(500), receive(100), receive(500, peer=2)]}) == [0, 20, 30]


def test_a_larger_receive_takes_no_longer_than_in_proportion_to_its_bytes() -> None:
    # All receives of 500 bytes waited for 25 ms or more. As 100 bytes took 3 ms, 500 take 15 ms at most.
    rows = [(P2P, M, 0, 0, 40), (P2P, M, 0, 50, 53), (P2P, M, 0, 60, 100)]
    assert starts_ms(rows, {0: [receive(500), receive(100), receive(500)]}) == [25, 50, 85]


def test_a_smaller_receive_takes_no_longer_than_a_larger_one() -> None:
    rows = [(P2P, M, 0, 0, 9), (P2P, M, 0, 10, 19), (P2P, M, 0, 20, 25)]
    assert starts_ms(rows, {0: [receive(100), receive(100), receive(500)]}) == [4, 14, 20]


def test_what_a_batch_sends_besides_lengthens_its_transfer() -> None:
    both = [send(300, coalesced=1), receive(100, coalesced=1)]
    rows = [(P2P, M, 0, 0, 40), (P2P, M, 0, 50, 53)]
    assert starts_ms(rows, {0: [*both, receive(100)]}) == [0, 50]
    other = [send(100, coalesced=2), receive(100, coalesced=2)]
    assert starts_ms(rows, {0: [*both, *other]}) == [31, 50]


@pytest.mark.parametrize("latency_ms", [0.0, 0.5])
@pytest.mark.parametrize("protocols", [1, 2])
def test_receives_that_did_not_wait_show_no_waiting_whatever_their_sizes(latency_ms: float, protocols: int) -> None:
    sizes = [1, 10, 50, 51, 200, 1000]
    # The faster of two protocols: one with little latency and half of the bandwidth, one with more of both.
    times = [min(latency_ms * (2 * p + 1) + size / (10 * (p + 1)) for p in range(protocols)) for size in sizes]
    rows = [(P2P, M, 0, 200 * n, 200 * n + time) for n, time in enumerate(times)]
    waiting = np.subtract(starts_ms(rows, {0: [receive(size) for size in sizes]}), [200 * n for n in range(len(sizes))])
    assert np.abs(waiting).max() < 1e-3  # clock ticks


def test_a_send_alone_never_waits_here_for_it_keeps_nobody_from_computing() -> None:
    rows = [(P2P, M, 0, 0, 10), (P2P, M, 0, 20, 23)]
    assert starts_ms(rows, {0: [send(), send()]}) == [0, 20]


def test_a_batch_is_one_kernel() -> None:
    issued = [send(100, coalesced=1), receive(50, coalesced=1, peer=2), receive(50), send(100, coalesced=2),
              receive(50, coalesced=2, peer=2), issue("allreduce_", "data", 7, bytes_out=7)]  # fmt: skip
    rows = [(P2P, M, 0, 0, 10), (P2P, M, 0, 12, 14), (P2P, M, 0, 20, 24), (REDUCE, M, 0, 30, 31)]
    both, alone = (100, 50, (0, 2), "pipeline"), (0, 50, (0,), "pipeline")
    messages = found_transfers(rows, {0: issued}).messages
    found = [(part.bytes_in, part.bytes_out, part.peers, part.group) for _, part in sorted(messages.items())]
    assert found == [both, alone, both]
    assert starts_ms(rows, {0: issued}) == [6, 12, 20, 30]


def test_kernels_are_matched_in_the_order_of_their_starts_and_not_of_their_rows() -> None:
    rows = [(P2P, M, 0, 20, 23), (P2P, M, 0, 0, 10), (P2P, M, 1, 40, 41)]
    assert starts_ms(rows, {0: [receive(500), receive(100)], 1: [receive(500)]}) == [22, 9, 40]


def test_ranges_of_gloo_have_a_direction_and_are_matched_by_it() -> None:
    # The send was issued first, and began last.
    rows = [("gloo:recv", M, 0, 0, 10), ("gloo:recv", M, 0, 1, 4), ("gloo:send", M, 0, 2, 30)]
    one, two = send(on_device=False), receive(on_device=False)
    assert starts_ms(rows, {0: [one, two, two]}) == [7, 1, 2]
    assert starts_ms(rows, {0: [one, one, two]}) is None


@pytest.mark.parametrize("issued", [[], [receive(), receive()]])
def test_if_numbers_differ_messages_cannot_be_matched(issued: list[Issued]) -> None:
    assert starts_ms([(P2P, M, 0, 0, 10)], {0: issued}) is None


def test_without_sends_and_receives_all_rows_work_from_their_start() -> None:
    rows = [("gemm", C, 0, 0, 9), ("nccl_AllReduce", M, 0, 3, 12)]
    assert starts_ms(rows, {0: [issue("allreduce_", "data")]}) == [0, 3]


# -- the fitted bandwidth


def spinning(
    sizes: list[int], waits_ms: list[float], transfer_ms: Callable[[int], float], calls: int = 3, seed: int = 0
) -> tuple[list[Any], list[Issued], float]:
    """Receives that spin for at least ``waits_ms`` of their size, and transfer; and how long they waited in all."""
    chance = np.random.default_rng(seed)
    now, waited, rows, issued = 0.0, 0.0, [], []
    for call in range(calls):
        for size, least in zip(sizes, waits_ms, strict=True):
            wait = least + (float(chance.integers(0, 9)) if call else 0.0)
            rows.append((P2P, M, 0, now, now + wait + transfer_ms(size)))
            issued.append(receive(size))
            now, waited = now + wait + transfer_ms(size) + 1, waited + wait
    return rows, issued, waited


def found_waiting(rows: list[Any], issued: list[Issued]) -> tuple[float, str]:
    """How long receives waited, by what is found; and the note."""
    found = found_transfers(rows, {0: issued})
    assert found.start_ns is not None
    starts = np.array([row[3] for row in rows])
    return float(((found.start_ns - EPOCH_NS) / MS - starts).sum()), " ".join(found.notes)


def line(size: int) -> float:
    return 2.0 + size / 50


@pytest.mark.parametrize("seed", range(5))
def test_a_fitted_bandwidth_gives_the_waiting_of_sizes_that_always_waited(seed: int) -> None:
    sizes = [100, 200, 300, 400, 500]
    # All receives of 300 bytes waited for 7 ms or more. The larger ones bound their transfer by 10 ms, the line by 8.
    rows, issued, waited = spinning(sizes, [0, 0, 7, 0, 0], line, seed=seed)
    found, note = found_waiting(rows, issued)
    assert found == pytest.approx(waited, abs=0.01)
    assert note.startswith(
        "the waiting of receives of 1 of 5 kinds of messages is what exceeds their bytes over a fitted"
    )
    # 50 bytes a millisecond.
    assert "(5e-05 GB/s)" in note


def test_without_three_sizes_on_one_line_the_sizes_bound_each_other() -> None:
    rows, issued, waited = spinning([100, 300, 500], [0, 7, 0], line)
    found, note = found_waiting(rows, issued)
    assert note == ""
    # By the larger size 300 bytes take 12 ms at most; they took 8.
    assert found == pytest.approx(waited - 3 * (12 - 8), abs=0.01)


@pytest.mark.parametrize(
    "protocols",
    [
        pytest.param(lambda size: min(0.5 + size / 10, 8 + size / 60), id="the faster of two"),
        pytest.param(lambda size: min(0.2 + size / 5, 2 + size / 20, 20 + size / 100), id="the fastest of three"),
        pytest.param(lambda size: 5.0, id="latency alone"),
    ],
)
@pytest.mark.parametrize(
    "sizes", [[10, 20, 50, 90, 130, 200, 400, 800], [10, 40, 80, 2000], [5, 10, 100, 150, 1500, 3000]]
)
def test_where_nccl_changes_its_protocol_no_waiting_is_made_up(
    protocols: Callable[[int], float], sizes: list[int]
) -> None:
    rows, issued, waited = spinning(sizes, [0.0] * len(sizes), protocols)
    found, note = found_waiting(rows, issued)
    assert note == ""
    assert found <= waited + 0.01


def test_a_transfer_slowed_by_a_change_of_protocol_does_not_refute_a_line() -> None:
    sizes = [10, 40, 80, 130, 400, 800]
    rows, issued, _ = spinning(sizes, [0.0] * 6, lambda size: 0.5 + size / 10 if size < 120 else 20 + size / 60)
    assert found_waiting(rows, issued)[1] == ""


def test_waiting_is_known_on_the_side_of_a_protocol_change_with_three_sizes_on_a_line() -> None:
    sizes = [10, 40, 200, 300, 400, 500, 600]

    def protocols(size: int) -> float:
        return min(0.5 + size / 10, 8 + size / 60)

    rows, issued, waited = spinning(sizes, [0, 0, 0, 0, 3, 0, 0], protocols)
    # The larger bound 400 bytes by 16.33 ms, the line by 14.67.
    found, note = found_waiting(rows, issued)
    assert found == pytest.approx(waited, abs=0.01)
    assert note


def test_messages_that_send_otherwise_are_not_fitted_together() -> None:
    issued = [
        *[receive(size) for size in (100, 500)],
        *[call for size in (200, 400) for call in (send(size, coalesced=size), receive(size, coalesced=size))],
        receive(300, peer=4),
    ]
    rows = [(P2P, M, 0, 100 * n, 100 * n + time) for n, time in enumerate((4, 12, 6, 10, 15))]
    found = found_transfers(rows, {0: issued})
    assert found.start_ns is not None
    assert found.notes == ()
    assert ((found.start_ns - EPOCH_NS) / MS).tolist() == [0, 100, 200, 300, 400]


# -- the bubble


def bubble_ms(rows: list[Any], issued: dict[int, list[Issued]], steps: list[int]) -> float | None:
    sums = KernelSums(columns(rows), found_transfers(rows, issued).start_ns)
    return profiled_block(Mode.OVERLAPPED, 0, sums, steps).bubble_ms


def test_the_bubble_of_a_stage_is_its_idle_time_and_what_its_receives_wait() -> None:
    # Waits 7 ms and transfers 3, computes 10, is idle for 2, waits 4 and transfers 3, computes 5.
    rows = [(P2P, M, 0, 0, 10), ("gemm", C, 0, 10, 20), (P2P, M, 0, 22, 29), ("gemm", C, 0, 29, 34),
            (P2P, M, 1, 40, 43)]  # fmt: skip
    issued = {0: [receive(), receive()], 1: [receive()]}
    block = profiled_block(Mode.OVERLAPPED, 0, KernelSums(columns(rows), found_transfers(rows, issued).start_ns), [0])
    assert (block.idle_ms, block.bubble_ms) == (2, 7 + 2 + 4)
    assert bubble_ms(rows, issued, [0, 1]) == pytest.approx((13 + 0) / 2)


def test_a_receive_that_waits_during_compute_or_other_communication_is_no_bubble() -> None:
    rows = [(P2P, M, 0, 0, 10), ("gemm", C, 0, 0, 4), ("nccl_AllReduce", M, 0, 3, 6), (P2P, M, 1, 20, 23)]
    issued = {0: [receive(), issue("allreduce_", "data")], 1: [receive()]}
    assert bubble_ms(rows, issued, [0]) == pytest.approx(1)  # from 6 to 7


def test_what_cannot_be_matched_has_no_bubble_and_keeps_its_idle_time() -> None:
    rows = [(P2P, M, 0, 0, 10), ("gemm", C, 0, 12, 20)]
    block = profiled_block(Mode.OVERLAPPED, 0, KernelSums(columns(rows), found_transfers(rows, {0: []}).start_ns), [0])
    assert (block.idle_ms, block.bubble_ms) == (2, None)


@pytest.mark.parametrize("seed", range(5))
def test_of_receives_that_wait_for_a_known_time_the_bubble_is_what_they_waited(seed: int) -> None:
    chance = np.random.default_rng(seed)
    now, waited, rows = 0.0, 0.0, []
    for number in range(40):
        wait = 0.0 if number == 17 else float(chance.integers(0, 9))
        rows += [(P2P, M, 0, now, now + wait + 2), ("gemm", C, 0, now + wait + 2, now + wait + 7)]
        now, waited = now + wait + 7, waited + wait
    assert bubble_ms(rows, {0: [receive()] * 40}, [0]) == pytest.approx(waited)


def test_the_bubble_shows_if_all_receives_of_one_size_waited_equally() -> None:
    rows = [(P2P, M, 0, 0, 40), (P2P, M, 0, 40, 43), (P2P, M, 0, 43, 83)]
    assert bubble_ms(rows, {0: [receive(500), receive(100), receive(500)]}, [0]) == pytest.approx(2 * 25)
