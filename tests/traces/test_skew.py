from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.traces import Trace, analyze, read_trace
from overlap_callbacks.traces.figures import Analysis, CollectiveSkew
from tests import kineto

MS = 1_000_000


def collective(
    start: float, time: float, correlation: int = 0, name: str = kineto.ALL_REDUCE, **args: Any
) -> kineto.Event:
    return kineto.kernel(name, round(start * MS), round((start + time) * MS), correlation, stream=20, **args)


def numbered(sequence: int, *, name: str = "allreduce", group: str = "0", ranks: str = "[0, 1]") -> dict[str, Any]:
    return {
        "Collective name": name, "In msg nelems": 10, "Out msg nelems": 10, "Group size": 2, "dtype": "Float",
        "Process Group Name": group, "Process Group Ranks": ranks, "Seq": sequence,
    }  # fmt: skip


def unnumbered(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in numbered(0, **options).items() if key != "Seq"}


class Job:
    """The files of a job's ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.traces: list[Trace] = []

    def rank(self, rank: int | None, events: list[kineto.Event], world_size: int = 4, **head: Any) -> Job:
        fields = {} if rank is None else kineto.job(rank, world_size)
        path = kineto.write(self.folder / f"{len(self.traces)}.json", events, **fields, **head)
        self.traces.append(read_trace(path))
        return self

    def analyze(self) -> Analysis:
        return analyze(self.traces)

    def only(self) -> CollectiveSkew:
        (row,) = self.analyze().skew
        return row


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def by_rank(row: CollectiveSkew) -> dict[int, tuple[float, float, int]]:
    return {rank.rank: (rank.time_ms, rank.waiting_ms, rank.last) for rank in row.ranks}


def test_of_two_ranks_the_one_that_comes_first_waits_for_the_other(job: Job) -> None:
    job.rank(0, [collective(0, 5, **numbered(1)), collective(10, 2, **numbered(2)), collective(20, 4, **numbered(3))])
    job.rank(1, [collective(3, 2, **numbered(1)), collective(10, 7, **numbered(2)), collective(20, 3, **numbered(3))])
    row = job.only()
    assert (row.collective, row.group, row.count) == ("all_reduce", "0", 3)
    assert row.transfer_ms == 2 + 2 + 3
    assert by_rank(row) == {0: (11, 3 + 1, 1), 1: (12, 5, 2)}
    assert row.skew_ms == pytest.approx((4 + 5) / 2)
    assert job.analyze().problems == ()


def test_of_three_ranks_all_but_the_last_wait(job: Job) -> None:
    for rank, times in enumerate(([9, 1, 4], [6, 3, 5], [2, 8, 6])):
        job.rank(rank, [collective(10 * i, time, **numbered(i)) for i, time in enumerate(times)])
    row = job.only()
    assert row.transfer_ms == 2 + 1 + 4
    assert by_rank(row) == {0: (14, 7, 2), 1: (14, 4 + 2 + 1, 0), 2: (16, 7 + 2, 1)}
    assert row.skew_ms == pytest.approx((7 + 7 + 9) / 3)


def test_clocks_of_the_ranks_need_not_agree(job: Job) -> None:
    day = 86_400_000
    job.rank(0, [collective(0, 5, **numbered(1))]).rank(1, [collective(day, 2, **numbered(1))])
    assert by_rank(job.only()) == {0: (5, 3, 0), 1: (2, 0, 1)}


def test_collectives_are_matched_by_their_number_wherever_the_files_begin(job: Job) -> None:
    job.rank(0, [collective(i, 0.1 * i + 0.1, **numbered(i)) for i in (1, 2, 3, 4)])
    job.rank(1, [collective(i, 0.05, **numbered(i)) for i in (3, 4, 5)])
    row = job.only()
    assert row.count == 2
    assert row.transfer_ms == pytest.approx(0.1)
    assert by_rank(row)[0][1] == pytest.approx(0.35 + 0.45)
    assert job.analyze().problems == ("3 of 7 collectives have no partner in another file, and are left out [OC762]",)


def in_steps(times: dict[int, list[float]], **args: Any) -> list[kineto.Event]:
    """Steps, each with collectives of these lengths."""
    events = []
    for number, lengths in times.items():
        begin = number * 100
        events.append(kineto.step(number, begin * MS, (begin + 90) * MS))
        for i, time in enumerate(lengths):
            correlation = begin + i + 1
            events += [
                kineto.launch((begin + i) * MS, correlation),
                collective(begin + 10 * i, time, correlation, **args),
            ]
    return events


@pytest.mark.parametrize("args", [{}, unnumbered()], ids=["no metadata", "no numbers"])
def test_without_numbers_the_order_within_the_step_matches_files_that_begin_at_different_steps(
    job: Job, args: dict[str, Any]
) -> None:
    job.rank(0, in_steps({4: [1, 1], 5: [4, 6], 6: [3, 3]}, **args))
    job.rank(1, in_steps({5: [1, 8], 6: [3, 2]}, **args))
    row = job.only()
    assert row.count == 4
    assert row.transfer_ms == 1 + 6 + 3 + 2
    assert {rank: found[:2] for rank, found in by_rank(row).items()} == {0: (16, 3 + 1), 1: (14, 2)}
    assert "2 of 10 collectives have no partner in another file, and are left out [OC762]" in job.analyze().problems


def test_kernels_launched_before_a_file_began_do_not_shift_the_order_of_its_steps(job: Job) -> None:
    job.rank(0, [collective(0, 9, 77), *in_steps({5: [4, 6]})])
    job.rank(1, in_steps({5: [1, 8]}))
    row = job.only()
    assert (row.count, row.transfer_ms) == (2, 1 + 6)


def test_kinds_are_counted_apart(job: Job) -> None:
    gather = numbered(2, name="_allgather_base")
    job.rank(0, [collective(0, 5, **numbered(1)), collective(9, 2, name=kineto.ALL_GATHER, **gather)])
    job.rank(1, [collective(0, 1, **numbered(1)), collective(9, 1, name=kineto.ALL_GATHER, **gather)])
    rows = job.analyze().skew
    assert [(row.collective, row.count, row.skew_ms) for row in rows] == [
        ("all_reduce", 1, 2.0),
        ("all_gather", 1, 0.5),
    ]


def test_groups_of_different_ranks_are_not_mixed_although_they_have_one_name(job: Job) -> None:
    first, second = ({**numbered(1, group="tp", ranks=ranks)} for ranks in ("[0, 1]", "[2, 3]"))
    job.rank(0, [collective(0, 5, **first)]).rank(1, [collective(0, 2, **first)])
    job.rank(2, [collective(0, 1, **second)]).rank(3, [collective(0, 9, **second)])
    rows = job.analyze().skew
    assert [(tuple(rank.rank for rank in row.ranks), row.transfer_ms, row.skew_ms) for row in rows] == [
        ((2, 3), 1, 4.0),
        ((0, 1), 2, 1.5),
    ]


def test_two_groups_of_the_same_ranks_count_their_own_numbers(job: Job) -> None:
    for rank, (a, b) in enumerate([(5, 1), (2, 7)]):
        job.rank(rank, [collective(0, a, **numbered(1, group="a")), collective(9, b, **numbered(1, group="b"))])
    assert [(row.group, row.transfer_ms, row.skew_ms) for row in job.analyze().skew] == [("b", 1, 3.0), ("a", 2, 1.5)]


def test_sends_and_receives_are_left_out_since_their_sides_are_different_kernels(job: Job) -> None:
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    for _ in range(2):
        job.rank(len(job.traces), [collective(0, 5, name=name), collective(10, 1, **numbered(1))])
    found = job.analyze()
    assert [row.collective for row in found.skew] == ["all_reduce"]
    assert found.problems == ()


def test_files_that_share_no_collective_are_said_not_to_be_of_one_job(job: Job) -> None:
    job.rank(0, [collective(0, 5, **numbered(1))]).rank(1, [collective(0, 5, **numbered(2))])
    found = job.analyze()
    assert found.skew == ()
    assert any("share no collectives" in problem for problem in found.problems)


def test_files_without_communication_have_nothing_to_compare(job: Job) -> None:
    for rank in range(2):
        job.rank(rank, [kineto.kernel(kineto.GEMM, 0, MS, 0)])
    assert (job.analyze().skew, job.analyze().problems) == ((), ())


def test_one_file_has_no_skew(job: Job) -> None:
    job.rank(0, [collective(0, 5, **numbered(1))])
    assert (job.analyze().skew, job.analyze().problems) == ((), ())


def test_files_without_a_rank_are_numbered_by_position(job: Job) -> None:
    job.rank(None, [collective(0, 5, **numbered(1))]).rank(None, [collective(0, 2, **numbered(1))])
    assert by_rank(job.only()) == {0: (5, 3, 0), 1: (2, 0, 1)}
    assert any("2 files do not say which rank they are" in problem for problem in job.analyze().problems)


@pytest.mark.parametrize("ranks", [(None, 0), (1, None), (None, None, 1)])
def test_a_file_without_a_rank_is_not_confused_with_one_that_has_it(job: Job, ranks: tuple[int | None, ...]) -> None:
    for time, rank in enumerate(ranks, 2):
        job.rank(rank, [collective(0, time, **numbered(1))])
    found = job.analyze()
    assert any("do not say which rank they are" in problem for problem in found.problems)
    (row,) = found.skew
    assert (row.count, len(row.ranks), row.transfer_ms) == (1, len(ranks), 2)


def test_ranks_on_different_devices_are_compared_with_a_warning(job: Job) -> None:
    for rank, device in enumerate(("A100", "H100")):
        job.rank(rank, [collective(0, 5, **numbered(1))], deviceProperties=[{"id": 0, "name": device}])
    found = job.analyze()
    assert len(found.skew) == 1
    assert any("A100, H100" in problem for problem in found.problems)


def test_kernels_of_one_collective_number_are_one_collective(job: Job) -> None:
    # As where a collective of several tensors is launched as several kernels: all of them have its number.
    for rank, times in enumerate([(5, 1), (2, 1)]):
        job.rank(rank, [collective(10 * i, time, **numbered(1)) for i, time in enumerate(times)])
    row = job.only()
    assert row.transfer_ms == 3
    assert by_rank(row)[0][1] == 3
    assert job.analyze().problems == ()


def test_generated_ranks_wait_for_the_lateness_of_one(job: Job) -> None:
    for rank in range(2):
        job.rank(rank, [*kineto.training(steps=2, layers=4, operators=0)])
    row = job.only()
    assert (row.count, row.skew_ms) == (8, 0)
    assert row.transfer_ms == pytest.approx(8 * 0.045)


def test_where_not_all_ranks_of_a_group_are_given_the_figures_are_said_to_be_bounds(job: Job) -> None:
    for rank in range(2):
        job.rank(rank, [collective(0, 2 + rank, **{**numbered(1), "Group size": 4})])
    assert any("not all ranks" in problem for problem in job.analyze().problems)


def test_devices_of_one_file_take_part_each_for_itself(job: Job) -> None:
    for rank in range(2):
        events = [collective(0, 5 + device + rank, device=device, **numbered(1)) for device in range(2)]
        job.rank(rank, events)
    row = job.only()
    assert (row.count, row.transfer_ms) == (1, 5)
    assert [(r.rank, r.device, r.waiting_ms) for r in row.ranks] == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)]
