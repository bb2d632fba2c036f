"""What a device does with its time: idle time and its causes, critical paths, queues, top kernels, utilisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report.views.trace_verdict import verdict
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.device_time import DeviceTime
from tests import kineto
from tests.traces import reference, walks
from tests.traces.events import MS, all_reduce, figures_of, gemm

SHARED = ["ddp_a100_x2", "job128_rank0", "job128_rank1", "mi250_toy"]


def ns(ms: float | None) -> int:
    assert ms is not None
    return round(ms * MS)


def launch(ms: float, correlation: int) -> kineto.Event:
    return kineto.launch(round(ms * MS), correlation)


def wait(start: float, end: float) -> kineto.Event:
    event = kineto.launch(round(start * MS), 0)
    return {**event, "name": "cudaStreamSynchronize", "dur": kineto.Nanoseconds(round((end - start) * MS))}


def as_walk(time: DeviceTime) -> dict[str, int]:
    return {
        "compute": ns(time.compute_ms), "exposed": ns(time.exposed_comm_ms), "copy": ns(time.copy_ms),
        "host": ns(time.idle_host_ms), "launch": ns(time.idle_launch_ms), "other": ns(time.idle_other_ms),
    }  # fmt: skip


# -- real traces, against a walk over all points at which anything changes


@pytest.mark.parametrize("name", SHARED)
def test_time_of_real_traces_equals_that_of_a_walk_over_all_end_points(name: str) -> None:
    path = reference.shared_trace(f"{name}.json.gz")
    (found,) = analyze([read_trace(path)]).traces
    walk, steps = walks.read(path, found.device), reference.read(path).steps
    whole, *each = found.time
    begin, end = min(row.start for row in walk.rows), max(row.end for row in walk.rows)
    assert as_walk(whole) == walks.uses(walk, begin, end)
    until = steps[each[0].step or 0][0]
    for step in each:
        assert as_walk(step) == walks.uses(walk, until, until + ns(step.span_ms))
        assert sum(as_walk(step).values()) == ns(step.span_ms)
        until += ns(step.span_ms)
    assert until <= end


@pytest.mark.parametrize("name", SHARED)
def test_critical_paths_of_real_traces_equal_those_of_a_plain_walk(name: str) -> None:
    path = reference.shared_trace(f"{name}.json.gz")
    (found,) = analyze([read_trace(path)]).traces
    walk, steps = walks.read(path, found.device), reference.read(path).steps
    until = steps[found.paths[0].step or 0][0]
    for step in found.paths:
        end = until + ns(step.length_ms)
        parts, names = walks.path(walk, until, end)
        assert {
            "compute": ns(step.compute_ms), "communication": ns(step.comm_ms), "copy": ns(step.copy_ms),
            "launch": ns(step.launch_ms), "host": ns(step.host_ms), "other": ns(step.other_ms),
        } == parts  # fmt: skip
        assert sum(parts.values()) == end - until
        assert sum(kernel.calls for kernel in step.kernels) <= len(names)
        until = end


# -- cases worked by hand


def test_idle_time_is_the_host_s_where_the_next_kernel_was_launched_within_the_gap(tmp_path: Path) -> None:
    events = [launch(0, 1), gemm(1, 3, 1), launch(5, 2), gemm(5.5, 7, 2), launch(6, 3), gemm(8, 9, 3)]
    whole = figures_of(tmp_path, events).time[0]
    # 3-5 nothing was launched, 5-5.5 the launch took so long; 7-8 the next kernel had been launched at 6.
    assert (whole.idle_host_ms, whole.idle_launch_ms, whole.idle_other_ms) == (2, 0.5, 1)
    assert (whole.span_ms, whole.compute_ms, whole.idle_ms) == (8, 4.5, 3.5)


def test_waiting_for_communication_is_no_idle_time_and_copies_are_neither(tmp_path: Path) -> None:
    copy = {**gemm(4, 7, 3), "cat": "gpu_memcpy", "name": "Memcpy HtoD"}
    events = [launch(0, 1), gemm(1, 3, 1), launch(0, 2), all_reduce(2, 6, 2), launch(0, 3), copy, gemm(8, 9, 9)]
    whole = figures_of(tmp_path, events).time[0]
    assert (whole.compute_ms, whole.exposed_comm_ms, whole.copy_ms, whole.idle_ms) == (3, 3, 1, 1)
    assert (whole.idle_host_ms, whole.idle_other_ms) == (0, 1)  # the launch of the last one is unknown


def test_a_file_without_launches_gives_no_causes(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [gemm(0, 2), gemm(3, 4)])
    whole = found.time[0]
    assert whole.idle_ms == 1
    assert (whole.idle_host_ms, whole.idle_launch_ms, whole.idle_other_ms) == (None, None, None)
    assert found.host_limit is None
    assert found.queues == ()


def test_steps_follow_one_another_on_the_device_without_a_gap(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 4 * MS), kineto.step(2, 4 * MS, 8 * MS), launch(1, 1), gemm(2, 6, 1)]
    found = figures_of(tmp_path, [*events, launch(5, 2), gemm(7, 9, 2)])
    assert [(step.step, step.span_ms) for step in found.time] == [(None, 7), (1, 6), (2, 3)]
    assert [step.idle_ms for step in found.time] == [1, 2, 1]


def test_the_path_goes_through_the_collective_that_held_the_next_kernel_up(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, MS), wait(0, 0)] + [launch(i / 10, i) for i in (1, 2, 3, 4)]
    # The second kernel of the compute stream starts as the collective ends; the one beside it is not on the path.
    events += [gemm(1, 3, 1), all_reduce(3, 9, 2), gemm(3, 5, 3), gemm(9.5, 11, 4)]
    (path,) = figures_of(tmp_path, events).paths
    # From the end: 11-9.5 compute, -9 hand-over, -3 collective, -1 compute, -0.1 its launch, -0 the host.
    parts = (path.compute_ms, path.comm_ms, path.launch_ms, path.host_ms, path.other_ms)
    assert parts == pytest.approx((3.5, 6, 0.9, 0.1, 0.5))
    assert path.length_ms == pytest.approx(sum(parts))
    # Without communication 5.5 ms of compute remain on their stream, of 11 ms: no more than 5.5 can be won.
    assert path.at_most_comm_ms == pytest.approx(5.5)
    assert path.at_most_compute_ms == pytest.approx(3.5)
    assert path.at_most_host_ms == pytest.approx(1)
    assert [(kernel.name, kernel.calls, kernel.communication) for kernel in path.kernels] == [
        (kineto.ALL_REDUCE, 1, True), (kineto.GEMM, 2, False)
    ]  # fmt: skip


def test_a_kernel_that_follows_its_stream_s_kernel_at_once_did_not_wait_for_another_stream(tmp_path: Path) -> None:
    events = [launch(0, 1), launch(0, 2), launch(0, 3)]
    events += [gemm(1, 3, 1), all_reduce(0.5, 3.001, 2), gemm(3.0015, 5, 3)]
    (path,) = figures_of(tmp_path, events).paths
    assert (path.comm_ms, path.compute_ms) == (0, pytest.approx(3.9985))


def test_the_path_goes_from_the_host_s_wait_to_what_it_waited_for(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 20 * MS), launch(0.5, 1), gemm(1, 6, 1), wait(2, 6.5), launch(8, 2), gemm(9, 10, 2)]
    (path,) = figures_of(tmp_path, events).paths
    # 10-9 compute, -8 launch, -6 the host since the device was done, -1 compute, -0.5 launch, -0 the host.
    assert (path.compute_ms, path.launch_ms, path.host_ms, path.other_ms) == (6, 1.5, 2.5, 0)
    assert path.at_most_host_ms == 4


def test_without_any_wait_in_the_file_what_could_be_won_is_not_known(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 20 * MS), launch(0.5, 1), gemm(1, 6, 1), launch(8, 2), gemm(9, 10, 2)]
    (path,) = figures_of(tmp_path, events).paths
    assert path.host_ms == 8
    assert (path.at_most_comm_ms, path.at_most_compute_ms, path.at_most_host_ms) == (None, None, None)
    events = [kineto.step(1, 1 * MS, 20 * MS), launch(1, 1), gemm(2, 6, 1), launch(1.5, 2), gemm(6, 10, 2)]
    (path,) = figures_of(tmp_path, events).paths
    assert (path.host_ms, path.at_most_compute_ms, path.at_most_host_ms) == (0, 8, 1)


def test_a_wait_that_ends_before_anything_did_holds_nobody_up(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 20 * MS), wait(0.1, 0.2), launch(0.5, 1), gemm(1, 6, 1)]
    (path,) = figures_of(tmp_path, events).paths
    assert (path.compute_ms, path.launch_ms, path.host_ms) == (5, 0.5, 0.5)


def test_a_queue_holds_what_was_launched_and_has_not_started(tmp_path: Path) -> None:
    events = [launch(0, 1), gemm(0, 4, 1), launch(1, 2), gemm(4, 6, 2), launch(2, 3), gemm(6, 8, 3)]
    found = figures_of(tmp_path, [*events, launch(7, 4), all_reduce(7, 8, 4)])
    compute, comm = found.queues
    # 4 - 1 and 6 - 2 ms of waiting in 8 ms; two of them wait from 2 to 4.
    assert (compute.stream, compute.launches, compute.longest, compute.mean) == ("7", 3, 2, 7 / 8)
    assert compute.delay_ms == pytest.approx(7 / 3)
    assert (comm.longest, comm.mean) == (0, 0)


def small_kernels(gap: float, count: int = 30) -> list[kineto.Event]:
    """Kernels of 20 us, each launched some milliseconds after the one before ended."""
    events = []
    for i in range(count):
        start = i * (gap + 0.02)
        events += [launch(max(start - 0.005, 0), i + 1), gemm(start, start + 0.02, i + 1)]
    return events


@pytest.mark.parametrize(("gap", "bound", "short"), [(0.05, True, True), (0.001, False, True), (3.0, False, False)])
def test_many_short_gaps_are_launch_bound_and_few_long_ones_are_not(
    tmp_path: Path, gap: float, bound: bool, short: bool
) -> None:
    limit = figures_of(tmp_path, small_kernels(gap)).host_limit
    assert limit is not None
    assert limit.launch_bound is bound
    assert (limit.short_gaps_ms > 0) == (short and gap > 0.005)
    assert limit.kernel_us == 20
    assert limit.launch_interval_us == pytest.approx((gap + 0.02) * 1000)


def test_launch_bound_files_are_not_told_to_do_what_their_kernels_show(tmp_path: Path) -> None:
    plain = kineto.write(tmp_path / "a.json", small_kernels(0.05))
    events = [{**event, "name": event["name"].replace(kineto.GEMM, "triton_poi_fused_add_0")}
              for event in small_kernels(0.05)]  # fmt: skip
    for path, ways in (
        (plain, "CUDA graphs, torch.compile, fused optimizers"),
        (kineto.write(tmp_path / "b.json", events), "CUDA graphs, fused optimizers"),
    ):
        assert f"Fewer and longer kernels help: {ways}." in " ".join(verdict(analyze([read_trace(path)])))


def test_top_kernels_are_sorted_by_time_and_add_up_to_it(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "trace.json", kineto.training(operators=0))
    (found,) = analyze([read_trace(path)]).traces
    walk = reference.read(path)
    times: dict[str, list[int]] = {}
    for kernel in walk.kernels:
        times.setdefault(kernel.name, []).append(kernel.duration)
    total = sum(map(sum, times.values()))
    wanted = sorted(times, key=lambda name: -sum(times[name]))
    assert [kernel.name for kernel in found.kernels] == wanted
    for kernel in found.kernels:
        assert (kernel.calls, ns(kernel.time_ms)) == (len(times[kernel.name]), sum(times[kernel.name]))
        assert ns(kernel.longest_ms) == max(times[kernel.name])
        assert kernel.share == pytest.approx(sum(times[kernel.name]) / total)
        others = [k for k in walk.kernels if k.communicates != kernel.communication]
        mine = [k for k in walk.kernels if k.name == kernel.name]
        assert ns(kernel.beside_ms) == sum(reference.covered(k, others) for k in mine)
    assert {kernel.family for kernel in found.kernels} == {"gemm", "normalisation", "elementwise", "all_reduce"}


def test_parts_of_the_utilisation_add_up_to_the_whole(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [gemm(0, 3), all_reduce(2, 9), gemm(11, 12)])
    assert found.utilisation is not None
    part = found.utilisation.part_ms
    assert part * len(found.utilisation.compute) == pytest.approx(12)
    assert sum(found.utilisation.compute) * part == pytest.approx(4)
    assert sum(found.utilisation.exposed_comm) * part == pytest.approx(6)
    assert found.utilisation.compute[:30] == (1.0,) * 30


def test_a_cpu_job_has_idle_time_and_no_path(tmp_path: Path) -> None:
    events: list[Any] = [kineto.step(1, 0, 9 * MS)]
    events += [kineto.host_range("aten::mm", i * MS, (i + 1) * MS, cat="cpu_op") for i in (1, 5)]
    found = figures_of(tmp_path, events)
    assert found.time[0].idle_ms == 3
    assert found.time[0].idle_host_ms is None
    assert found.paths == ()
