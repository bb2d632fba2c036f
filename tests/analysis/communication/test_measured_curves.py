"""Bandwidths of a job's messages from times by size."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.bench.figures import transfer_figures
from overlap_callbacks.analysis.bench.sizes import powers_of_two
from overlap_callbacks.analysis.communication.bandwidths import Curve, curves_of, measured_bandwidths
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import preset
from overlap_callbacks.analysis.communication.predicted import sent_rows
from tests.analysis.bench.results import transfer_results

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
