from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.kernels.attribution import ALONE, UNMATCHED
from overlap_callbacks.traces import compare, read_trace
from overlap_callbacks.traces.figures import Comparison
from tests import kineto
from tests.traces import reference

MS = 1_000_000


def gemm(start: float, end: float, correlation: int = 0, name: str = kineto.GEMM, **options: Any) -> kineto.Event:
    return kineto.kernel(name, round(start * MS), round(end * MS), correlation, **options)


def all_reduce(start: float, end: float, correlation: int = 0, **options: Any) -> kineto.Event:
    return kineto.kernel(kineto.ALL_REDUCE, round(start * MS), round(end * MS), correlation, stream=20, **options)


def compared(folder: Path, overlapped: Any, sequential: Any, heads: Any = ({}, {})) -> Comparison:
    paths = [
        kineto.write(folder / f"{name}.json", events, **head)
        for name, events, head in zip(("overlapped", "sequential"), (overlapped, sequential), heads, strict=True)
    ]
    return compare(read_trace(paths[0]), read_trace(paths[1]))


def said(found: Comparison, *words: str) -> bool:
    return any(all(word in problem for word in words) for problem in found.problems)


# -- a whole job, against a plain computation


class Mean:
    """The mean step of a file, by a walk over its end points."""

    def __init__(self, path: Path) -> None:
        self.walk = reference.read(path)
        steps = [number for number in self.walk.steps if self.walk.of_step(number)]
        parts = [reference.times(self.walk.of_step(number), self.walk.kernels) for number in steps]
        self.numbers = steps
        self.times = {name: sum(getattr(part, name) for part in parts) / len(steps) / MS for name in parts[0]._fields}
        self.wall = sum(end - begin for begin, end in (self.walk.steps[number] for number in steps)) / len(steps) / MS

    def calls(self) -> dict[tuple[str, str, int], list[reference.Kernel]]:
        """The k-th calls of each name and launch shape, one of each step."""
        found = defaultdict(list)
        for number in self.numbers:
            turns: dict[tuple[str, str], int] = defaultdict(int)
            for kernel in sorted(self.walk.of_step(number), key=lambda kernel: kernel.start):
                found[kernel.name, kernel.grid, turns[kernel.name, kernel.grid]].append(kernel)
                turns[kernel.name, kernel.grid] += 1
        return found


@pytest.fixture(params=[0.0, 0.15, 0.4], ids=["no slowdown", "15 %", "40 %"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    overlapped = kineto.training(steps=3, layers=6, seed=5, slowdown=request.param, operators=1)
    sequential = kineto.training(steps=2, layers=6, seed=5, overlapped=False, operators=1)
    return (
        kineto.write(tmp_path / "overlapped.json.gz", overlapped, **kineto.job()),
        kineto.write(tmp_path / "sequential.json", sequential, **kineto.job()),
    )


def test_the_equations_equal_those_of_a_plain_computation(files: tuple[Path, Path]) -> None:
    found = compare(*map(read_trace, files))
    ov, seq = map(Mean, files)
    figures = found.figures
    near = {"rel": 1e-12, "abs": 1e-12}
    compute, alone = ov.times["compute_sum"], seq.times["compute_sum"]
    assert found.steps == (3, 2)
    assert figures["compute_ms"] == pytest.approx(compute, **near)
    assert figures["compute_isolated_ms"] == pytest.approx(alone, **near)
    assert figures["compute_slowdown"] == pytest.approx((compute - alone) / alone, **near)  # 1
    assert figures["overlap_ratio"] == pytest.approx(ov.times["covered"] / compute, **near)  # 2
    assert figures["e2e_overlapped_ms"] == pytest.approx(ov.wall, **near)  # 3
    ideal = ov.wall - (compute - alone)
    assert figures["e2e_ideal_ms"] == pytest.approx(ideal, **near)  # 4
    model = ideal + ov.times["overlapped"]
    assert figures["e2e_sequential_model_ms"] == pytest.approx(model, **near)  # 5
    assert figures["e2e_sequential_ms"] == pytest.approx(seq.wall, **near)
    assert figures["speedup_vs_sequential"] == pytest.approx(seq.wall / ov.wall - 1, **near)
    assert figures["gap_to_ideal"] == pytest.approx(ov.wall / ideal - 1, **near)
    assert figures["sequential_model_error"] == pytest.approx(model / seq.wall - 1, **near)
    assert figures["comm_ms"] == pytest.approx(ov.times["comm"], **near)
    assert figures["comm_isolated_ms"] == pytest.approx(seq.times["comm"], **near)
    assert figures["hidden_comm_ms"] == pytest.approx(ov.times["overlapped"], **near)
    assert figures["exposed_comm_ms"] == pytest.approx(ov.times["comm"] - ov.times["overlapped"], **near)
    assert figures["hidden_comm_fraction"] == pytest.approx(ov.times["overlapped"] / ov.times["comm"], **near)
    assert figures["comm_ratio"] == pytest.approx(ov.times["comm"] / ov.wall, **near)
    assert figures["comm_slowdown"] == pytest.approx(0, **near)
    assert figures["residual_overlap"] == 0
    assert found.valid
    assert (found.matched_fraction, found.unmatched, found.problems) == (1, (), ())


def test_losses_of_the_compute_pairs_add_up_to_the_time_that_equation_4_takes_off(files: tuple[Path, Path]) -> None:
    found = compare(*map(read_trace, files))
    lost = sum(pair.lost_ms for pair in found.pairs if not pair.communication and pair.lost_ms is not None)
    assert lost == pytest.approx(found.figures["compute_ms"] - found.figures["compute_isolated_ms"], abs=1e-12)
    assert lost == pytest.approx(found.figures["e2e_overlapped_ms"] - found.figures["e2e_ideal_ms"], abs=1e-12)
    time = sum(pair.time_ms for pair in found.pairs if not pair.communication)
    assert time == pytest.approx(found.figures["compute_ms"])
    lost = sum(kernel.lost_ms for kernel in found.kernels if not kernel.communication)
    assert lost == pytest.approx(found.figures["compute_ms"] - found.figures["compute_isolated_ms"], abs=1e-12)


def test_pairs_and_kernels_equal_those_of_a_plain_computation(files: tuple[Path, Path]) -> None:
    found = compare(*map(read_trace, files))
    ov, seq = map(Mean, files)
    alone = {key: sum(kernel.duration for kernel in calls) / len(calls) for key, calls in seq.calls().items()}
    families = {kineto.GEMM: "gemm", kineto.NORM: "normalisation", kineto.ADD: "elementwise"}
    everything = ov.walk.kernels
    pairs: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for key, calls in ov.calls().items():
        for kernel in calls:
            totals = kernels[kernel.name]
            for i, value in enumerate((1, kernel.duration, alone[key])):
                totals[i] += value
            if kernel.communicates:
                continue
            beside = reference.covered(kernel, [other for other in everything if other.communicates])
            entry = pairs[families[kernel.name], "all_reduce" if beside else ALONE]
            for i, value in enumerate((1, beside, kernel.duration, alone[key])):
                entry[i] += value

    def per_step(*values: float) -> list[Any]:
        calls, *times = values
        return [pytest.approx(calls / 3), *(pytest.approx(time / 3 / MS, abs=1e-12) for time in times)]

    compute = {
        (pair.kernel_family, pair.concurrent_with): [pair.calls, pair.concurrent_ms, pair.time_ms, pair.alone_ms]
        for pair in found.pairs
        if not pair.communication
    }
    assert compute == {key: per_step(*values) for key, values in pairs.items()}
    assert {
        kernel.name: [kernel.overlapped_calls, kernel.overlapped_ms, kernel.sequential_ms] for kernel in found.kernels
    } == {name: per_step(*values) for name, values in kernels.items()}
    assert {kernel.name for kernel in found.kernels if kernel.communication} == {kineto.ALL_REDUCE}
    lost = [pair.lost_ms for pair in found.pairs]
    assert lost == sorted(lost, key=lambda ms: -(ms or 0))
    lost = [kernel.lost_ms for kernel in found.kernels]
    assert lost == sorted(lost, reverse=True)


def test_the_slowdown_that_was_put_in_is_found_in_the_kernels_that_were_covered(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [gemm(0, 1.25, grid=(1, 1, 1)), gemm(2, 3, grid=(2, 1, 1)), all_reduce(0, 1.25)],
        [gemm(0, 1, grid=(1, 1, 1)), gemm(2, 3, grid=(2, 1, 1)), all_reduce(5, 6)],
    )
    rows = {(pair.kernel_family, pair.concurrent_with): pair for pair in found.pairs}
    assert rows["gemm", "all_reduce"].slowdown == pytest.approx(0.25)
    assert rows["gemm", ALONE].slowdown == pytest.approx(0)
    assert rows["all_reduce", "gemm"].slowdown == pytest.approx(0.25)
    assert found.figures["comm_slowdown"] == pytest.approx(0.25)
    assert found.figures["compute_slowdown"] == pytest.approx(2.25 / 2 - 1)


# -- matching


def test_a_grid_that_varies_with_the_data_is_matched_by_name_and_turn(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [gemm(0, 2, grid=(17, 1, 1)), gemm(3, 7, grid=(19, 1, 1)), all_reduce(0, 8)],
        [gemm(0, 1, grid=(13, 1, 1)), gemm(3, 5, grid=(11, 1, 1)), all_reduce(6, 8)],
    )
    assert (found.matched_fraction, found.unmatched) == (1, ())
    (kernel,) = (kernel for kernel in found.kernels if not kernel.communication)
    assert (kernel.overlapped_calls, kernel.overlapped_ms, kernel.sequential_ms) == (2, 6, 3)


def test_kernels_that_differ_in_grid_or_block_are_matched_with_their_own_kind(tmp_path: Path) -> None:
    blocks = [{"block": [n, 1, 1]} for n in (64, 128)]
    ov = [gemm(0, 2), gemm(3, 7)]
    seq = [gemm(0, 3), gemm(4, 5)]  # the other way round
    for event, block in zip([*ov, *reversed(seq)], [*blocks, *blocks], strict=True):
        event["args"].update(block)
    found = compared(tmp_path, [*ov, all_reduce(0, 1)], [*seq, all_reduce(9, 10)])
    rows = {pair.concurrent_with: pair for pair in found.pairs if pair.kernel_family == "gemm"}
    assert (rows["all_reduce"].time_ms, rows["all_reduce"].alone_ms) == (2, 1)
    assert (rows[ALONE].time_ms, rows[ALONE].alone_ms) == (4, 3)


def test_of_a_kernel_that_runs_more_often_in_one_file_the_calls_too_many_have_no_partner(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [gemm(0, 2), gemm(3, 4), gemm(5, 9), all_reduce(0, 9)],
        [gemm(0, 1), gemm(3, 6), all_reduce(7, 9)],
    )
    (kernel,) = (kernel for kernel in found.kernels if not kernel.communication)
    assert (kernel.overlapped_calls, kernel.overlapped_ms, kernel.sequential_ms) == (2, 2 + 1, 1 + 3)
    (left,) = found.unmatched
    assert (left.name, left.overlapped_calls, left.overlapped_ms, left.sequential_calls) == (kineto.GEMM, 1, 4, 0)
    assert found.matched_fraction == pytest.approx(3 / 7)
    assert not found.valid
    lost = sum(pair.lost_ms for pair in found.pairs if not pair.communication)
    assert lost == pytest.approx(found.figures["compute_ms"] - found.figures["compute_isolated_ms"])


def test_kernels_that_match_nothing_are_counted_and_named_from_both_files(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [gemm(0, 8), gemm(8, 9, name="new", grid=(3, 1, 1)), gemm(9, 10, name="new"), all_reduce(0, 1)],
        [gemm(0, 8), gemm(8, 9.5, name="old"), gemm(20, 23, name=kineto.ALL_GATHER), all_reduce(30, 31)],
    )
    rows = {
        row.name: (row.overlapped_calls, row.overlapped_ms, row.sequential_calls, row.sequential_ms)
        for row in found.unmatched
    }
    assert rows == {"new": (2, 2, 0, 0), "old": (0, 0, 1, 1.5), kineto.ALL_GATHER: (0, 0, 1, 3)}
    assert [row.name for row in found.unmatched] == [kineto.ALL_GATHER, "new", "old"]  # the dearest first
    assert found.matched_fraction == pytest.approx(0.8)
    assert found.valid
    unmatched = {
        pair.kernel_family: (pair.calls, pair.time_ms, pair.alone_ms)
        for pair in found.pairs
        if pair.concurrent_with == UNMATCHED
    }
    assert unmatched == {
        "other": (2, 2, pytest.approx(1.5)),
        "all_gather": (0, 0, pytest.approx(3)),
    }


def test_all_compute_time_is_matched_or_named(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        kineto.training(layers=5, seed=1, slowdown=0.3, operators=0),
        kineto.training(layers=4, seed=1, overlapped=False, operators=0),
    )
    matched = sum(kernel.overlapped_ms for kernel in found.kernels if not kernel.communication)
    alone = sum(row.overlapped_ms for row in found.unmatched if row.name != kineto.ALL_REDUCE) / found.steps[0]
    assert matched + alone == pytest.approx(found.figures["compute_ms"])


# -- what speaks against a comparison


def test_a_sequential_file_in_which_kernels_overlap_makes_the_comparison_invalid(tmp_path: Path) -> None:
    events = [*kineto.training(slowdown=0.3, operators=0)]
    found = compared(tmp_path, events, events)
    assert not found.valid
    assert found.figures["residual_overlap"] == pytest.approx(found.figures["overlap_ratio"])
    assert said(found, "the sequential file is not sequential")


@pytest.mark.parametrize(("hidden", "valid"), [(1, True), (9, False)])
def test_short_communication_that_is_hidden_in_the_sequential_file_makes_the_comparison_invalid(
    tmp_path: Path, hidden: float, valid: bool
) -> None:
    # 10 us of communication beside 1000 us of compute: of the compute, 1 % at most are covered.
    sequential = [gemm(0, 1000), all_reduce(1000 - hidden, 1010 - hidden)]
    found = compared(tmp_path, [gemm(0, 1000), all_reduce(900, 910)], sequential)
    assert found.figures["residual_overlap"] < 0.02
    assert found.figures["residual_comm_overlap"] == pytest.approx(hidden / 10)
    assert found.valid == valid
    assert said(found, "of its communication runs during compute") != valid


@pytest.mark.parametrize(("covered", "valid"), [(1, True), (3, False)])
def test_a_little_overlap_in_the_sequential_file_is_borne(tmp_path: Path, covered: float, valid: bool) -> None:
    sequential = [gemm(0, 100), all_reduce(100 - covered, 110)]
    assert compared(tmp_path, [gemm(0, 100), all_reduce(0, 90)], sequential).valid == valid


def test_files_of_which_little_matches_are_not_taken_for_one_job(tmp_path: Path) -> None:
    found = compared(tmp_path, [gemm(0, 1), gemm(1, 9, name="new")], [gemm(0, 1), gemm(1, 9, name="old")])
    assert not found.valid
    assert said(found, "only 11% of", "do not look like traces of one job")


def test_one_file_given_twice_is_said(tmp_path: Path) -> None:
    trace = read_trace(kineto.write(tmp_path / "a.json", [gemm(0, 1), all_reduce(2, 3)]))
    assert said(compare(trace, trace), "the same file was given twice")


def test_files_without_steps_are_one_step_each(tmp_path: Path) -> None:
    found = compared(tmp_path, [gemm(10, 12), all_reduce(11, 14)], [gemm(10, 11), all_reduce(11, 13)])
    assert found.steps == (1, 1)
    assert found.figures["e2e_overlapped_ms"] == 4  # from the first kernel to the last
    assert found.figures["e2e_sequential_ms"] == 3
    assert found.figures["e2e_ideal_ms"] == 3
    assert found.figures["e2e_sequential_model_ms"] == 3 + 1
    assert found.problems == ()


def test_a_file_without_steps_against_one_with_steps_is_compared_with_a_warning(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [kineto.step(1, 0, 5 * MS), kineto.launch(10, 1), kineto.launch(20, 2), gemm(1, 2, 1), all_reduce(1, 2, 2)],
        [gemm(1, 2, 1), all_reduce(3, 4, 2)],
    )
    assert said(found, "only one of the files has ProfilerStep ranges")
    assert found.figures["e2e_overlapped_ms"] == 5


def test_kernels_outside_all_steps_count_in_no_mean_and_are_not_unmatched(tmp_path: Path) -> None:
    within = [kineto.step(1, 0, 5 * MS), kineto.launch(10, 1), kineto.launch(20, 2)]
    found = compared(
        tmp_path,
        [
            *within,
            gemm(0, 1, 77, name="before"),  # without a launch
            gemm(1, 2, 1),
            all_reduce(1, 2, 2),
            kineto.launch(5 * MS + 10, 78),
            gemm(6, 9, 78, name="after"),
        ],
        [*within, gemm(1, 2, 1), all_reduce(3, 4, 2)],
    )
    assert found.figures["compute_ms"] == 1
    assert (found.steps, found.unmatched, found.valid) == ((1, 1), (), True)


def test_kernels_of_several_devices_are_refused(tmp_path: Path) -> None:
    events = [gemm(0, 1), gemm(0, 1, device=1)]
    with pytest.raises(ValueError, match=r"overlapped: .*overlapped\.json holds kernels of 2 devices"):
        compared(tmp_path, events, [gemm(0, 1)])
    with pytest.raises(ValueError, match=r"sequential: .*sequential\.json holds kernels of 2 devices"):
        compared(tmp_path, [gemm(0, 1)], events)


def test_files_without_compute_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sequential: .* holds no compute kernels"):
        compared(tmp_path, [gemm(0, 1)], [all_reduce(0, 1)])


def test_without_communication_there_is_a_slowdown_and_no_overlap_ratio(tmp_path: Path) -> None:
    found = compared(tmp_path, [gemm(0, 3)], [gemm(0, 2)])
    assert found.figures["compute_slowdown"] == pytest.approx(0.5)
    for name in ("overlap_ratio", "hidden_comm_fraction", "comm_slowdown", "residual_overlap"):
        assert name not in found.figures
    json.dumps(found.figures, allow_nan=False)


def test_kernels_of_no_length_give_figures_that_are_undefined_and_never_infinite(tmp_path: Path) -> None:
    found = compared(tmp_path, [gemm(0, 3), all_reduce(1, 2)], [gemm(0, 0), all_reduce(1, 1)])
    assert "compute_slowdown" not in found.figures
    json.dumps(found.figures, allow_nan=False)


# -- traces of CPU jobs


def on_cpu(slow: float, comm: tuple[int, int]) -> list[kineto.Event]:
    """A step of two operators, one within the other, and an all-reduce of Gloo's."""
    us = 1_000
    outer = round(100 * slow)
    return [
        kineto.step(1, 0, 600 * us),
        kineto.host_range("aten::linear", 0, outer * us, cat="cpu_op"),
        kineto.host_range("aten::mm", 10 * us, (outer - 10) * us, cat="cpu_op"),
        kineto.host_range("aten::add", 400 * us, 420 * us, cat="cpu_op"),
        kineto.host_range("gloo:all_reduce", comm[0] * us, comm[1] * us, thread=9),
    ]


def test_traces_of_a_cpu_job_are_compared_by_self_time(tmp_path: Path) -> None:
    found = compared(tmp_path, on_cpu(1.5, (0, 150)), on_cpu(1.0, (200, 300)))
    assert found.valid
    assert found.figures["compute_ms"] == pytest.approx(0.170)
    assert found.figures["compute_isolated_ms"] == pytest.approx(0.120)
    assert found.figures["overlap_ratio"] == pytest.approx(150 / 170)
    assert found.figures["comm_slowdown"] == pytest.approx(0.5)
    assert found.figures["e2e_overlapped_ms"] == pytest.approx(0.6)
    rows = {kernel.name: (kernel.overlapped_ms, kernel.sequential_ms) for kernel in found.kernels}
    assert rows["aten::linear"] == pytest.approx((0.020, 0.020))
    assert rows["aten::mm"] == pytest.approx((0.130, 0.080))
    assert rows["aten::add"] == pytest.approx((0.020, 0.020))
    lost = sum(pair.lost_ms for pair in found.pairs if not pair.communication and pair.lost_ms is not None)
    assert lost == pytest.approx(0.050)
    assert said(found, "overlapped: no kernels of a device")


def test_a_cpu_job_s_sequential_file_may_overlap_a_little_more(tmp_path: Path) -> None:
    # Gloo's ranges end late; on a device 3 % would be too much.
    sequential = on_cpu(1.0, (96, 200))
    assert compared(tmp_path, on_cpu(1.5, (0, 150)), sequential).valid
    assert not compared(tmp_path, on_cpu(1.5, (0, 150)), on_cpu(1.0, (92, 200))).valid


def test_whole_files_of_different_numbers_of_steps_are_no_comparison(tmp_path: Path) -> None:
    step = [gemm(0, 2), gemm(2, 3, name="other"), all_reduce(3, 4)]
    later = [gemm(10, 12), gemm(12, 13, name="other"), all_reduce(13, 14)]
    found = compared(tmp_path, [*step, *later], step)
    assert not found.valid
    assert any("different numbers of steps" in problem for problem in found.problems)


def test_a_file_with_steps_and_one_without_are_no_comparison(tmp_path: Path) -> None:
    events = [gemm(0, 2), all_reduce(3, 4)]
    found = compared(tmp_path, [kineto.step(1, 0, 5 * MS), *events], events)
    assert not found.valid
    assert any("only one of the files has ProfilerStep ranges" in problem for problem in found.problems)


def test_each_file_s_picture_is_of_its_own_mode(tmp_path: Path) -> None:
    found = compared(tmp_path, [gemm(0, 2), all_reduce(1, 3)], [gemm(0, 2), all_reduce(2, 3)])
    assert found.overlapped.picture is not None
    assert found.sequential.picture is not None
    assert (found.overlapped.picture.mode.value, found.sequential.picture.mode.value) == ("overlapped", "sequential")
