from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.timeline import MAX_INTERVALS
from overlap_callbacks.traces import analyze, read_trace
from tests import kineto
from tests.commands import invoke
from tests.traces import reference
from tests.traces.events import MS, collective, figures_of, gemm

# -- the whole file and its steps


@pytest.mark.parametrize("style", ["pretty", "line", "compact", "array"])
@pytest.mark.parametrize("options", [{}, {"slowdown": 0.3}, {"overlapped": False}, {"metadata": False}])
def test_figures_of_a_generated_job_equal_those_of_a_walk_over_all_end_points(
    tmp_path: Path, style: str, options: dict[str, Any]
) -> None:
    path = kineto.write(tmp_path / "trace.json.gz", kineto.training(seed=3, operators=1, **options), style=style)
    (found,) = analyze([read_trace(path)]).traces
    walk = reference.read(path)
    parts = [(found.total, walk.kernels), *((step, walk.of_step(step.step)) for step in found.steps)]
    assert [step.step for step in found.steps] == [4, 5, 6]
    for figures, kernels in parts:
        times = reference.times(kernels, walk.kernels)
        assert figures.compute_ms == pytest.approx(times.compute_sum / MS, rel=1e-13)
        assert figures.compute_busy_ms == pytest.approx(times.compute / MS, rel=1e-13)
        assert figures.comm_ms == pytest.approx(times.comm / MS, rel=1e-13)
        assert figures.comm_kernels_ms == pytest.approx(times.comm_sum / MS, rel=1e-13)
        assert figures.hidden_comm_ms == pytest.approx(times.overlapped / MS, rel=1e-13)
        assert figures.exposed_comm_ms == pytest.approx(times.exposed / MS, rel=1e-13)
        assert figures.overlap_ratio == pytest.approx(times.covered / times.compute_sum, rel=1e-13)
        assert figures.overlap_ratio_busy == pytest.approx(times.overlapped / times.compute, rel=1e-13)
        assert figures.hidden_comm_fraction == pytest.approx(times.overlapped / times.comm, rel=1e-13)
        assert figures.kernels == len(kernels)


def test_random_kernels_of_many_streams_are_summed_as_a_walk_over_their_end_points_sums_them(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(20):
        events = []
        for _ in range(60):
            start, length = chance.randrange(0, 4_000), chance.choice([0, 1, 5, 90, 700])
            make = chance.choice([gemm, collective])
            events.append(make(start / MS, (start + length) / MS))
        path = kineto.write(tmp_path / "trace.json", events)
        (found,) = analyze([read_trace(path)]).traces
        walk = reference.read(path)
        times = reference.times(walk.kernels, walk.kernels)
        ns = [round(ms * MS) for ms in (found.total.compute_ms, found.total.compute_busy_ms, found.total.comm_ms)]
        assert ns == [times.compute_sum, times.compute, times.comm]
        assert round(found.total.hidden_comm_ms * MS) == times.overlapped
        assert round(found.total.covered_compute_ms * MS) == times.covered
        hidden = sum(row.hidden_ms for row in found.collectives)
        compute = [kernel for kernel in walk.kernels if not kernel.communicates]
        assert round(hidden * MS) == sum(
            reference.covered(kernel, compute) for kernel in walk.kernels if kernel.communicates
        )


def test_copies_and_fills_are_neither_compute_nor_communication(tmp_path: Path) -> None:
    copies = [{**gemm(i, i + 1), "cat": cat} for i, cat in enumerate(["gpu_memcpy", "gpu_memset", "Memcpy"])]
    found = figures_of(tmp_path, [*copies, collective(0, 3), gemm(5, 7)])
    assert (found.total.copy_ms, found.total.compute_ms, found.total.hidden_comm_ms) == (3, 2, 0)
    assert found.total.kernels == 2
    assert [(family.calls, family.time_ms) for family in found.families] == [(1, 2)]


def copy(name: str, start: float, end: float, correlation: int = 0) -> kineto.Event:
    return {**gemm(start, end, correlation), "name": name, "cat": "gpu_memcpy"}


def test_copies_to_another_device_communicate_and_those_within_the_device_do_not(tmp_path: Path) -> None:
    peer, within = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"
    found = figures_of(tmp_path, [gemm(0, 6, stream=8), copy(peer, 4, 9), copy(within, 9, 10)])
    assert (found.total.comm_ms, found.total.hidden_comm_ms, found.total.copy_ms) == (5, 2, 1)
    (row,) = found.collectives
    assert (row.collective, row.time_ms) == ("peer_copy", 5)


def test_a_pattern_of_the_user_makes_copies_communicate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_rules, "communication_patterns", [*name_rules.communication_patterns, "Memcpy DtoD"])
    found = figures_of(tmp_path, [gemm(0, 6, stream=8), copy("Memcpy DtoD (Device -> Device)", 4, 9)])
    assert (found.total.comm_ms, found.total.copy_ms) == (5, 0)


def test_only_events_of_the_device_s_categories_are_kernels(tmp_path: Path) -> None:
    events = [gemm(0, 2), collective(1, 3)]
    # HTA takes what has a stream for a kernel; these have one, and are none.
    events += [{**gemm(5, 9), "cat": cat} for cat in ("cpu_op", "gpu_user_annotation", "overhead", "ac2g", "Trace")]
    events += [{**gemm(5, 9), "ph": ph} for ph in ("i", "s", "f", "M", "B")]
    found = figures_of(tmp_path, events)
    assert (found.total.kernels, found.total.compute_ms) == (2, 2)


def test_a_kernel_belongs_to_the_step_that_launched_it_wherever_it_ran(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, MS), kineto.step(2, MS, 2 * MS), kineto.step(3, 3 * MS, 4 * MS)]
    events += [kineto.launch(0, 1), gemm(5, 6, 1)]  # at the step's first nanosecond
    events += [kineto.launch(MS - 1, 2), gemm(6, 8, 2)]  # at its last
    events += [kineto.launch(MS, 3), gemm(8, 12, 3)]  # the next step's first
    events += [kineto.launch(2 * MS, 4), gemm(0.5, 8.5, 4, stream=8)]  # between two steps, although it runs within one
    events += [{**kineto.launch(3 * MS + 7, 5), "cat": "cuda_driver"}, gemm(1, 17, 5, stream=9)]
    found = figures_of(tmp_path, events)
    assert {step.step: step.compute_ms for step in found.steps} == {1: 3, 2: 4, 3: 16}
    assert found.total.compute_ms == 3 + 4 + 8 + 16


def test_kernels_launched_before_the_trace_belong_to_no_step_and_count_in_the_total(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 10 * MS), kineto.launch(10, 1), gemm(3, 4, 1), gemm(1, 3, 99), collective(1, 2, 98)]
    found = figures_of(tmp_path, events)
    assert (found.total.compute_ms, found.total.comm_ms, found.total.kernels) == (3, 1, 3)
    assert [(step.compute_ms, step.comm_ms, step.kernels) for step in found.steps] == [(1, 0, 1)]


def test_without_any_launch_in_the_file_a_kernel_belongs_to_the_step_in_which_it_starts(tmp_path: Path) -> None:
    events = [
        kineto.step(1, 0, 2 * MS),
        kineto.step(2, 2 * MS, 4 * MS),
        gemm(1, 3, 1),
        gemm(3, 9, 2, stream=8),
        gemm(5, 6, 3),
    ]
    found = figures_of(tmp_path, events)
    assert {step.step: step.compute_ms for step in found.steps} == {1: 2, 2: 6}


def test_cover_of_a_step_s_compute_is_taken_against_communication_of_every_step(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, MS), kineto.step(2, MS, 2 * MS), kineto.launch(10, 1), kineto.launch(MS + 10, 2)]
    found = figures_of(tmp_path, [*events, collective(2, 6, 1), gemm(5, 9, 2)])
    first, second = found.steps
    assert (first.hidden_comm_ms, first.exposed_comm_ms, first.compute_ms) == (1, 3, 0)
    assert (second.covered_compute_ms, second.compute_ms, second.comm_ms) == (1, 4, 0)


def late_collective() -> list[kineto.Event]:
    """The collective of step 1 runs beside the compute of step 2, and nothing else beside anything."""
    events = [kineto.step(1, 0, MS), kineto.step(2, MS, 2 * MS)]
    events += [kineto.launch(10, 1), kineto.launch(20, 2), kineto.launch(MS + 10, 3)]
    return [*events, gemm(2, 3, 1), collective(3, 9, 2), gemm(3, 10, 3)]


def test_no_share_of_a_step_is_above_one_where_its_communication_runs_beside_the_next_step_s_compute(
    tmp_path: Path,
) -> None:
    found = figures_of(tmp_path, late_collective())
    first, _ = found.steps
    assert (first.overlap_ratio, first.hidden_comm_fraction) == (0, 1)  # its compute ran alone
    assert found.total.overlap_ratio_busy == pytest.approx(6 / 8)
    for step in found.steps:
        assert step.overlap_ratio_busy is None or 0 <= step.overlap_ratio_busy <= 1


def test_compute_that_another_step_s_communication_covers_has_an_overlap_ratio(tmp_path: Path) -> None:
    _, second = figures_of(tmp_path, late_collective()).steps
    assert (second.comm_ms, second.covered_compute_ms) == (0, 6)
    assert second.overlap_ratio == pytest.approx(6 / 7)


# -- families


def test_families_hold_all_compute_time_and_what_ran_beside_each(tmp_path: Path) -> None:
    events = [
        gemm(0, 4), gemm(10, 11), kineto.kernel(kineto.NORM, 4 * MS, 6 * MS, 0),
        kineto.kernel("mine", 6 * MS, 7 * MS, 0), collective(2, 5),
        kineto.kernel(kineto.ALL_GATHER, 3 * MS, 6 * MS, 0, stream=21),
    ]  # fmt: skip
    found = figures_of(tmp_path, events)
    assert [(row.family, row.calls, row.time_ms, row.beside) for row in found.families] == [
        ("gemm", 2, 5, {"all_reduce": 2, "all_gather": 1}),
        ("normalisation", 1, 2, {"all_reduce": 1, "all_gather": 2}),
        ("other", 1, 1, {}),
    ]
    assert sum(row.time_ms for row in found.families) == found.total.compute_ms


def test_a_rule_of_the_user_goes_before_those_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(kineto.write(tmp_path / "trace.json", [gemm(0, 4), kineto.kernel("mine_7", 4 * MS, 6 * MS, 0)]))
    monkeypatch.setattr(name_rules, "families", list(name_rules.families))
    rules = ["--rule", r"mine=mine_\d", "--rule", "dense=(?i)GEMM", "--rule", "late=gemm"]
    result = invoke("analyze", path, "--csv", "families", *rules)
    assert result.exit_code == 0
    rows = [line.split(",")[3:6] for line in result.stdout.splitlines()[1:]]
    assert rows == [["dense", "1", "4.0"], ["mine", "1", "2.0"]]


# -- the estimate from one file


def seen(
    slowdown: float, *, steps: int = 4, beside: Any = (0, 1), cover: float = 1.0, grid: Any = (8, 1, 1)
) -> list[kineto.Event]:
    """Steps of a GEMM of 1 ms and a norm of 2 ms, slowed down in steps in which an all-reduce covers them."""
    events = []
    correlations = itertools.count(1)
    for number in range(steps):
        begin, slow = number * 100.0, 1 + slowdown if number in beside else 1.0
        events.append(kineto.step(number, round(begin * MS), round((begin + 90) * MS)))
        time = begin + 10
        for name, alone in ((kineto.GEMM, 1.0), (kineto.NORM, 2.0)):
            correlation, end = next(correlations), time + alone * slow
            events.append(kineto.launch(round((begin + 1) * MS), correlation))
            events.append(kineto.kernel(name, round(time * MS), round(end * MS), correlation, grid=grid))
            if number in beside:
                events.append(collective(time, time + cover * (end - time), correlation))
            time = end + 1
        events.append(collective(begin + 50, begin + 51, 0))
    return events


def test_the_estimate_recovers_the_slowdown_that_was_put_in_with_its_sample_sizes(tmp_path: Path) -> None:
    found = figures_of(tmp_path, seen(0.25, steps=5)).estimate
    assert found is not None
    assert found.slowdown == pytest.approx(0.25)
    assert (found.kernels, found.calls_beside, found.calls_alone) == (2, 4, 6)
    assert found.time_beside_ms == pytest.approx(2 * 1.25 * 3)
    assert "turn" in found.method
    assert list(found.families) == ["normalisation", "gemm"]
    assert found.families["gemm"].slowdown == pytest.approx(0.25)
    assert (found.families["gemm"].calls_beside, found.families["gemm"].calls_alone) == (2, 3)
    assert found.families["gemm"].time_beside_ms == pytest.approx(2.5)


def test_the_estimate_is_weighted_by_time(tmp_path: Path) -> None:
    events = seen(0.0)
    for event in events:
        if event["name"] == kineto.GEMM and event["args"]["correlation"] in (1, 3):
            event["dur"] = kineto.Nanoseconds(2 * MS)  # of 1 ms alone
    for event in events:
        if event["name"] == kineto.ALL_REDUCE and event["args"]["correlation"] in (1, 3):
            event["dur"] = kineto.Nanoseconds(2 * MS)
    found = figures_of(tmp_path, events).estimate
    assert found is not None
    assert found.slowdown == pytest.approx((2 + 2) / (1 + 2) - 1)
    assert found.families["normalisation"].slowdown == pytest.approx(0)
    assert found.families["gemm"].slowdown == pytest.approx(1)


@pytest.mark.parametrize(("cover", "counts"), [(1.0, True), (0.91, True), (0.89, False), (0.5, False), (0.11, False)])
def test_partly_covered_kernels_are_neither_concurrent_nor_alone(tmp_path: Path, cover: float, counts: bool) -> None:
    found = figures_of(tmp_path, seen(0.25, cover=cover)).estimate
    assert (found is not None) == counts
    if found is not None:
        assert (found.calls_beside, found.calls_alone) == (4, 4)


def test_a_tenth_covered_still_counts_as_alone(tmp_path: Path) -> None:
    events = seen(0.25)
    events += [collective(310, 310.09), collective(210, 210.11)]  # beside the GEMMs of the steps 3 and 2
    found = figures_of(tmp_path, events).estimate
    assert found is not None
    assert found.families["gemm"].calls_alone == 1
    assert found.families["normalisation"].calls_alone == 2


@pytest.mark.parametrize("beside", [(), (0, 1, 2, 3)], ids=["never", "always"])
def test_without_kernels_seen_both_beside_communication_and_alone_there_is_no_estimate(
    tmp_path: Path, beside: tuple[int, ...]
) -> None:
    assert figures_of(tmp_path, seen(0.25, beside=beside)).estimate is None


def test_without_communication_there_is_no_estimate(tmp_path: Path) -> None:
    assert figures_of(tmp_path, [gemm(0, 1), gemm(2, 3)]).estimate is None
    assert figures_of(tmp_path, [collective(0, 1), collective(2, 3)]).estimate is None


def test_in_a_file_without_steps_kernels_of_one_launch_shape_are_compared(tmp_path: Path) -> None:
    events = [event for event in seen(0.25) if "ProfilerStep" not in event["name"]]
    found = figures_of(tmp_path, events).estimate
    assert found is not None
    assert found.slowdown == pytest.approx(0.25)
    assert "grid" in found.method
    # Another kernel of the same name, but of another grid, which was always alone, is no like of them.
    found = figures_of(tmp_path, [*events, gemm(500, 590, grid=(4, 4, 4))]).estimate
    assert found is not None
    assert found.slowdown == pytest.approx(0.25)
    assert found.calls_alone == 4


# -- the picture


def test_the_picture_shows_the_first_step_that_launched_kernels(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, MS), kineto.step(2, MS, 2 * MS), kineto.step(3, 2 * MS, 3 * MS)]
    events += [kineto.launch(MS + i, i + 1) for i in range(4)] + [kineto.launch(2 * MS + 1, 9)]
    events += [gemm(10, 12, 1), gemm(11, 13, 2), gemm(15, 16, 3), collective(12, 20, 4), gemm(18, 30, 9)]
    events += [collective(5, 11, 0)]  # of an earlier step, and still in flight
    picture = figures_of(tmp_path, events).picture
    assert picture is not None
    assert picture.step_ms == 10
    assert picture.compute == ((0, 3), (5, 6), (8, 10))
    assert picture.communication == ((0, 1), (2, 10))
    assert (picture.closed_compute_ms, picture.closed_communication_ms) == (0, 0)


def test_the_picture_of_many_kernels_is_thinned_to_a_bounded_number_of_intervals(tmp_path: Path) -> None:
    count = 3 * MAX_INTERVALS
    events = [kineto.step(1, 0, MS)]
    for i in range(count):  # gaps of 1 to 1200 ns, the largest last
        start = i * 3_000 - i
        events += [kineto.launch(10, i + 1), kineto.kernel(kineto.GEMM, start, start + 3_000 - 2 - i, i + 1)]
    picture = figures_of(tmp_path, events).picture
    assert picture is not None
    assert len(picture.compute) == MAX_INTERVALS
    assert picture.communication == ()
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(picture.compute)]
    open_ns = round(sum(gaps) * MS)
    every = range(1, count)
    assert open_ns == sum(every[-(MAX_INTERVALS - 1) :])
    assert round(picture.closed_compute_ms * MS) == sum(every[: -(MAX_INTERVALS - 1)])
    assert picture.compute[0][0] == 0
    assert picture.compute[-1][1] == pytest.approx(picture.step_ms)


def test_without_steps_the_picture_is_of_the_whole_file(tmp_path: Path) -> None:
    picture = figures_of(tmp_path, [gemm(10, 12), collective(11, 15)]).picture
    assert picture is not None
    assert (picture.step_ms, picture.compute, picture.communication) == (5, ((0, 2),), ((1, 5),))


def test_a_kernel_that_only_its_metadata_knows_for_a_collective_is_one_and_a_copy_with_metadata_is_not(
    tmp_path: Path,
) -> None:
    metadata = {"Collective name": "allreduce", "In msg nelems": 10, "Group size": 2, "dtype": "Float"}
    copy = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>(int)"
    events = [
        kineto.kernel("mylib_ring_v3", 0, 4 * MS, 0, stream=9, **metadata),
        kineto.kernel(copy, 4 * MS, 5 * MS, 0, stream=9, **metadata),
        gemm(0, 2),
    ]
    found = figures_of(tmp_path, events)
    assert (found.total.comm_ms, found.total.compute_ms, found.total.hidden_comm_ms) == (4, 3, 2)
    assert [(row.collective, row.count) for row in found.collectives] == [("all_reduce", 1)]


def test_kernels_launched_in_none_of_the_steps_are_counted_and_said(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 10 * MS), kineto.launch(MS, 1), gemm(1, 3, 1), gemm(20, 21, 0), collective(22, 24, 0)]
    found = figures_of(tmp_path, events)
    assert found.total.compute_ms == 3
    assert found.steps[0].compute_ms == 2
    assert any(
        "2 kernels (1.000 ms of compute, 2.000 ms of communication) were launched in none" in problem
        for problem in found.problems
    )


def test_a_name_that_sounds_like_communication_and_is_not_known_is_said(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [kineto.kernel("acme_fast_allreduce_v2", 0, MS, 0), gemm(1, 3)])
    assert found.total.compute_ms == 3
    assert any("acme_fast_allreduce_v2" in problem for problem in found.problems)


def test_a_cpu_only_trace_of_nccl_shows_only_the_enqueueing(tmp_path: Path) -> None:
    events = [
        kineto.host_range("aten::mm", 0, 5 * MS, cat="cpu_op"),
        kineto.host_range("nccl:all_reduce", MS, 2 * MS, thread=7),
    ]
    found = figures_of(tmp_path, events)
    assert found.total.comm_ms == 0
    assert any("NCCL's collectives but no kernels of their device" in problem for problem in found.problems)


def test_operators_that_overlap_without_nesting_are_said(tmp_path: Path) -> None:
    events = [
        kineto.host_range("aten::mm", 0, 10 * MS, cat="cpu_op"),
        kineto.host_range("aten::add", 5 * MS, 15 * MS, cat="cpu_op"),
    ]
    assert any("overlap without nesting" in problem for problem in figures_of(tmp_path, events).problems)


def test_the_size_of_a_gather_is_its_output(tmp_path: Path) -> None:
    args = {"Collective name": "gather", "In msg nelems": 10, "Out msg nelems": 80, "Group size": 8, "dtype": "Float"}
    (row,) = figures_of(tmp_path, [collective(0, 1, 0, **args)]).collectives
    assert row.bytes == 320
