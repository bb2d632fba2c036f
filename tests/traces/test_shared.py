"""Figures of real traces.

The table is that of the traces' README. It was derived from the decompressed files with ``json.loads``, times as
decimals turned into whole nanoseconds, and a walk over the sorted end points of all kernels (``cat`` ``kernel``;
communication where the name begins with ``nccl``) that adds up the time in which compute, communication or both ran.
The walk is repeated here (``reference.py``), so the printed table, the walk and the library hold each other.
"""

from __future__ import annotations

import functools

import pytest

from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import StepFigures, TraceFigures
from tests.traces import reference

FILES = ["ddp_a100_x2", "ddp_v100_x2", "job128_rank0", "job128_rank1", "mi250_toy"]

# events, kernels, communication kernels, streams with kernels
COUNTS = {
    "ddp_a100_x2": (40_573, 2_700, 21, 2),
    "ddp_v100_x2": (216_092, 19_370, 2_020, 2),
    "job128_rank0": (4_855, 1_154, 10, 4),
    "job128_rank1": (4_720, 1_104, 10, 4),
}

# compute union, communication union, overlapped, exposed: ms; overlapped of compute and of communication: %; compute
# sum: ms
TABLE = {
    "ddp_a100_x2": ("115.656", "46.876", "7.317", "39.559", "6.33", "15.61", "115.656"),
    "ddp_v100_x2": ("620.516", "357.343", "0.000", "357.343", "0.00", "0.00", "620.516"),
    "job128_rank0": ("210.320", "396.199", "59.216", "336.983", "28.16", "14.95", "210.320"),
    "job128_rank1": ("271.973", "379.053", "75.530", "303.523", "27.77", "19.93", "271.973"),
}


@functools.cache
def figures(name: str) -> TraceFigures:
    (found,) = analyze([read_trace(reference.shared_trace(f"{name}.json.gz"))]).traces
    return found


@functools.cache
def by_walk(name: str) -> reference.Reference:
    return reference.read(reference.shared_trace(f"{name}.json.gz"))


def in_ns(found: StepFigures) -> reference.Times:
    def ns(milliseconds: float) -> int:
        nanoseconds = round(milliseconds * 1e6)
        assert milliseconds == pytest.approx(nanoseconds / 1e6, rel=1e-14)
        return nanoseconds

    return reference.Times(
        compute_sum=ns(found.compute_ms),
        compute=ns(found.compute_busy_ms),
        comm_sum=ns(found.comm_kernels_ms),
        comm=ns(found.comm_ms),
        overlapped=ns(found.hidden_comm_ms),
        covered=ns(found.covered_compute_ms),
    )


@pytest.mark.parametrize("name", TABLE)
def test_figures_equal_the_published_table_to_the_last_printed_digit(name: str) -> None:
    total = figures(name).total
    assert total.overlap_ratio is not None
    assert total.overlap_ratio_busy is not None
    assert total.hidden_comm_fraction is not None
    printed = (
        f"{total.compute_busy_ms:.3f}",
        f"{total.comm_ms:.3f}",
        f"{total.hidden_comm_ms:.3f}",
        f"{total.exposed_comm_ms:.3f}",
        f"{100 * total.overlap_ratio_busy:.2f}",
        f"{100 * total.hidden_comm_fraction:.2f}",
        f"{total.compute_ms:.3f}",
    )
    assert printed == TABLE[name]
    # No two compute kernels of these files run at once, so equation 2 of the sums is that of the unions.
    assert f"{100 * total.overlap_ratio:.2f}" == TABLE[name][4]


@pytest.mark.parametrize("name", COUNTS)
def test_kernels_and_collectives_are_as_many_as_published(name: str) -> None:
    found, walk = figures(name), by_walk(name)
    _, kernels, collectives, _ = COUNTS[name]
    assert found.total.kernels == kernels
    assert sum(row.count for row in found.collectives) == collectives
    streams = {kernel.stream for kernel in walk.kernels}
    communicating = sum(kernel.communicates for kernel in walk.kernels)
    assert (len(walk.events), len(walk.kernels), communicating, len(streams)) == COUNTS[name]


@pytest.mark.parametrize("name", FILES)
def test_figures_of_the_whole_file_equal_those_of_a_walk_over_all_end_points(name: str) -> None:
    walk = by_walk(name)
    expected = reference.times(walk.kernels, walk.kernels)
    assert in_ns(figures(name).total) == expected
    assert expected.compute > 0
    assert figures(name).total.kernels == len(walk.kernels)


@pytest.mark.parametrize("name", FILES)
def test_no_real_file_has_uneven_splits_or_repeats_its_reductions(name: str) -> None:
    found = analyze([read_trace(reference.shared_trace(f"{name}.json.gz"))])
    assert (found.splits, [trace.reductions for trace in found.traces]) == (None, [None])


@pytest.mark.parametrize("name", FILES)
def test_figures_of_each_step_equal_those_of_a_walk_over_the_kernels_that_it_launched(name: str) -> None:
    walk, found = by_walk(name), figures(name)
    expected = {
        number: reference.times(walk.of_step(number), walk.kernels)
        for number in sorted(walk.steps, key=lambda number: walk.steps[number])
        if walk.of_step(number)
    }
    assert {step.step: in_ns(step) for step in found.steps} == expected
    assert [step.step for step in found.steps] == list(expected)
    for step in found.steps:
        assert step.step is not None
        begin, end = walk.steps[step.step]
        assert step.wall_ms == pytest.approx((end - begin) / 1e6)
        assert step.kernels == len(walk.of_step(step.step))


def test_the_real_files_have_steps_that_hold_kernels() -> None:
    assert [step.step for step in figures("ddp_a100_x2").steps] == [4, 5, 6]
    assert [step.step for step in figures("job128_rank0").steps] == [551, 552]
    assert len(figures("ddp_v100_x2").steps) == 5


def test_without_communication_every_ratio_is_undefined() -> None:
    total = figures("mi250_toy").total
    assert (total.overlap_ratio, total.overlap_ratio_busy, total.hidden_comm_fraction) == (None, None, None)
    assert total.comm_ms == total.hidden_comm_ms == total.exposed_comm_ms == 0
    assert figures("mi250_toy").collectives == ()
    assert any("no communication" in problem for problem in figures("mi250_toy").problems)


def test_metadata_of_the_a100_file_tells_kinds_bytes_and_the_group() -> None:
    # By hand: elements times the bytes of the dtype over the kernels' arguments, where the kernel has them.
    walk = by_walk("ddp_a100_x2")
    width = {"Float": 4, "Int": 4, "Long": 8, "Byte": 1, "Double": 8, "Half": 2}
    expected: dict[str, list[int]] = {}
    for event in walk.events:
        args = event.get("args", {})
        if event.get("cat") == "kernel" and "Collective name" in args:
            kind = {"allreduce": "all_reduce", "broadcast": "broadcast"}[args["Collective name"]]
            entry = expected.setdefault(kind, [0, 0])
            entry[0] += 1
            entry[1] += args["In msg nelems"] * width[args["dtype"]]
    found = {row.collective: [row.count, row.bytes] for row in figures("ddp_a100_x2").collectives if row.group}
    assert found == expected
    assert {row.group_size for row in figures("ddp_a100_x2").collectives if row.group} == {2}


def test_two_ranks_of_one_job_are_distinguished_and_their_kinds_are_read_from_the_ranges() -> None:
    paths = [reference.shared_trace(f"job128_rank{rank}.json.gz") for rank in (0, 1)]
    found = analyze([read_trace(path) for path in paths])
    assert [(trace.rank, trace.world_size) for trace in found.traces] == [(0, 128), (1, 128)]
    for trace, path in zip(found.traces, paths, strict=True):
        ranges = {event["name"] for event in reference.read(path).events if str(event.get("name")).startswith("nccl:")}
        assert ranges == {"nccl:all_reduce", "nccl:all_to_all", "nccl:_all_gather_base"}
        # All of its kernels are called ncclKernel_SendRecv: only the ranges tell what they are.
        assert "all_to_all" in {row.collective for row in trace.collectives}
