"""Bandwidths and latencies: they come back from times that they made, and from nothing else."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.bench import powers_of_two, transfer_figures
from overlap_callbacks.analysis.communication.bandwidths import (
    Curve,
    Link,
    curves_of,
    fitted_links,
    measured_bandwidths,
)
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import preset
from overlap_callbacks.analysis.communication.predicted import sent_rows
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SizeTransfer
from tests.analysis.bench_results import transfer_results

LATENCY_S, BYTES_PER_S = 50e-6, 2e9


def transfer(
    size: int,
    calls: int = 1,
    *,
    operator: str = "allreduce_",
    ranks: int = 2,
    dimension: str = "data",
    late: float = 1.0,
) -> SizeTransfer:
    """Messages that took what the model says, ``late`` times as long."""
    rounds = 2 if operator == "allreduce_" else 1
    steps, wire = rounds * (ranks - 1), size * rounds * (ranks - 1) / ranks
    ms = calls * (steps * LATENCY_S + wire / BYTES_PER_S) * late * 1e3
    return SizeTransfer(operator, dimension, ranks, ONE_HOST, size.bit_length() - 1, calls, calls * size, ms)


def test_latency_and_bandwidth_come_back_from_times_that_they_made() -> None:
    rows = [transfer(4_000, 3), transfer(5_000_000), transfer(90_000, 2, ranks=4)]
    rows += [transfer(700_000, operator="_allgather_base_", ranks=4)]
    (link,) = fitted_links(rows).values()
    assert link.latency_s == pytest.approx(LATENCY_S)
    assert link.bytes_per_s == pytest.approx(BYTES_PER_S)


def test_each_dimension_has_a_link_of_its_own_and_the_default_group_is_data_parallel() -> None:
    slow = [transfer(size, dimension="tensor", late=3.0) for size in (1_000, 1_000_000)]
    found = fitted_links([*slow, *[transfer(size, dimension="world") for size in (1_000, 1_000_000)]])
    assert set(found) == {"tensor", "data"}
    assert found["tensor"].bytes_per_s == pytest.approx(found["data"].bytes_per_s / 3)


def test_errors_count_as_shares_so_short_messages_determine_the_latency() -> None:
    # The long message is 10 % late, which is a hundred latencies. Least squares of times would put it there.
    (link,) = fitted_links([transfer(1_000, 4), transfer(2_000, 4), transfer(100_000_000, late=1.1)]).values()
    assert link.latency_s == pytest.approx(LATENCY_S, rel=0.05)


def test_a_latency_is_never_below_zero() -> None:
    # Long messages take more for a byte than short ones: caches, not links.
    (link,) = fitted_links([transfer(1_000_000), transfer(50_000_000, late=1.5)]).values()
    assert link.latency_s == 0
    assert BYTES_PER_S / 1.5 < link.bytes_per_s < BYTES_PER_S


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [transfer(1_000_000, 5), transfer(1_100_000)],
        [transfer(1_000, late=100.0), transfer(100_000)],
        [transfer(1_000, ranks=1), transfer(1_000_000, ranks=1)],
        [SizeTransfer("allreduce_", "data", 2, ONE_HOST, 9, 0, 0, float("nan"))],
    ],
    ids=["none", "one size", "longer messages take less", "groups of one rank", "damaged"],
)
def test_without_two_sizes_or_a_bandwidth_there_is_no_link(rows: list[SizeTransfer]) -> None:
    assert fitted_links(rows) == {}


def test_a_link_without_a_latency_is_the_paper_s() -> None:
    assert Link(1e9).latency_s == 0


KINDS = ("all_reduce", "send_recv")


def curves(latency_ms: float, **changes: object) -> tuple[Curve, ...]:
    sizes = powers_of_two(8, 2**32)
    return curves_of(transfer_figures(transfer_results(latency_ms, message_bytes=sizes, kinds=KINDS, **changes).rounds))


def job(**changes: object) -> JobShape:
    given = {"model": preset("gpt2"), "layout": "megatron", "p": 2, "t": 2, "d": 2, "micro_batch": 1, "global_batch": 8}
    made = JobShape(**(given | changes))  # type: ignore[arg-type]
    made.check()
    return made


def test_a_link_without_latency_gives_its_own_bandwidth_whatever_the_messages() -> None:
    found = measured_bandwidths(job(), curves(0.0))
    assert set(found.bytes_per_s) == {"tensor", "pipeline", "data"}
    for rate in found.bytes_per_s.values():
        assert rate == pytest.approx(2e9, rel=0.01)
    assert not any("no bandwidth" in note for note in found.notes)


def test_latency_lowers_the_bandwidth_of_small_messages_most() -> None:
    found = measured_bandwidths(job(), curves(1.0)).bytes_per_s
    rows = [row for row in sent_rows(job()) if row.dimension == "tensor"]
    wire, messages = sum(row.wire_bytes for row in rows), sum(row.messages for row in rows)
    assert found["tensor"] == pytest.approx(wire / (1e-3 * messages + wire / 2e9), rel=0.05)
    assert found["tensor"] < found["data"] < 2e9


def test_a_kind_that_was_not_measured_gives_its_dimension_no_bandwidth() -> None:
    known = tuple([curve for curve in curves(0.0) if curve.kind == "all_reduce"])
    found = measured_bandwidths(job(), known)
    assert set(found.bytes_per_s) == {"tensor", "data"}
    assert found.notes[-1] == "no bandwidth of pipeline messages: send_recv was not measured"


def test_another_size_of_group_takes_the_same_bus_bandwidth_and_says_so() -> None:
    found = measured_bandwidths(job(p=1, t=4, d=1), curves(0.0))
    assert found.bytes_per_s["tensor"] == pytest.approx(2e9, rel=0.01)
    assert found.notes == ("all_reduce of 4 ranks takes the bus bandwidth that was measured with 2",)


def test_times_between_sizes_lie_between_their_times() -> None:
    curve = Curve("all_reduce", 2, (1024, 4096), (1.0, 2.0))
    assert curve.time_ms(8) == 1.0
    assert curve.time_ms(2048) == pytest.approx(2**0.5)
    assert curve.time_ms(8192) == 4.0
