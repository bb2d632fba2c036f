"""Files into which those of several ranks were merged: each rank counts as a file of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.traces import TraceError, analyze, analyze_files, compare_files, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.traces.events import MS, all_reduce, gemm, said

Mark = Callable[[kineto.Event, int], None]


def rank_events(rank: int, *, device: int = 0) -> list[kineto.Event]:
    """25 ms of compute, then an all-reduce until 75 ms that nothing hides; rank 1 comes 5 ms later."""
    late = 5 * rank
    return [
        kineto.step(3, 0, 76 * MS),
        kineto.launch(MS // 2, 1),
        gemm(1, 26 + late, 1, device=device),
        kineto.launch(MS // 2 + 10_000, 2),
        all_reduce(26 + late, 76, 2, device=device, **{**kineto.METADATA, "Seq": 7}),
    ]


def labelled(event: kineto.Event, rank: int) -> None:
    event["pid"] = f"[TP{rank:02d}] {event['pid']}"


def told(event: kineto.Event, rank: int) -> None:
    event.setdefault("args", {})["rank"] = rank


def raised(event: kineto.Event, rank: int) -> None:
    event["pid"] += 1000 * rank


def raised_less(event: kineto.Event, rank: int) -> None:
    event["pid"] += 100 * rank


def raised_hosts(event: kineto.Event, rank: int) -> None:
    """Each rank had a process id of its own before it was raised."""
    event["pid"] += 1000 * rank + (17 + rank if event["cat"] != "kernel" else 0)


def in_words(event: kineto.Event, rank: int) -> None:
    event["pid"] = f"rank {rank}: {event['pid']}"


def of_two_kinds(event: kineto.Event, rank: int) -> None:
    event["pid"] = f"[DP00-TP{rank:02d}] {event['pid']}"


def prefixed(event: kineto.Event, rank: int) -> None:
    event["pid"] = f"TP{rank:02d} {event['pid']}"


MARKS = [raised_less, of_two_kinds, prefixed, labelled, told, raised, raised_hosts, in_words]


def merged(folder: Path, mark: Mark, ranks: Iterable[list[kineto.Event]], name: str = "all.json", **head: Any) -> Path:
    events = []
    for rank, own in enumerate(ranks):
        for event in copy.deepcopy(own):
            mark(event, rank)
            events.append(event)
    return kineto.write(folder / name, events, **head)


def apart(folder: Path, ranks: Iterable[list[kineto.Event]]) -> Analysis:
    paths = [kineto.write(folder / f"rank{rank}.json", own, **kineto.job(rank, 2)) for rank, own in enumerate(ranks)]
    return analyze_files(paths)


def same_figures(found: Analysis, expected: Analysis) -> None:
    assert [trace.rank for trace in found.traces] == [trace.rank for trace in expected.traces]
    for own, other in zip(found.traces, expected.traces, strict=True):
        for name in ("total", "steps", "collectives", "families", "time", "paths", "kernels", "queues", "estimate"):
            assert getattr(own, name) == getattr(other, name), name
    assert found.skew == expected.skew
    assert found.sizes == expected.sizes


@pytest.mark.parametrize("mark", MARKS)
def test_each_rank_of_a_merged_file_has_its_own_figures(tmp_path: Path, mark: Mark) -> None:
    ranks = [rank_events(rank) for rank in range(2)]
    path = merged(tmp_path, mark, ranks)
    found = analyze_files([path])
    assert [trace.total.compute_ms for trace in found.traces] == [25, 30]
    assert [trace.total.hidden_comm_ms for trace in found.traces] == [0, 0]
    assert [trace.file for trace in found.traces] == [f"{path}/rank0", f"{path}/rank1"]
    assert [(rank.rank, rank.last, rank.caused_ms) for rank in found.skew[0].ranks] == [(0, 0, 0), (1, 1, 5)]
    same_figures(found, apart(tmp_path, ranks))
    same_figures(analyze([read_trace(path)]), found)
    assert said(found.traces[0].problems, "the file holds 2 ranks, distinguished by")


@pytest.mark.parametrize("mark", MARKS)
def test_ranks_of_a_whole_job_are_as_in_their_own_files(tmp_path: Path, mark: Mark) -> None:
    ranks = [list(kineto.training(seed=rank, layers=3 + rank)) for rank in range(3)]
    same_figures(analyze_files([merged(tmp_path, mark, ranks)]), apart(tmp_path, ranks))


def test_one_rank_of_a_merged_file_can_be_named(tmp_path: Path) -> None:
    path = merged(tmp_path, labelled, [rank_events(rank) for rank in range(2)])
    assert read_trace(path / "rank1").rank == 1
    (found,) = analyze_files([path / "rank1"]).traces
    assert found.total.compute_ms == 30
    with pytest.raises(TraceError, match="holds rank0, rank1, but no rank2"):
        read_trace(path / "rank2")


def contradictory(event: kineto.Event, rank: int) -> None:
    raised(event, rank)
    event.setdefault("args", {})["rank"] = 0


def without_rank(event: kineto.Event, rank: int) -> None:
    event["pid"] += (17, 42)[rank]


def only_hosts(event: kineto.Event, rank: int) -> None:
    event["pid"] += 0 if event["cat"] == "kernel" else 10 + rank


def only_devices(event: kineto.Event, rank: int) -> None:
    if event["cat"] == "kernel":
        told(event, rank)


def two_labels(event: kineto.Event, rank: int) -> None:
    labelled(event, rank)
    event.setdefault("args", {})["rank"] = 3


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        (contradictory, "all are marked as rank 0|2 processes are marked as rank 0"),
        (without_rank, "2 processes ran kernels on device 0, and not all are marked with a rank"),
        (only_hosts, "2 processes launched kernels, and nothing tells which launched those of device 0"),
        (only_devices, "1 process launched kernels, and nothing tells which launched those of each of 2 ranks"),
        (two_labels, "2 processes are marked as rank 3"),
        (lambda event, rank: None, "joined"),
    ],
)
def test_a_merged_file_whose_ranks_nothing_tells_apart_is_refused(tmp_path: Path, mark: Mark, why: str) -> None:
    path = merged(tmp_path, mark, [list(kineto.training(seed=rank, layers=3)) for rank in range(2)])
    with pytest.raises(TraceError, match=why):
        analyze_files([path])


def on_own_device(device: int, host: int) -> list[kineto.Event]:
    """Kernels of one device, and the process that launched them."""
    events = list(kineto.training(seed=device, layers=3))
    for event in events:
        event["pid"] = device if event["cat"] == "kernel" else host
        if event["cat"] == "kernel":
            event["args"]["device"] = device
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] += 500 * device
    return events


def test_ranks_with_devices_of_their_own_are_told_apart_by_what_launched_their_kernels(tmp_path: Path) -> None:
    ranks = [on_own_device(rank, 40 + rank) for rank in range(2)]
    found = analyze_files([merged(tmp_path, lambda event, rank: None, ranks)])
    assert [(trace.rank, trace.device) for trace in found.traces] == [(None, 0), (None, 1)]
    expected = apart(tmp_path, ranks)
    assert [trace.time for trace in found.traces] == [trace.time for trace in expected.traces]
    assert said(found.problems, "2 files do not say which rank they are")


def test_kernels_that_none_of_the_processes_launched_are_of_no_rank(tmp_path: Path) -> None:
    events = [*on_own_device(0, 40), *on_own_device(1, 41)]
    lost = [event for event in on_own_device(2, 42) if event["cat"] == "kernel"]
    with pytest.raises(TraceError, match="nothing tells which launched those of device 2"):
        analyze_files([kineto.write(tmp_path / "a.json", [*events, *lost])])


def test_one_process_that_ran_kernels_of_two_ranks_is_named(tmp_path: Path) -> None:
    events = [*on_own_device(0, 40), *on_own_device(1, 40), *on_own_device(2, 41)]
    for event in events:
        if event["cat"] == "kernel" and event["pid"] < 2:
            told(event, event["pid"])
    with pytest.raises(TraceError, match="the kernels of process 40 are marked with 2 ranks"):
        analyze_files([kineto.write(tmp_path / "a.json", events)])


def test_ranks_whose_kernels_and_launches_have_one_process_id_are_told_apart_and_numbered(tmp_path: Path) -> None:
    def as_rank(event: kineto.Event, rank: int) -> None:
        event["pid"] = rank

    ranks = [list(kineto.training(seed=rank, layers=3)) for rank in range(2)]
    found, expected = analyze_files([merged(tmp_path, as_rank, ranks)]), apart(tmp_path, ranks)
    assert [trace.time for trace in found.traces] == [trace.time for trace in expected.traces]
    assert [trace.steps for trace in found.traces] == [trace.steps for trace in expected.traces]
    assert found.skew == expected.skew
    assert said(found.problems, "2 files do not say which rank they are: they are numbered by position")


def test_ranks_of_a_cpu_job_are_told_apart(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        events = [kineto.step(1, 0, 50 * MS), kineto.host_range("gloo:all_reduce", 20 * MS, 30 * MS, thread=7)]
        events += [kineto.host_range("aten::mm", MS, (5 + rank) * MS, cat="cpu_op")]
        ranks.append(events)
    for mark in (labelled, told):
        found = analyze_files([merged(tmp_path, mark, ranks)])
        assert [trace.rank for trace in found.traces] == [0, 1]
        assert [trace.total.compute_ms for trace in found.traces] == [4, 5]


@pytest.mark.parametrize("mark", [labelled, told, raised])
def test_ranks_of_a_cpu_job_without_steps_are_told_apart(tmp_path: Path, mark: Mark) -> None:
    ranks = []
    for rank in range(3):
        events = [kineto.host_range("gloo:all_reduce", 20 * MS, 30 * MS, thread=7)]
        events += [kineto.host_range("aten::mm", MS, (5 + rank) * MS, cat="cpu_op")]
        ranks.append(events)
    found = analyze_files([merged(tmp_path, mark, ranks)])
    assert [trace.total.compute_ms for trace in found.traces] == [4, 5, 6]
    assert {trace.total.comm_ms for trace in found.traces} == {10}
    # Ranks that communicate nothing in the file are no less ranks.
    silent = [[event for event in events if event["cat"] == "cpu_op"] for events in ranks]
    found = analyze_files([merged(tmp_path, mark, silent)])
    assert [trace.total.compute_ms for trace in found.traces] == [4, 5, 6]


def test_workers_of_a_cpu_job_without_steps_are_no_ranks(tmp_path: Path) -> None:
    events = [kineto.host_range("gloo:all_reduce", 20 * MS, 30 * MS, thread=7)]
    events += [kineto.host_range("aten::mm", i * MS, (i + 1) * MS, cat="cpu_op") for i in range(20)]
    worker = [kineto.host_range("aten::stack", i * MS, (i + 1) * MS, cat="cpu_op", thread=55) for i in range(4)]
    for event in worker:
        event["pid"] = 1001
    (found,) = analyze_files([kineto.write(tmp_path / "a.json", [*events, *worker])]).traces
    assert found.total.compute_ms == 20
    assert said(found.problems, "process 1001 counts for no rank")


def operators(number: int, *events: kineto.Event) -> list[kineto.Event]:
    """A CPU job's operators of 1 ms each, one per ms."""
    return [*events, *[kineto.host_range("aten::mm", i * MS, (i + 1) * MS, cat="cpu_op") for i in range(number)]]


LEFT_OUT = "left out: far fewer kernels, steps or operators than the ranks have"


@pytest.mark.parametrize("mark", [labelled, told, in_words])
def test_a_marked_rank_of_a_cpu_job_with_few_operators_is_a_rank(tmp_path: Path, mark: Mark) -> None:
    found = analyze_files([merged(tmp_path, mark, [operators(20), operators(2), operators(20)])])
    assert [(trace.rank, trace.total.compute_ms) for trace in found.traces] == [(0, 20), (1, 2), (2, 20)]
    assert not any("left out" in problem for trace in found.traces for problem in trace.problems)


def test_a_rank_of_a_cpu_job_that_communicates_is_a_rank_however_few_its_operators(tmp_path: Path) -> None:
    gloo = kineto.host_range("gloo:all_reduce", 20 * MS, 30 * MS, thread=7)
    found = analyze_files([merged(tmp_path, raised, [operators(20, gloo), operators(2, gloo)])])
    assert [(trace.total.compute_ms, trace.total.comm_ms) for trace in found.traces] == [(20, 10), (2, 10)]


def test_what_counts_for_no_rank_is_named(tmp_path: Path) -> None:
    found = analyze_files([merged(tmp_path, raised, [operators(20), operators(2), operators(20)])])
    assert [trace.total.compute_ms for trace in found.traces] == [20, 20]
    for trace in found.traces:
        assert said(trace.problems, "process 1001 counts for no rank", LEFT_OUT)
    # A worker of one rank; and a rank without steps beside others that have some.
    (trace,) = analyze_files([merged(tmp_path, raised, [operators(20), operators(2)])]).traces
    assert trace.total.compute_ms == 20
    assert said(trace.problems, "process 1001 counts for no rank", LEFT_OUT)
    step = kineto.step(1, 0, 50 * MS)
    found = analyze_files([merged(tmp_path, raised, [operators(20, step), operators(20), operators(20, step)])])
    assert len(found.traces) == 2
    assert said(found.traces[0].problems, "process 1001 counts for no rank", LEFT_OUT)
    many = [operators(20), *[operators(1)] * 12]
    (trace,) = analyze_files([merged(tmp_path, raised, many)]).traces
    assert said(trace.problems, "process 1001, process 2001, ", "process 8001 and 4 more", LEFT_OUT)


def other_processes() -> list[kineto.Event]:
    """What one process writes: workers that load data, several threads, several devices, spans of the profiler."""
    events = list(kineto.training(layers=3))
    worker = [kineto.host_range("aten::stack", i * 10_000, i * 10_000 + 5_000, cat="cpu_op") for i in range(5)]
    for number, event in enumerate(worker):
        event["pid"] = 1_001 + number
    span = {"ph": "X", "cat": "Trace", "ts": kineto.Nanoseconds(kineto.BASE_NS), "dur": kineto.Nanoseconds(9),
            "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "args": {}}  # fmt: skip
    second = [kineto.kernel(kineto.GEMM, i * 50_000, i * 50_000 + 9_000, 900 + i, device=1) for i in range(4)]
    return [*events, *worker, span, *second, *[kineto.launch(i * 40_000, 900 + i, thread=101) for i in range(4)]]


def test_a_file_of_one_process_is_not_taken_apart(tmp_path: Path) -> None:
    found = analyze_files([kineto.write(tmp_path / "a.json", other_processes(), **kineto.job())])
    assert [(trace.rank, trace.device) for trace in found.traces] == [(0, 0), (0, 1)]
    (of_one,) = analyze_files(
        [merged(tmp_path, lambda event, rank: labelled(event, 3), [list(kineto.training())], **kineto.job(3))]
    ).traces
    assert (of_one.rank, of_one.device, of_one.file) == (3, 0, str(tmp_path / "all.json"))


def test_an_id_that_is_damaged_makes_no_second_rank(tmp_path: Path) -> None:
    events = list(kineto.training())
    next(event for event in events if event["cat"] == "kernel")["pid"] = 4711
    (found,) = analyze_files([kineto.write(tmp_path / "a.json", events)]).traces
    (expected,) = analyze_files([kineto.write(tmp_path / "b.json", kineto.training())]).traces
    assert found.total == expected.total


def test_compare_asks_for_one_rank(tmp_path: Path) -> None:
    ov, seq = (
        merged(tmp_path, labelled, [list(kineto.training(overlapped=overlapped))] * 2, f"{overlapped}.json")
        for overlapped in (True, False)
    )
    with pytest.raises(ValueError, match=r"holds 2 ranks: give one of them, as in .*True\.json/rank0"):
        compare_files(ov, seq)
    assert compare_files(ov / "rank1", seq / "rank1").overlapped.rank == 1


def test_times_that_are_too_late_for_floating_point_numbers_keep_their_nanoseconds(tmp_path: Path) -> None:
    ranks = [rank_events(rank) for rank in range(2)]
    for events in ranks:
        events[2]["dur"] = kineto.Nanoseconds(events[2]["dur"] + 1)
    for event in (event for events in ranks for event in events):
        event["ts"] = kineto.Nanoseconds(event["ts"] + 10**19 // 8)
    found = analyze_files([merged(tmp_path, labelled, ranks)])
    assert [trace.total.compute_ms for trace in found.traces] == [25.000001, 30.000001]
