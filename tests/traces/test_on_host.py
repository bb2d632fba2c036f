"""Collectives of libraries of the host (Gloo) in a job on a device, and what else makes a host look slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report.views.trace_verdict import verdict
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import Analysis, TraceFigures
from tests import kineto
from tests.traces import reference
from tests.traces.events import MS, all_reduce, figures_of, gemm, overlap, said
from tests.traces.test_nsys import exported

LAUNCH_MS = 0.01


def on_host(start: float, end: float, name: str = "gloo:all_reduce", thread: int = 200) -> kineto.Event:
    return kineto.host_range(name, round(start * MS), round(end * MS), thread=thread)


def launched(event: kineto.Event, start: float, correlation: int, thread: int = 100) -> list[kineto.Event]:
    return [kineto.launch(round((start - LAUNCH_MS) * MS), correlation, thread=thread), event]


def copy(start: float, end: float, correlation: int, thread: int = 200) -> list[kineto.Event]:
    event = {**gemm(start, end, correlation, stream=9), "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)"}
    return launched(event, start, correlation, thread)


def job(*gap: kineto.Event, steps: int = 2) -> list[kineto.Event]:
    """Steps of 60 ms: 20 ms of compute with 10 ms of NCCL hidden in it, nothing for 25 ms, and 15 ms of compute."""
    events, correlation = [*gap], 0
    for number in range(steps):
        begin = 60 * number
        events.append(kineto.step(number, begin * MS, (begin + 60) * MS))
        for start, end in [(begin + 0.5, begin + 20), (begin + 45, begin + 60)]:
            correlation += 1
            events += launched(gemm(start, end, correlation), start, correlation)
        correlation += 1
        events += launched(all_reduce(begin + 1, begin + 11, correlation), begin + 1, correlation)
    return events


def sentences(trace: TraceFigures) -> str:
    return " ".join(verdict(Analysis(library_version="", traces=(trace,), skew=(), problems=())))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gloo:all_reduce", "all_reduce (gloo)"),
        ("gloo:barrier", "barrier (gloo)"),
        ("mpi:all_reduce", "all_reduce (mpi)"),
        ("ucc:allreduce", "all_reduce (ucc)"),
    ],
)
def test_a_collective_of_the_host_that_the_device_waits_for_is_exposed_communication(
    tmp_path: Path, name: str, shown: str
) -> None:
    found = figures_of(tmp_path, job(on_host(19.98, 44.98, name), on_host(79.98, 104.98, name)))
    without = figures_of(tmp_path, job())
    for step in found.time[1:]:
        assert step.exposed_on_host_ms == pytest.approx(24.98)
        assert step.on_host_ms == 25
        parts = (step.idle_host_ms, step.idle_launch_ms, step.idle_other_ms, step.exposed_on_host_ms)
        assert step.idle_ms == pytest.approx(sum(part for part in parts if part is not None))
    # The device's own figures are what they are without it.
    assert (found.total, found.steps, found.collectives) == (without.total, without.steps, without.collectives)
    assert [step.idle_ms for step in found.time] == [step.idle_ms for step in without.time]
    (row,) = found.on_host_collectives
    assert (row.name, row.calls, row.time_ms, row.exposed_ms) == (name, 2, 50, pytest.approx(49.96))
    assert "is waiting for communication on the host" in sentences(found)
    assert f"mostly {shown}: 49.960 ms of its 50.000 ms are exposed" in sentences(found)
    assert "load data" not in sentences(found)
    assert "load data" in sentences(without)


def test_the_path_of_a_step_goes_through_the_collective_and_not_the_host(tmp_path: Path) -> None:
    path = figures_of(tmp_path, job(on_host(19.98, 44.98))).paths[0]
    assert path.on_host_ms == pytest.approx(25)
    parts = (path.compute_ms, path.comm_ms, path.copy_ms, path.launch_ms, path.host_ms, path.other_ms, path.on_host_ms)
    assert path.length_ms == pytest.approx(sum(part for part in parts if part is not None))


def test_two_threads_of_gloo_count_once(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(on_host(20, 40), on_host(30, 44.98, "gloo:broadcast", thread=201), steps=1))
    assert found.time[0].on_host_ms == pytest.approx(24.98)
    assert found.time[0].exposed_on_host_ms == pytest.approx(24.98)
    assert [row.name for row in found.on_host_collectives] == ["gloo:all_reduce", "gloo:broadcast"]


def test_gloo_that_runs_while_the_device_computes_is_hidden(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(on_host(2, 19, "gloo:all_gather"), steps=1))
    assert (found.time[0].on_host_ms, found.time[0].exposed_on_host_ms) == (17, 0)
    assert "communication on the host" not in sentences(found)
    assert "load data" in sentences(found)


def test_only_the_end_of_an_asynchronous_collective_is_waited_for(tmp_path: Path) -> None:
    # It is issued at 5 ms, the last launch before its end comes at 12 ms, and the device has work until 20 ms.
    events = launched(gemm(12, 12.5, 90, stream=8), 12, 90)
    found = figures_of(tmp_path, [*job(on_host(5, 44.98), steps=1), *events])
    assert found.time[0].exposed_on_host_ms == pytest.approx(24.98)


def test_a_collective_during_which_launches_go_on_holds_nobody_up(tmp_path: Path) -> None:
    events: list[Any] = [on_host(0, 30, "gloo:gather")]  # as of a checkpoint that a thread writes
    for number in range(400):
        start = 0.1 + number * 0.07
        events += launched(gemm(start, start + 0.02, number + 1), start, number + 1)
    found = figures_of(tmp_path, events)
    assert found.time[0].exposed_on_host_ms < 0.1
    assert "Launch-bound" in sentences(found)
    assert "communication on the host" not in sentences(found)


def test_loading_data_after_a_barrier_of_microseconds_stays_the_host_s(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(on_host(20.1, 20.11, "gloo:barrier"), steps=1))
    assert found.time[0].exposed_on_host_ms == pytest.approx(0.01)
    assert found.time[0].idle_host_ms == pytest.approx(24.98)
    assert "load data" in sentences(found)
    assert "communication on the host" not in sentences(found)


def test_copies_of_the_collective_and_a_late_end_of_its_range_do_not_hide_it(tmp_path: Path) -> None:
    # The tensors are the device's: Gloo's thread copies them out and back. It ends its range after the host went on.
    events = [*job(on_host(20, 45.5), steps=1), *copy(21, 22, 91), *copy(43, 44, 92)]
    time = figures_of(tmp_path, events).time[0]
    assert time.exposed_on_host_ms == pytest.approx(25 - 2 - LAUNCH_MS)
    assert time.copy_ms == 2
    parts = (time.idle_host_ms, time.idle_launch_ms, time.idle_other_ms, time.exposed_on_host_ms)
    assert time.idle_ms == pytest.approx(sum(part for part in parts if part is not None))


def test_without_launches_the_idle_time_beside_a_collective_counts(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [gemm(0, 10), gemm(35, 60), on_host(10, 35)])
    assert (found.time[0].exposed_on_host_ms, found.time[0].idle_host_ms) == (25, None)
    assert "41.7% is waiting for communication on the host, 0.0% is idle." in sentences(found)


@pytest.mark.parametrize("broken", [{"ts": 0, "dur": 0}, {"ts": "x"}, {"dur": -5}, {"tid": None}, {"dur": 1e30}])
def test_ranges_without_a_time_are_no_communication(tmp_path: Path, broken: dict[str, Any]) -> None:
    found = figures_of(tmp_path, [*job(steps=1), {**on_host(20, 45), **broken}])
    assert found.time[0].idle_ms == pytest.approx(25)
    assert (found.time[0].exposed_on_host_ms or 0) <= 25
    left_out = () if "tid" in broken else ("1 collectives of the host have no time and are left out [OC745]",)
    assert found.warnings == left_out


def test_a_range_that_goes_on_after_the_last_kernel_is_cut_there(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job({**on_host(50, 60), "dur": 1e12}, steps=1))
    assert [(row.calls, row.time_ms) for row in found.on_host_collectives] == [(1, 10)]


def test_files_without_such_collectives_have_no_such_figures(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(kineto.host_range("my gloo: all_reduce", 20 * MS, 45 * MS)))
    assert {(step.exposed_on_host_ms, step.on_host_ms) for step in found.time} == {(None, None)}
    assert found.on_host_collectives == ()
    assert {path.on_host_ms for path in found.paths} == {None}


def test_the_tables_have_it(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "trace.json", job(on_host(19.98, 44.98)))
    assert "gloo:all_reduce" in overlap("analyze", str(path), "--csv", "on_host_collectives").output
    shown = overlap("analyze", str(path), "--all").output
    assert "Comm. on host" in shown
    assert "Collectives on the host" in shown
    assert "on host" not in overlap("analyze", str(kineto.write(tmp_path / "other.json", job()))).output


# -- what the profiler recorded besides


def small_kernels() -> list[kineto.Event]:
    starts = [0.1 * number for number in range(1, 41)]
    return [event for i, at in enumerate(starts, 1) for event in launched(gemm(at, at + 0.02, i), at, i)]


STACK = kineto.host_range("train.py(3): step", 0, MS, cat="python_function")
SHAPES = kineto.host_range("aten::mm", 0, MS, cat="cpu_op", **{"Input Dims": [[8, 8], [8, 8]]})
PLAIN = kineto.host_range("aten::mm", 0, MS, cat="cpu_op", **{"External id": 3})


@pytest.mark.parametrize(
    ("events", "head", "recorded"),
    [
        ([STACK], {}, "Python stacks"),
        ([SHAPES], {}, "shapes"),
        ([STACK, SHAPES], {}, "Python stacks and shapes"),
        ([], {"with_stack": 1, "profile_memory": 1}, "Python stacks and memory"),
        ([SHAPES], {"record_shapes": 1}, "shapes"),
    ],
)
def test_beside_launch_bound_it_says_what_made_launches_longer(
    tmp_path: Path, events: list[kineto.Event], head: dict[str, Any], recorded: str
) -> None:
    found = figures_of(tmp_path, [*events, *small_kernels()], **head)
    assert "Launch-bound" in sentences(found)
    assert f"Recording {recorded} makes launches longer: leave that out, and profile again." in sentences(found)
    # Nothing of a share that is shown as zero, or of communication that there is none of.
    assert "nothing communicates" in sentences(found)
    assert " 0.0% " not in sentences(found)


def test_so_it_does_where_the_host_keeps_the_device_waiting_and_not_elsewhere(tmp_path: Path) -> None:
    assert "Recording shapes makes" in sentences(figures_of(tmp_path, [*job(), SHAPES]))
    assert "Recording" not in sentences(figures_of(tmp_path, [*job(), PLAIN]))
    assert "Recording" not in sentences(figures_of(tmp_path, [*small_kernels(), PLAIN], with_stack=0))
    assert "Recording" not in sentences(figures_of(tmp_path, [*launched(gemm(1, 3, 1), 1, 1), STACK, SHAPES]))


def test_no_generated_file_has_them_by_mistake(tmp_path: Path) -> None:
    (found,) = analyze([read_trace(kineto.write(tmp_path / "trace.json", kineto.training()))]).traces
    assert (found.recorded, found.on_host_collectives, found.time[0].on_host_ms) == ((), (), None)


@pytest.mark.parametrize(
    ("name", "recorded"),
    [("ddp_a100_x2", ()), ("ddp_v100_x2", ("memory",)), ("job128_rank0", ("shapes",)), ("mi250_toy", ("shapes",))],
)
def test_nor_has_a_real_one(name: str, recorded: tuple[str, ...]) -> None:
    for found in analyze([read_trace(reference.shared_trace(f"{name}.json.gz"))]).traces:
        assert found.recorded == recorded
        assert (found.on_host_collectives, found.time[0].on_host_ms) == ((), None)


def test_ranges_of_an_export_of_nsight_systems_are_communication_on_the_host(tmp_path: Path) -> None:
    events = job(on_host(19.98, 44.98), on_host(79.98, 104.98, "mpi:allreduce"))
    (found,) = analyze([read_trace(exported(tmp_path / "a.sqlite", *events).close())]).traces
    of_kineto = figures_of(tmp_path, events)
    assert (found.time, found.paths) == (of_kineto.time, of_kineto.paths)
    assert found.on_host_collectives == of_kineto.on_host_collectives
    assert "is waiting for communication on the host" in sentences(found)


def test_torch_s_own_ranges_in_an_export_do_not_tell_how_long_they_take(tmp_path: Path) -> None:
    events = job(*[on_host(start, start + 0.02, "gloo:all_reduce, op_id = 7") for start in (19.98, 79.98)])
    (found,) = analyze([read_trace(exported(tmp_path / "a.sqlite", *events).close())]).traces
    without = figures_of(tmp_path, job())
    assert (found.time, found.on_host_collectives) == (without.time, ())
    assert said(found.problems, "NVTX ranges of 2 collectives on the host end too early: their time is not known")


def test_gloo_alone_communicates_though_no_kernel_does(tmp_path: Path) -> None:
    events = [event for event in job(on_host(20, 44.98)) if event["name"] != kineto.ALL_REDUCE]
    warnings = figures_of(tmp_path, events, **kineto.job()).warnings
    assert said(warnings, "the job has 2 ranks, but no kernel in this file communicates, by its name")
    assert not said(warnings, "nothing")
