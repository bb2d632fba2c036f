"""Which rank makes the others wait: by time lost, and nobody where several come last together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap_callbacks.report.views.trace_verdict import verdict
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests import kineto

US = 1_000


def job(folder: Path, times_ns: Sequence[Sequence[int]], *, whole_us: bool = False) -> Analysis:
    """Ranks whose collectives end together and take these times; one sequence for each collective."""
    traces = []
    for rank in range(len(times_ns[0])):
        events = []
        for number, of_ranks in enumerate(times_ns):
            end = (number + 1) * 40_000 * US
            args = {**kineto.METADATA, "Process Group Ranks": "[0, 1, 2]", "Group size": len(of_ranks), "Seq": number}
            events.append(kineto.kernel(kineto.ALL_REDUCE, end - of_ranks[rank], end, number + 1, stream=20, **args))
        head = kineto.job(rank, len(times_ns[0]))
        traces.append(read_trace(kineto.write(folder / f"rank{rank}.json", events, whole_us=whole_us, **head)))
    return analyze(traces)


def charged(found: Analysis) -> list[tuple[int, float]]:
    (row,) = found.skew
    return [(rank.last, rank.caused_ms) for rank in row.ranks]


@pytest.mark.parametrize("whole_us", [False, True])
def test_the_rank_for_which_others_wait_longest_is_named_not_the_one_that_is_last_most_often(
    tmp_path: Path, whole_us: bool
) -> None:
    found = job(tmp_path, [(5000 * US, 5001 * US)] * 4 + [(25_000 * US, 5000 * US)], whole_us=whole_us)
    assert verdict(found)[0].endswith("rank 1 makes the others wait 20.0 of 20.0 ms.")
    # A microsecond is what files of whole microseconds cannot tell.
    assert charged(found) == [(0, 0.0), (1, 20.0)]
    assert found.skew[0].skew_ms == pytest.approx(20.004 / 2)


def test_ranks_that_come_last_together_are_not_charged(tmp_path: Path) -> None:
    found = job(tmp_path, [(5000 * US, 5000 * US, 25_000 * US)] * 3)
    assert charged(found) == [(0, 0.0)] * 3
    assert verdict(found)[0].endswith("several come last together, so no rank is named.")


def test_equal_kernels_in_files_of_nanoseconds_are_charged_to_nobody(tmp_path: Path) -> None:
    found = job(tmp_path, [(5_000_123, 5_000_123, 9_000_001), (5_000_124, 5_000_123, 5_000_123), (7, 6, 5)])
    assert [last for last, _ in charged(found)] == [0, 0, 1]


def test_of_ranks_that_are_late_in_turn_none_is_made_the_cause(tmp_path: Path) -> None:
    found = job(tmp_path, [(5000 * US, 15_000 * US), (15_000 * US, 5000 * US), (5000 * US, 15_000 * US)] * 2)
    assert charged(found) == [(4, 40.0), (2, 20.0)]
    assert verdict(found)[0].endswith("rank 0 makes the others wait 40.0 of 60.0 ms.")
    found = job(tmp_path, [(5000 * US, 15_000 * US), (15_000 * US, 5000 * US)] * 2)
    assert "several ranks come last in turn" in verdict(found)[0]


def test_of_three_ranks_the_waiting_of_both_others_is_charged(tmp_path: Path) -> None:
    found = job(tmp_path, [(5000 * US, 15_000 * US, 25_000 * US), (9000 * US, 8000 * US, 9000 * US)])
    assert charged(found) == [(1, 30.0), (1, 2.0), (0, 0.0)]
    assert verdict(found)[0].endswith("rank 0 makes the others wait 30.0 of 32.0 ms.")


@pytest.mark.parametrize("numbered", [True, False])
def test_nobody_is_late_by_a_kernel_that_runs_longer_than_it_can(tmp_path: Path, numbered: bool) -> None:
    traces = []
    for rank in range(3):
        events = []
        for step in range(3):
            events.append(kineto.step(step, step * 100_000 * US, (step + 1) * 100_000 * US - US))
            for place in range(3):
                # Rank 0 comes a millisecond late; one kernel of rank 1 counts up to the next, 30 ms after its start.
                start = (step * 100_000 + 10_000 + 30_000 * place + 1000 * (rank == 0)) * US
                end = start + 4000 * US + 1000 * US * (rank > 0)
                end = 10**12 if (rank, step, place) == (1, 1, 1) else end
                number = 1 + 3 * step + place
                args = {**kineto.METADATA, "Process Group Ranks": "[0, 1, 2]", "Group size": 3}
                args |= {"Seq": number} if numbered else {}
                events += [kineto.launch(start - 10 * US, number)]
                events += [kineto.kernel(kineto.ALL_REDUCE, start, end, number, stream=20, **args)]
        traces.append(read_trace(kineto.write(tmp_path / f"rank{rank}.json", events, **kineto.job(rank, 3))))
    found = analyze(traces)
    assert charged(found) == [(8, 16.0), (0, 0.0), (0, 0.0)]
    assert (found.skew[0].count, found.problems) == (8, ())
    assert "ends 999" in found.traces[1].warnings[0]


def test_ranks_that_arrive_together_are_said_to(tmp_path: Path) -> None:
    found = job(tmp_path, [(5000 * US, 5001 * US, 5002 * US)] * 5, whole_us=True)
    assert verdict(found)[0].endswith("they arrive together.")


@pytest.mark.parametrize(
    ("names", "late"), [(("b_rank1", "a_rank0"), 1), (("rank10", "rank2"), 10), (("one", "two"), 0)]
)
def test_a_rank_that_the_file_does_not_tell_is_that_of_its_name(
    tmp_path: Path, names: tuple[str, str], late: int
) -> None:
    traces = []
    for name, time in zip(names, (5000 * US, 25_000 * US), strict=True):  # the first is late
        event = kineto.kernel(kineto.ALL_REDUCE, 0, time, 1, stream=20, **{**kineto.METADATA, "Seq": 1})
        traces.append(read_trace(kineto.write(tmp_path / f"{name}.json", [event])))
    found = analyze(traces)
    assert verdict(found)[0].endswith(f"rank {late} makes the others wait 20.0 of 20.0 ms.")
    by = "by position" if "one" in names else "by their names"
    assert f"2 files do not say which rank they are: they are numbered {by} [OC767]" in found.problems
