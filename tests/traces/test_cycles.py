"""Files of one job's profiler in several cycles: ranks are compared within each, and cycles side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap_callbacks.report.views.traces import trace_document
from overlap_callbacks.traces import analyze_files, find_traces
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.traces.events import MS, collective, gemm, overlap, said


def write(path: Path, rank: int | None, comes: float, cycle: int, *, world_size: int = 2) -> Path:
    """One step, in which a rank comes at this time, in milliseconds, to an all-reduce that ends at 30 ms."""
    events = [
        kineto.step(10 * cycle, 0, 31 * MS),
        kineto.launch(1000, 1),
        gemm(1, comes, 1),
        kineto.launch(2000, 2),
        collective(comes, 30, 2, **{**kineto.METADATA, "Seq": 5}),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    return kineto.write(path, events, **({} if rank is None else kineto.job(rank, world_size)))


# When ranks 0 and 1 come, in each cycle.
COMES = [(5, 10), (5, 20), (9, 8)]


def check(found: Analysis, cycles: Sequence[str]) -> None:
    assert [(trace.cycle, trace.rank) for trace in found.traces] == [
        (cycle, rank) for cycle in cycles for rank in (0, 1)
    ]
    assert [(row.cycle, [rank.caused_ms for rank in row.ranks]) for row in found.skew] == [
        (cycles[0], [0, 5]),
        (cycles[1], [0, 15]),
        (cycles[2], [1, 0]),
    ]
    assert found.one_job
    assert [row.matched for row in found.sizes] == [3]
    assert found.problems == ()


LAYOUTS = {
    "iteration_{10}/rank{rank}_trace.json": ("iteration_10", "iteration_20", "iteration_100"),
    "rank{rank}/step-{10}.json": ("step-10", "step-20", "step-100"),
    "traces/rank{rank}_iter{10}_trace.json": ("iter10", "iter20", "iter100"),
    "run/{10}/rank{rank}.json": ("cycle 10", "cycle 20", "cycle 100"),
    "2026/rank{rank}/00{10}.json": ("cycle 10", "cycle 20", "cycle 100"),
    "{rank}/{10}.pt.trace.json": ("cycle 10", "cycle 20", "cycle 100"),
    "{10}/{rank}/trace.json": ("cycle 10", "cycle 20", "cycle 100"),
    "worker{rank}.{stamp}.pt.trace.json": ("cycle 1", "cycle 2", "cycle 3"),
    "host{rank}_4{rank}/worker{rank}.{stamp}000000.pt.trace.json": ("cycle 1", "cycle 2", "cycle 3"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_are_compared_within_each_cycle(tmp_path: Path, layout: str) -> None:
    for cycle, comes in enumerate(COMES):
        for rank in (1, 0):
            name = layout.replace("{10}", str((10, 20, 100)[cycle])).replace("{rank}", str(rank))
            write(
                tmp_path / name.replace("{stamp}", str(1_698_765_432_101 + 60_000 * cycle + rank)),
                rank,
                comes[rank],
                cycle,
            )
    check(analyze_files(find_traces([tmp_path])), LAYOUTS[layout])


@pytest.mark.parametrize(("folder", "name"), [("iteration_{}", "iteration_{}"), ("{}0", "cycle {}0")])
def test_files_that_do_not_tell_their_rank_are_of_cycles_too(tmp_path: Path, folder: str, name: str) -> None:
    for cycle in (1, 2):
        for rank in range(2):
            write(tmp_path / folder.format(cycle) / f"rank{rank}_trace.json", None, COMES[cycle - 1][rank], cycle)
    found = analyze_files(find_traces([tmp_path]))
    assert [trace.cycle for trace in found.traces] == [name.format(1)] * 2 + [name.format(2)] * 2
    assert [[rank.caused_ms for rank in row.ranks] for row in found.skew] == [[0, 5], [0, 15]]


def test_bare_numbers_that_no_two_ranks_share_are_of_no_cycles(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / f"rank{number % 2}" / f"{1_698_765_432_101 + number}.json", number % 2, 5, number)
    found = analyze_files(find_traces([tmp_path]))
    assert said(found.problems, "rank 0 is given twice")
    assert {trace.cycle for trace in found.traces} == {""}


@pytest.mark.parametrize("steps", [(1, 1), (2, 1)])
def test_bare_numbers_of_files_whose_steps_do_not_rise_with_them_are_those_of_jobs(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    for number, step in zip((123456, 123457), steps, strict=True):
        for rank in range(2):
            write(tmp_path / str(number) / f"rank{rank}.json", rank, 5, step)
    found = analyze_files(find_traces([tmp_path]))
    assert said(found.problems, "rank 0 is given twice")
    assert {trace.cycle for trace in found.traces} == {""}


@pytest.mark.parametrize("layout", ["{0}/trace.json", "{0}.json", "run/{0}/10.json", "10/{0}/20/trace.json"])
@pytest.mark.parametrize("rank", [0, None])
def test_a_bare_number_may_be_that_of_a_rank(tmp_path: Path, layout: str, rank: int | None) -> None:
    for number in range(3):
        write(tmp_path / layout.replace("{0}", str(number)), None if rank is None else number, 5, 1, world_size=3)
    found = analyze_files(find_traces([tmp_path]))
    assert {trace.cycle for trace in found.traces} == {""}
    assert [len(row.ranks) for row in found.skew] == [3]


def test_a_worker_that_missed_a_cycle_is_missing_in_it_alone(tmp_path: Path) -> None:
    for cycle, rank in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1)):
        stamp = 1_698_765_432_101 + 60_000 * cycle + rank
        write(tmp_path / f"worker{rank}.{stamp}.pt.trace.json", rank, COMES[cycle][rank], cycle)
    found = analyze_files(find_traces([tmp_path]))
    assert [(trace.cycle[-1], trace.rank) for trace in found.traces] == [
        ("1", 0), ("1", 1), ("2", 0), ("3", 0), ("3", 1),
    ]  # fmt: skip
    assert [row.cycle for row in found.skew] == ["cycle 1", "cycle 3"]


def test_a_job_that_began_again_is_not_a_cycle(tmp_path: Path) -> None:
    for number, process in enumerate((17, 18)):
        write(tmp_path / f"host_{process}.{1_698_765_432_101 + number}.pt.trace.json", 0, 5, number)
    assert said(analyze_files(find_traces([tmp_path])).problems, "rank 0 is given twice")


@pytest.mark.parametrize("names", [("a/rank0.json", "b/rank0.json"), ("iteration_1/a.json", "iteration_1/b.json")])
def test_files_of_one_rank_that_tell_no_cycle_are_not_compared(tmp_path: Path, names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        write(tmp_path / name, 0, 5, number)
    found = analyze_files(find_traces([tmp_path]))
    assert said(found.problems, "rank 0 is given twice")
    assert {trace.cycle for trace in found.traces} == {""}


def test_folders_of_jobs_of_different_sizes_are_no_cycles(tmp_path: Path) -> None:
    for number in (1, 2):
        for rank in range(2):
            write(tmp_path / f"step_{number}" / f"rank{rank}.json", rank, 5, number, world_size=2 * number)
    assert said(analyze_files(find_traces([tmp_path])).problems, "different jobs")


def test_the_command_shows_cycles_side_by_side(tmp_path: Path) -> None:
    for cycle in (10, 20):
        for rank in range(2):
            write(tmp_path / f"iteration_{cycle}" / f"rank{rank}_trace.json", rank, COMES[cycle // 10 - 1][rank], cycle)
    text = overlap("analyze", str(tmp_path)).output
    assert "rank 1 makes the others wait 20.0 of 20.0 ms" in text
    table = text[text.index("Cycles side by side") :]
    rows = [line.split() for line in table.splitlines() if line.strip().startswith("iteration_")]
    assert [row[:2] for row in rows[:2]] == [["iteration_10", "2"], ["iteration_20", "2"]]
    assert "1: 5.000" in table
    assert "1: 15.000" in table
    heading = trace_document(analyze_files(find_traces([tmp_path]))).heading
    assert heading == "4 devices in 2 cycles of one job compared"
    found = json.loads(overlap("analyze", str(tmp_path), "--json").output)
    assert [trace["cycle"] for trace in found["traces"]] == ["iteration_10"] * 2 + ["iteration_20"] * 2
