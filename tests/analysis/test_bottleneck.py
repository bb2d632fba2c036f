from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.bottleneck import bottleneck_of, run_bottleneck
from overlap_callbacks.analysis.results.arrivals import Arrivals, DimensionWaiting, Lateness
from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.exposure import ExposedCollective, Exposure
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import Bound, StepParts, bound_of, late_rank, mean_parts, step_parts
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report.record import read
from tests.report.runs import run_info, window, write


def figures(**values: float) -> dict[str, Estimate]:
    return {name: Estimate(value, None, None, 4, 4) for name, value in values.items()}


def measured(spread: dict[str, Spread] | None = None, **values: float) -> OverlapReport:
    """A window with only these figures."""
    bare = msgspec.structs.replace(
        window(0), spread=spread or {}, dimensions=(), collectives=(), **dict.fromkeys(window(0).figures())
    )
    return msgspec.structs.replace(bare, **figures(**values))


def of_ranks(low: float, low_rank: int, high: float, high_rank: int) -> Spread:
    return Spread(low, high, low_rank, high_rank, 1.0)


# A step of 100 ms: 60 of compute, of which 10 are contention, 30 exposed, 10 idle.
STEP = {"compute_busy_ms": 60.0, "compute_busy_isolated_ms": 50.0, "exposed_comm_ms": 30.0, "idle_ms": 10.0}


def test_the_parts_add_up_to_the_step() -> None:
    parts = step_parts(figures(**STEP))
    assert parts == StepParts(50.0, 10.0, 30.0, 0.0, 0.0, 10.0)
    assert parts.total_ms == 100.0


def test_the_bubble_takes_idle_time_and_receives_that_wait() -> None:
    parts = step_parts(figures(**STEP, bubble_ms=25.0))
    assert parts == StepParts(50.0, 10.0, 15.0, 0.0, 25.0, 0.0)


def test_without_a_profile_there_are_no_parts() -> None:
    assert step_parts(figures(e2e_overlapped_ms=100.0)) is None
    assert measured(e2e_overlapped_ms=100.0).step_parts() is None
    assert bottleneck_of([measured(e2e_overlapped_ms=100.0)]) is None


def test_a_rank_is_late_that_waits_least_and_computes_longest() -> None:
    spread = {"exposed_comm_ms": of_ranks(12.0, 3, 40.0, 0), "compute_busy_ms": of_ranks(50.0, 0, 75.0, 3)}
    late = late_rank(figures(**STEP), spread)
    # It waits 18 ms less than the mean, but computes only 15 ms longer.
    assert late is not None
    assert (late.rank, late.waiting_ms, late.busy) == (3, 15.0, True)
    parts = step_parts(figures(**STEP), late)
    assert parts == StepParts(50.0, 10.0, 15.0, 15.0, 0.0, 10.0)


def test_a_rank_that_only_hides_more_is_not_late() -> None:
    spread = {"exposed_comm_ms": of_ranks(12.0, 3, 40.0, 0), "compute_busy_ms": of_ranks(50.0, 3, 75.0, 0)}
    assert late_rank(figures(**STEP), spread) is None


def test_a_rank_that_is_idle_longest_may_be_the_late_one() -> None:
    spread = {"exposed_comm_ms": of_ranks(12.0, 2, 40.0, 0), "idle_ms": of_ranks(5.0, 0, 26.0, 2)}
    late = late_rank(figures(**STEP), spread)
    assert late is not None
    assert (late.rank, late.waiting_ms, late.busy) == (2, 16.0, False)


@pytest.mark.parametrize(
    ("parts", "bound", "runner_up"),
    [
        (StepParts(70.0, 10.0, 15.0, 0.0, 0.0, 5.0), Bound.COMPUTE, None),
        (StepParts(60.0, 10.0, 25.0, 0.0, 0.0, 5.0), Bound.COMMUNICATION, None),
        (StepParts(60.0, 0.0, 20.0, 0.0, 0.0, 20.0), Bound.COMMUNICATION, Bound.LAUNCH),
        (StepParts(60.0, 0.0, 10.0, 25.0, 0.0, 5.0), Bound.STRAGGLER, None),
        (StepParts(60.0, 0.0, 10.0, 0.0, 30.0, 0.0), Bound.BUBBLE, None),
        (StepParts(40.0, 0.0, 10.0, 0.0, 0.0, 50.0), Bound.LAUNCH, None),
        (StepParts(40.0, 0.0, 10.0, 0.0, 0.0, 15.0, 35.0), Bound.HOST_COMMUNICATION, None),
    ],
)
def test_the_largest_part_bounds_the_step(parts: StepParts, bound: Bound, runner_up: Bound | None) -> None:
    assert bound_of(parts) == (bound, runner_up)


def test_the_evidence_is_in_the_sentence() -> None:
    found = bottleneck_of([measured(**STEP)])
    assert found is not None
    assert found.sentence() == (
        "Steps are communication-bound: communication that no compute hides takes 30.0% of a profiled step, "
        "the most after compute."
    )
    spread = {"exposed_comm_ms": of_ranks(5.0, 3, 40.0, 0), "compute_busy_ms": of_ranks(50.0, 0, 90.0, 3)}
    late = bottleneck_of([measured(spread, **STEP)])
    assert late is not None
    assert late.sentence() == (
        "Steps are straggler-bound: ranks wait for rank 3, the last one, for 25.0% of a profiled step, "
        "the most after compute."
    )
    assert late.advice[0].what.startswith("Look at rank 3: its clock")


@pytest.mark.parametrize(("held_ms", "named"), [(39.0, True), (41.0, False)])
def test_the_late_rank_comes_first_if_no_collective_holds_steps_up_for_longer(held_ms: float, *, named: bool) -> None:
    # Two ranks: one waits 40 ms for the other, so 20 ms on average. Transfers take longer in all, but none alone.
    spread = {"exposed_comm_ms": of_ranks(40.0, 1, 80.0, 0), "compute_busy_ms": of_ranks(40.0, 0, 80.0, 1)}
    # Over 3 steps and 2 ranks, 10 ms of each being waiting.
    row = ExposedCollective("all_gather", "", 2, "", 8, 8, 6, 6 * held_ms + 60, 0.0, 3, 0.0, 0, 1.0, "layers.3", 60.0)
    found = bottleneck_of([measured(spread, **{**STEP, "exposed_comm_ms": 60.0})])
    assert found is not None
    assert found.late_rank(Exposure(3, 2, (row,), (), (row,))) == (1 if named else None)


def test_communication_on_the_host_has_a_name_of_its_own() -> None:
    # Of 40 ms in which the device is idle, the host waits for Gloo for 35.
    step = {**STEP, "exposed_comm_ms": 0.0, "idle_ms": 40.0}
    found = bottleneck_of([measured(**step, exposed_on_host_ms=35.0)])
    assert found is not None
    assert found.parts == StepParts(50.0, 10.0, 0.0, 0.0, 0.0, 5.0, 35.0)
    assert found.sentence() == (
        "Steps are host-communication-bound: the device waits for communication on the host for 35.0% of a profiled "
        "step, the most after compute."
    )
    advice = [row for row in found.advice if row.topic == "on-host"]
    assert [row.why.endswith("up to 35.00 ms of exposed time in a step of 100.0 ms.") for row in advice] == [True]
    # Without it, nobody hears of it; nor where it is a small part.
    for less in ({}, {"exposed_on_host_ms": 2.0}):
        other = bottleneck_of([measured(**step, **less)])
        assert other is not None
        assert (other.bound, [row.name for row in other.advice if row.topic == "on-host"]) == (Bound.LAUNCH, [])
    # In a pipeline the bubble has the rest of the idle time.
    parts = step_parts(figures(**STEP, bubble_ms=25.0, exposed_on_host_ms=4.0))
    assert parts == StepParts(50.0, 10.0, 15.0, 0.0, 21.0, 0.0, 4.0)


def test_what_takes_more_than_compute_is_not_said_to_come_after_it() -> None:
    found = bottleneck_of([measured(**{**STEP, "exposed_comm_ms": 90.0})])
    assert found is not None
    assert found.sentence().startswith("Steps are communication-bound: communication that no compute hides takes ")
    assert "after compute" not in found.sentence()


def arrivals(*rows: Lateness) -> Arrivals:
    ranks, hosts = [row for row in rows if row.rank >= 0], [row for row in rows if row.rank < 0]
    return Arrivals(8, (DimensionWaiting("data", 32, 3.0, 1.0),), tuple(ranks), tuple(hosts))


def lateness(rank: int, worst: int, host: int = 0) -> Lateness:
    """Waited for longest in this many of eight steps; by chance in two."""
    return Lateness(rank, host, "data", 32, worst, 8, worst, 0.25, 2.0, 0.2)


LATE = {"exposed_comm_ms": of_ranks(5.0, 3, 40.0, 0), "compute_busy_ms": of_ranks(50.0, 0, 90.0, 3)}


def test_the_evidence_names_the_late_ranks_and_hosts_and_how_sure_that_is() -> None:
    seen = arrivals(lateness(3, 8), lateness(5, 3), lateness(-1, 8, host=1))
    found = bottleneck_of([msgspec.structs.replace(measured(LATE, **STEP), arrivals=seen)])
    assert found is not None
    sure = "in 100% of steps the others wait for it longest (95% interval 68 to 100%, by chance 25%)."
    assert found.sentence() == (
        "Steps are straggler-bound: ranks wait for rank 3, the last one, for 25.0% of a profiled step, "
        "the most after compute. "
        f"Rank 3: {sure} Host 1: {sure}"
    )
    first, second, *_ = found.advice
    assert first.what.startswith("Look at host 1 first:")
    assert first.why.endswith(sure)
    assert second.what.startswith("Look at rank 3: its clock")


def test_ranks_that_no_profile_shows_are_named_if_that_is_sure() -> None:
    # In each window another rank is late by its profile, so none is in most of them.
    spreads = [
        {"exposed_comm_ms": of_ranks(5.0, rank, 40.0, 0), "compute_busy_ms": of_ranks(50.0, 0, 90.0, rank)}
        for rank in (3, 4, 5)
    ]

    def found(*rows: Lateness) -> Any:
        return bottleneck_of(
            [msgspec.structs.replace(measured(spread, **STEP), arrivals=arrivals(*rows)) for spread in spreads]
        )

    sure = found(lateness(6, 7), lateness(2, 5))
    assert (sure.bound, sure.late) == (Bound.STRAGGLER, None)
    assert sure.advice[0].what.startswith("Look at rank 2 and rank 6:")
    assert "(95% interval" in sure.advice[0].why
    doubtful = found(lateness(6, 3))
    assert doubtful.sentence().endswith("by chance 25%): inconclusive.")
    assert doubtful.advice[0].what.startswith("Measure more windows")
    # Without times of collectives nothing is said of them.
    assert "wait for it longest" not in bottleneck_of([measured(LATE, **STEP)]).sentence()


def test_a_rank_that_is_late_in_few_windows_is_not_named() -> None:
    spread = {"exposed_comm_ms": of_ranks(5.0, 3, 40.0, 0), "compute_busy_ms": of_ranks(50.0, 0, 90.0, 3)}
    found = bottleneck_of([measured(spread, **STEP), measured(**STEP), measured(**STEP)])
    assert found is not None
    assert found.late is None
    assert found.parts == mean_parts(
        [StepParts(50.0, 10.0, 5.0, 25.0, 0.0, 10.0), *[StepParts(50.0, 10.0, 30.0, 0, 0, 10.0)] * 2]
    )


def topics(report: OverlapReport, speedup: Estimate | None = None) -> list[str]:
    found = bottleneck_of([report], speedup)
    assert found is not None
    return [advice.topic for advice in found.advice]


def test_overlap_that_costs_more_than_it_saves_comes_first() -> None:
    assert topics(measured(**STEP), Estimate(-0.1, -0.12, -0.08, 4, 4))[0] == "overlap-off"
    assert "overlap-off" not in topics(measured(**STEP), Estimate(-0.1, -0.3, 0.1, 4, 4))


COLLECTIVE = CollectiveTime("allreduce_", "g", 8, "nccl", 8, 8 * 10**6, 8 * 10**6, 10.0, "data")


def test_advice_is_the_same_where_the_details_of_windows_stay_in_the_file(tmp_path: Path) -> None:
    report = msgspec.structs.replace(measured(**STEP), collectives=(COLLECTIVE,))
    whole, bare = (read(write(tmp_path / "run", report), details=details).bottleneck() for details in (True, False))
    assert whole is not None
    assert whole.advice[0].topic == "buckets"
    assert bare == whole


def test_a_control_run_and_a_run_without_windows_have_no_bottleneck() -> None:
    assert run_bottleneck(RunSummary(run_info(), [])) is None
    control = msgspec.structs.replace(window(0), control=True)
    assert run_bottleneck(RunSummary(run_info(schedule=Schedule(control=True).as_dict()), [control])) is None
    assert run_bottleneck(RunSummary(run_info(), [window(0)])) is not None


def test_metrics_name_one_bound_and_shares_that_add_up() -> None:
    report = measured(**STEP)
    shares = {key: value for key, value in report.metrics().items() if key.startswith("overlap/step_")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["overlap/step_contention_fraction"] == pytest.approx(0.1)
    assert report.bound == Bound.COMMUNICATION.value == "communication"


def test_an_invalid_window_does_not_know_contention() -> None:
    metrics = msgspec.structs.replace(measured(**STEP), valid=False).metrics()
    assert "overlap/step_contention_fraction" not in metrics
    assert metrics["overlap/step_compute_fraction"] == pytest.approx(0.6)
