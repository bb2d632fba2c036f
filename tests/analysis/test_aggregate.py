from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from scipy import stats

from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock
from tests.samples import aggregate_windows

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL


def profiled(
    arm,
    block,
    *,
    compute=0.0,
    busy=0.0,
    comm=0.0,
    comm_busy=0.0,
    hidden=0.0,
    covered=0.0,
    p2p=0.0,
    idle=0.0,
    bubble=None,
    step=None,
) -> ProfiledBlock:
    return ProfiledBlock(
        mode=arm,
        block=block,
        num_steps=1,
        compute_ms=compute,
        compute_busy_ms=busy,
        comm_ms=comm,
        comm_busy_ms=comm_busy,
        hidden_comm_ms=hidden,
        covered_compute_ms=covered,
        copy_ms=0.0,
        p2p_ms=p2p,
        idle_ms=idle,
        bubble_ms=bubble,
        step_ms=step,
    )


# Points are ratios of sums of times, so that what adds up in each block adds up in the figures. By blocks: 80 and 120,
# 100 and 140 ms.
TIMED = (
    TimedBlock(OV, 0, (64.0, 96.0)),
    TimedBlock(SEQ, 1, (80.0, 120.0)),
    TimedBlock(SEQ, 2, (140.0, 140.0)),
    TimedBlock(OV, 3, (120.0, 120.0)),
)
PROFILED = (
    profiled(OV, 0, compute=60, busy=58, comm=30, comm_busy=26, hidden=20, covered=20, p2p=0.4, idle=9,
             bubble=12, step=90),
    profiled(SEQ, 1, compute=48, busy=47, comm=24, comm_busy=24, hidden=0.1, covered=0.4, idle=8, step=106),
    profiled(SEQ, 2, compute=72, busy=73, comm=36, comm_busy=30, hidden=0.3, covered=0.8, idle=10, step=146),
    profiled(OV, 3, compute=72, busy=66, comm=42, comm_busy=38, hidden=28, covered=33, p2p=0.6, idle=5,
             bubble=8, step=120),
)  # fmt: skip
BY_HAND = {
    "compute_slowdown": 66 / 60 - 1,  # eq. 1
    "overlap_ratio": 26.5 / 66,  # eq. 2: (20 + 33) / 2 of (60 + 72) / 2
    "e2e_overlapped_ms": 100,  # eq. 3
    "e2e_ideal_ms": 100 - (66 - 60),  # eq. 4
    "e2e_sequential_model_ms": 94 + 24,  # eq. 5
    "e2e_sequential_ms": 120,
    "speedup_vs_sequential": 120 / 100 - 1,
    "attainable_ms": 60,  # compute 60, communication 27
    "attained_fraction": (120 - 100) / (120 - 60),
    "gap_to_ideal": 100 / 94 - 1,
    "sequential_model_error": 118 / 120 - 1,
    "compute_ms": 66,
    "compute_isolated_ms": 60,
    "compute_busy_ms": (58 + 66) / 2,
    "compute_busy_isolated_ms": (47 + 73) / 2,
    "slowest_compute_ms": (47 + 73) / 2,
    "comm_ms": (26 + 38) / 2,
    "comm_isolated_ms": (24 + 30) / 2,
    "hidden_comm_ms": (20 + 28) / 2,
    "exposed_comm_ms": 32 - 24,
    "hidden_comm_fraction": 24 / 32,
    "comm_slowdown": 36 / 30 - 1,
    "comm_ratio": 32 / (62 + 8 + 7),  # of the step under the profiler: compute, exposed communication, idle
    "p2p_ms": 0.5,
    "idle_ms": 7,
    "idle_isolated_ms": 9,
    "bubble_ms": 10,
    "residual_overlap": 0.6 / 60,
    "residual_comm_overlap": 0.2 / 27,
    "profiler_slowdown": 0.05,
    "profiler_slowdown_isolated": 0.05,
}


def rank_window(rank=0, **changes) -> RankWindow:
    fields = {
        "rank": rank,
        "window": 2,
        "first_step": 1020,
        "num_steps": 65,
        "complete": True,
        "backend": "nccl",
        "device": "NVIDIA H200",
        "wall_ms": 7500.0,
        "timed": TIMED,
        "profiled": PROFILED,
    }
    return RankWindow(**{**fields, **changes})


def report_of(*windows, world_size=None, every_n_steps=500, **options) -> OverlapReport:
    world_size = len(windows) if world_size is None else world_size
    return aggregate_windows(windows, world_size=world_size, every_n_steps=every_n_steps, **options)


def values(found: OverlapReport) -> dict[str, float]:
    return {name: figure.value for name, figure in found.figures().items()}


def full_window(rank=0, **changes) -> RankWindow:
    """Four blocks of each mode in both parts, so that every figure has an interval."""
    timed = [msgspec.structs.replace(b, block=b.block + shift) for shift in (0, 4) for b in TIMED]
    prof = [msgspec.structs.replace(b, block=b.block + shift) for shift in (0, 4) for b in PROFILED]
    return rank_window(rank, **{"timed": tuple(timed), "profiled": tuple(prof), **changes})


def with_profiled(arm, **changes) -> tuple[ProfiledBlock, ...]:
    """The profiled blocks of a full window, with changes to those of one arm."""
    return tuple(msgspec.structs.replace(b, **changes) if b.mode is arm else b for b in full_window().profiled)


def leaky_window(residual, **changes) -> RankWindow:
    """Sequential steps with that share of their compute beside communication, and none of their communication."""
    prof = tuple(
        block if block.mode is OV else msgspec.structs.replace(block, covered_compute_ms=residual * block.compute_ms)
        for block in full_window().profiled
    )
    return full_window(**{"profiled": prof, **changes})


# -- the equations


def test_every_figure_by_hand():
    assert values(report_of(rank_window())) == pytest.approx(BY_HAND)


def test_the_figures_are_in_order_and_complete():
    of_others = ("waiting_ms", "waiting_isolated_ms", "exposed_on_host_ms")  # several ranks, and Gloo beside a device
    names = [figure.name for figure in FIGURES if figure.name not in of_others]
    assert list(report_of(rank_window()).figures()) == names
    assert set(names) == set(BY_HAND)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_is_a_field_of_the_report_and_has_a_meaning(figure):
    assert figure.name in OverlapReport.__struct_fields__
    assert figure.key == f"overlap/{figure.name}"
    assert figure.unit == ("ms" if figure.name.endswith("_ms") else "fraction")
    assert figure.meaning


def test_every_estimate_of_the_report_is_a_figure():
    fields = msgspec.structs.fields(OverlapReport)
    assert {field.name for field in fields if "Estimate" in str(field.type)} == {figure.name for figure in FIGURES}


def test_two_blocks_of_a_mode_are_too_few_for_an_interval_and_four_are_enough():
    for figure in report_of(rank_window()).figures().values():
        assert (figure.ci_low, figure.ci_high) == (None, None)
    for figure in report_of(full_window()).figures().values():
        assert figure.ci_low <= figure.value <= figure.ci_high


def test_figures_say_on_how_many_steps_and_blocks_they_rest():
    found = report_of(full_window())
    step, slowdown, gap = found.e2e_overlapped_ms, found.compute_slowdown, found.gap_to_ideal
    assert (step.num_steps, step.num_blocks) == (8, 4)
    assert (slowdown.num_steps, slowdown.num_blocks) == (4 + 4, 4 + 4)
    assert (gap.num_steps, gap.num_blocks) == (8 + 4 + 4, 4 + 4 + 4)


def test_the_interval_of_the_speedup_by_hand():
    # Sums say 120 / 100; block means of ln t give the width. Places 0, 3, 4, 7 and 1, 2, 5, 6 have alike means, so a
    # linear trend changes no mean, and takes one degree of freedom from the two modes together.
    logs = {OV: [math.log(64 * 96) / 2, math.log(120)] * 2, SEQ: [math.log(80 * 120) / 2, math.log(140)] * 2}
    places = {OV: [-1, -1 / 7, 1 / 7, 1], SEQ: [-5 / 7, -3 / 7, 3 / 7, 5 / 7]}
    rows = [(OV, x, y) for x, y in zip(places[OV], logs[OV], strict=True)]
    rows += [(SEQ, x, y) for x, y in zip(places[SEQ], logs[SEQ], strict=True)]
    columns = np.array([[arm is OV, arm is SEQ, x] for arm, x, _ in rows], dtype=float)
    values = np.array([y for _, _, y in rows])
    left = values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
    square = sum(x * x for _, x, _ in rows)
    parts, degrees = [], []
    for arm in (OV, SEQ):
        own = [place for place, row in enumerate(rows) if row[0] is arm]
        degrees.append(4 - 1 - sum(rows[place][1] ** 2 for place in own) / square)
        parts.append(sum(left[place] ** 2 for place in own) / degrees[-1] / 4)
    assert sum(degrees) == pytest.approx(5)
    satterthwaite = sum(parts) ** 2 / sum(part**2 / freedom for part, freedom in zip(parts, degrees, strict=True))
    half = float(stats.t.ppf(0.975, satterthwaite)) * math.sqrt(sum(parts))
    speedup = report_of(full_window()).speedup_vs_sequential
    assert speedup.value == pytest.approx(0.2)
    assert speedup.ci_low == pytest.approx(math.exp(math.log(1.2) - half) - 1, abs=1e-4)
    assert speedup.ci_high == pytest.approx(math.exp(math.log(1.2) + half) - 1, abs=1e-4)
    assert (speedup.standard_error, speedup.degrees_of_freedom) == pytest.approx(
        (math.sqrt(sum(parts)), satterthwaite), rel=1e-5
    )


# -- what was not measured is absent


def test_without_a_profile_there_are_step_times_and_nothing_of_kernels():
    found = report_of(rank_window(profiled=()))
    assert set(found.figures()) == {"e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential"}
    assert found.valid


def test_without_step_times_there_are_kernels_and_nothing_of_step_times():
    found = values(report_of(rank_window(timed=())))
    assert found["compute_slowdown"] == pytest.approx(0.1)
    assert not [name for name in found if name.startswith("e2e_")]
    assert not {"speedup_vs_sequential", "gap_to_ideal", "sequential_model_error"} & set(found)


@pytest.mark.parametrize("other", [{"terms": "b"}, {"first_step": 21}, {"window": 1}])
def test_ranks_that_measured_different_things_make_the_window_invalid_and_are_named(other):
    windows = [rank_window(rank, terms="a") for rank in range(4)]
    assert report_of(*windows).valid
    windows[2] = msgspec.structs.replace(windows[2], **other)
    found = report_of(*windows)
    assert not found.valid
    assert any(problem.startswith("rank 2 measured something else than rank 0") for problem in found.problems)


def test_an_empty_window_has_no_figures_and_no_overhead():
    found = report_of(rank_window(timed=(), profiled=(), wall_ms=0.0, num_steps=0, complete=False))
    assert found.figures() == {}
    assert found.measurement_overhead is None
    assert (found.complete, found.valid) == (False, True)
    assert found.metrics() == {
        "overlap/ranks_heard": 1,
        "overlap/valid": 1.0,
        "overlap/verified": 0.0,
        "overlap/complete": 0.0,
        "overlap/control": 0.0,
    }


def test_one_mode_alone_gives_no_comparison():
    only = tuple(block for block in TIMED if block.mode is OV)
    found = report_of(rank_window(timed=only, profiled=()))
    assert values(found) == pytest.approx({"e2e_overlapped_ms": 100})


def test_a_single_step_gives_a_value_without_an_interval():
    found = report_of(rank_window(timed=(TimedBlock(OV, 0, (90.0,)),), profiled=()))
    assert set(found.figures()) == {"e2e_overlapped_ms"}
    step = found.e2e_overlapped_ms
    assert step.value == pytest.approx(90)
    assert (step.ci_low, step.ci_high, step.num_steps, step.num_blocks) == (None, None, 1, 1)


def test_a_single_block_of_each_mode_gives_every_figure_without_an_interval():
    found = report_of(rank_window(timed=TIMED[:2], profiled=PROFILED[:2]))
    assert set(found.figures()) == set(BY_HAND)
    assert found.speedup_vs_sequential.value == pytest.approx(100 / 80 - 1)
    assert found.compute_slowdown.value == pytest.approx(60 / 48 - 1)
    assert found.e2e_ideal_ms.value == pytest.approx(80 - 12)
    assert all(figure.ci_low is None for figure in found.figures().values())


@pytest.mark.parametrize("step_ms", [(), (0.0, 90.0)])
def test_blocks_without_usable_steps_are_left_out(step_ms):
    found = report_of(rank_window(timed=(*TIMED, TimedBlock(OV, 4, step_ms)), profiled=()))
    assert found.e2e_overlapped_ms.value == pytest.approx(100)
    assert found.e2e_overlapped_ms.num_blocks == 2


def without_communication(block: ProfiledBlock) -> ProfiledBlock:
    return profiled(block.mode, block.block, compute=block.compute_ms, busy=block.compute_busy_ms)


def test_without_communication_its_times_are_zero_and_its_ratios_absent():
    window = full_window(profiled=tuple(map(without_communication, full_window().profiled)))
    found = values(report_of(window))
    zero = {"comm_ms", "comm_isolated_ms", "hidden_comm_ms", "exposed_comm_ms", "comm_ratio", "overlap_ratio"}
    assert {name: found[name] for name in zero} == dict.fromkeys(zero, 0.0)
    assert found["residual_overlap"] == 0.0
    assert not {"hidden_comm_fraction", "comm_slowdown"} & set(found)
    assert found["e2e_sequential_model_ms"] == found["e2e_ideal_ms"] == pytest.approx(94)


def test_without_communication_the_compute_figures_keep_their_intervals():
    window = full_window(profiled=tuple(map(without_communication, full_window().profiled)))
    bare, whole = report_of(window), report_of(full_window())
    for name in ("compute_slowdown", "compute_ms", "e2e_ideal_ms", "gap_to_ideal"):
        expected, found = getattr(whole, name), getattr(bare, name)
        assert found.ci_low is not None, name
        assert (found.ci_low, found.ci_high) == pytest.approx((expected.ci_low, expected.ci_high)), name


def test_without_compute_the_figures_of_compute_are_absent():
    bare = tuple(profiled(b.mode, b.block, comm=b.comm_ms, comm_busy=b.comm_busy_ms) for b in full_window().profiled)
    found = values(report_of(full_window(profiled=bare)))
    absent = {
        "compute_slowdown",
        "overlap_ratio",
        "e2e_ideal_ms",
        "e2e_sequential_model_ms",
        "gap_to_ideal",
        "sequential_model_error",
        "compute_ms",
        "compute_isolated_ms",
        "residual_overlap",
    }
    absent |= {"bubble_ms", "profiler_slowdown", "profiler_slowdown_isolated"}  # these blocks do not say
    assert set(BY_HAND) - set(found) - {"p2p_ms"} == absent  # there are no sends and receives
    assert found["comm_slowdown"] == pytest.approx(0.2)
    assert found["hidden_comm_fraction"] == 0.0


def test_a_negative_ideal_step_time_is_dropped_and_has_no_gap():
    # Sums over streams can exceed the step: 100 - (300 - 60) is no step time to compare with.
    many_streams = tuple(
        msgspec.structs.replace(b, compute_ms=300.0 if b.mode is OV else 60.0) for b in full_window().profiled
    )
    found = values(report_of(full_window(profiled=many_streams)))
    absent = {"e2e_ideal_ms", "e2e_sequential_model_ms", "gap_to_ideal", "sequential_model_error"}
    assert not absent & set(found)


# -- ranks


def test_a_block_is_averaged_over_the_ranks_before_anything_else():
    # Rank 1 takes 0.8 times as long throughout: the mean over the two ranks is 0.9 times.
    faster = tuple(TimedBlock(b.mode, b.block, tuple(0.8 * t for t in b.step_ms)) for b in TIMED)
    found = report_of(rank_window(0), rank_window(1, timed=faster))
    assert found.e2e_overlapped_ms.value == pytest.approx(90)
    assert found.speedup_vs_sequential.value == pytest.approx(0.2)
    # Ranks step together: they are no further evidence.
    assert (found.e2e_overlapped_ms.num_steps, found.e2e_overlapped_ms.num_blocks) == (4, 2)


def test_a_block_that_one_rank_lacks_comes_from_the_others():
    found = report_of(rank_window(0, timed=TIMED[:3], profiled=PROFILED[:3]), rank_window(1))
    assert values(found) == pytest.approx(BY_HAND)


def test_a_rank_without_a_profile_leaves_the_kernels_to_the_others():
    found = report_of(rank_window(0, profiled=()), rank_window(1))
    assert values(found) == pytest.approx(BY_HAND)


def test_spread_over_ranks_by_hand():
    slow = tuple(TimedBlock(b.mode, b.block, tuple(1.1 * t for t in b.step_ms)) for b in TIMED)
    hot = tuple(msgspec.structs.replace(b, compute_ms=b.compute_ms * (1.2 if b.mode is OV else 1)) for b in PROFILED)
    found = report_of(rank_window(3), rank_window(1, timed=slow), rank_window(2, profiled=hot))
    steps, profile = "e2e_overlapped_ms e2e_sequential_ms", "compute_slowdown exposed_comm_ms compute_busy_ms idle_ms"
    assert set(found.spread) == {*steps.split(), *profile.split()}
    step = found.spread["e2e_overlapped_ms"]
    assert (step.low, step.high, step.high_rank) == (pytest.approx(100), pytest.approx(110), 1)
    assert step.low_rank in (2, 3)
    assert step.std == pytest.approx(math.sqrt(((20 / 3) ** 2 + 2 * (10 / 3) ** 2) / 2))  # about the mean, 103.33
    slowdown = found.spread["compute_slowdown"]
    assert (slowdown.low, slowdown.high, slowdown.high_rank) == (pytest.approx(0.1), pytest.approx(0.32), 2)
    exposed = found.spread["exposed_comm_ms"]
    assert (exposed.low, exposed.high, exposed.std) == pytest.approx((8, 8, 0))


def test_one_rank_has_no_spread_nor_has_a_figure_of_one_rank():
    assert report_of(rank_window()).spread == {}
    found = report_of(rank_window(0), rank_window(1, profiled=()))
    assert set(found.spread) == {"e2e_overlapped_ms", "e2e_sequential_ms"}


def test_a_missing_rank_is_named_in_numbers_and_the_rest_are_reported():
    found = report_of(rank_window(3), rank_window(0), rank_window(1), world_size=4)
    assert found.ranks == (0, 1, 3)
    assert found.world_size == 4
    assert found.problems == ("1 of 4 ranks were not heard [OC328]",)
    assert found.metrics()["overlap/ranks_heard"] == 3
    assert [sample.rank for sample in found.samples] == [0, 1, 3]
    assert values(found) == pytest.approx(BY_HAND)


def test_what_describes_the_window_is_of_the_lowest_rank_and_the_worst_of_all():
    lowest = rank_window(1, num_steps=60, wall_ms=8000.0, device="A", backend="ucc")
    other = rank_window(2, num_steps=65, wall_ms=7000.0, device="B", backend="nccl", complete=False)
    found = report_of(other, lowest)
    assert (found.window, found.first_step) == (2, 1020)
    assert (found.backend, found.device) == ("ucc", "A")
    assert (found.num_steps, found.wall_ms, found.complete) == (65, 8000.0, False)


def test_problems_name_their_rank_where_there_are_several_and_are_reported_once():
    assert report_of(rank_window(problems=("hot", "hot")), problems=["late"]).problems == ("late", "hot")
    found = report_of(rank_window(0, problems=("hot",)), rank_window(1, problems=("hot", "late")))
    assert found.problems == ("hot", "rank 1: late")


# -- validity


COMPARING = {
    "attainable_ms",
    "attained_fraction",
    "idle_isolated_ms",
    "profiler_slowdown_isolated",
    "compute_slowdown",
    "e2e_ideal_ms",
    "e2e_sequential_model_ms",
    "e2e_sequential_ms",
    "speedup_vs_sequential",
    "gap_to_ideal",
    "sequential_model_error",
    "compute_isolated_ms",
    "compute_busy_isolated_ms",
    "comm_isolated_ms",
    "slowest_compute_ms",
    "comm_slowdown",
}


def test_an_invalid_window_logs_nothing_that_rests_on_its_sequential_steps():
    found = report_of(leaky_window(0.5), leaky_window(0.5, rank=1))
    logged = {key.removeprefix("overlap/") for key in found.metrics()}
    assert not [key for key in logged if key.startswith(tuple(COMPARING))]
    for name in set(BY_HAND) - COMPARING:
        assert {name, f"{name}_ci_low", f"{name}_ci_high"} <= logged
    assert {"e2e_overlapped_ms_rank_low", "exposed_comm_ms_rank_high"} <= logged
    assert found.metrics()["overlap/valid"] == 0.0
    assert set(found.figures()) >= COMPARING  # the record keeps them


# -- metrics


def test_metrics_of_a_valid_window_hold_each_figure_with_its_interval_and_spread():
    found = report_of(full_window(0), full_window(1))
    expected = {"ranks_heard", "valid", "verified", "complete", "control", "measurement_overhead"}
    expected |= {name + suffix for name in BY_HAND for suffix in ("", "_ci_low", "_ci_high")}
    expected |= {name + suffix for name in found.spread for suffix in ("_rank_low", "_rank_high")}
    flat = found.metrics()
    assert {key for key in flat if not key.startswith("overlap/step_")} == {f"overlap/{name}" for name in expected}
    assert all(math.isfinite(value) for value in flat.values())
    assert flat["overlap/speedup_vs_sequential"] == pytest.approx(0.2)
    assert flat["overlap/speedup_vs_sequential_ci_low"] == found.speedup_vs_sequential.ci_low
    assert (flat["overlap/valid"], flat["overlap/control"], flat["overlap/ranks_heard"]) == (1, 0, 2)


@pytest.mark.parametrize(
    "window",
    [
        full_window(profiled=tuple(map(without_communication, full_window().profiled))),
        rank_window(profiled=()),
        rank_window(timed=()),
        rank_window(timed=TIMED[:1], profiled=PROFILED[:1]),
        leaky_window(0.5),
    ],
    ids=["no communication", "no profile", "no step times", "one block", "invalid"],
)
def test_metrics_are_finite_whatever_is_missing(window):
    flat = report_of(window).metrics()
    assert flat
    assert all(math.isfinite(value) for value in flat.values())


# -- overhead and kernels


def test_kernels_are_means_over_the_ranks_those_that_lose_most_first():
    gemm = KernelTime("gemm", False, overlapped_calls=4, sequential_calls=4, overlapped_ms=30, sequential_ms=28)
    slower = KernelTime("gemm", False, overlapped_calls=4, sequential_calls=4, overlapped_ms=36, sequential_ms=28)
    norm = KernelTime("norm", False, overlapped_calls=2, sequential_calls=2, overlapped_ms=9, sequential_ms=3)
    found = report_of(
        rank_window(0, kernels=(gemm,)), rank_window(1, kernels=(slower, norm)), rank_window(2)
    ).kernels  # rank 2 has no profile, and does not count; on rank 0 the norm took no time
    assert found == (
        KernelTime("gemm", False, overlapped_calls=4, sequential_calls=4, overlapped_ms=33, sequential_ms=28),
        KernelTime("norm", False, overlapped_calls=1, sequential_calls=1, overlapped_ms=4.5, sequential_ms=1.5),
    )
    assert [kernel.lost_ms for kernel in found] == [5, 3]


def test_a_record_that_says_0_steps_from_window_to_window_has_no_cost_and_no_error():
    ranks = [rank_window(0), rank_window(1)]
    assert aggregate_windows(ranks, world_size=2, every_n_steps=100).measurement_overhead is not None
    assert aggregate_windows(ranks, world_size=2, every_n_steps=0).measurement_overhead is None
