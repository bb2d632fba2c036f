from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.host import uncounted_note
from overlap_callbacks.analysis.kernels.table import Kind, LaunchShape
from overlap_callbacks.instruments import profiler
from overlap_callbacks.instruments.profiler import read_events
from tests.columns import EPOCH_NS

TRAINING_THREAD, OTHER_THREAD = 41, 42


def event(name, activity, start, end, *, correlation=0, resource=0, is_async=False, metadata=""):
    """One of Kineto's events, as torch 2.10 and later give them."""
    return SimpleNamespace(
        metadata_json=lambda: metadata,
        name=lambda: name,
        activity_type=lambda: activity,
        start_ns=lambda: EPOCH_NS + start,
        duration_ns=lambda: end - start,
        correlation_id=lambda: correlation,
        device_resource_id=lambda: resource,
        is_async=lambda: is_async,
    )


def old_event(name, device, start, end, *, correlation=0, resource=0, is_async=False, is_user_annotation=False):
    """The same from an earlier torch, which lacks the activity."""
    found = event(name, None, start, end, correlation=correlation, resource=resource, is_async=is_async)
    del found.activity_type
    found.device_type = lambda: getattr(torch._C._autograd.DeviceType, device)
    found.is_user_annotation = lambda: is_user_annotation
    return found


def op(name, start, end, thread=TRAINING_THREAD):
    return event(name, "cpu_op", start, end, resource=thread)


def gpu_kernel(name, start, end, correlation, *, stream=7, metadata=""):
    return event(name, "kernel", start, end, correlation=correlation, resource=stream, metadata=metadata)


def launch(time, correlation, activity="cuda_runtime", name="cudaLaunchKernel"):
    return event(name, activity, time, time + 5, correlation=correlation, resource=TRAINING_THREAD)


def launch_metadata(grid, *, block=(128, 1, 1), registers=32, shared=0, sms=132, correlation=0):
    """What Kineto writes for a kernel: a fragment of JSON, different for each kernel."""
    blocks = grid[0] * grid[1] * grid[2]
    return (
        f'\n      "queued": 0, "device": 0, "context": 1,\n      "stream": 7, "correlation": {correlation},\n'
        f'      "registers per thread": {registers},\n      "shared memory": {shared},\n'
        f'      "blocks per SM": {blocks / sms:.6g},\n      "warps per SM": {4 * blocks / sms:.6g},\n'
        f'      "grid": {list(grid)},\n      "block": {list(block)},\n      "est. achieved occupancy %": 18'
    )


def read(events, bounds, thread=TRAINING_THREAD, quiet=()):
    """Rows of the timeline: (name, kind, step, start, end, count), times counted from the epoch of the tests."""
    steps = [(EPOCH_NS + start, EPOCH_NS + end) for start, end in bounds]
    found = read_events(events, steps, thread, [EPOCH_NS + time for time in quiet])
    starts, ends = found.intervals.start_ns - EPOCH_NS, found.intervals.end_ns - EPOCH_NS
    counts = np.zeros(len(found), dtype=int)
    counts[np.unique(found.call, return_index=True)[1]] = 1  # the first piece of each call
    parts = (found.kind, found.step, starts, ends, counts)
    rows = zip(found.name, *(part.tolist() for part in parts), strict=True)
    return sorted([(found.names[name], Kind(kind), *numbers) for name, kind, *numbers in rows], key=lambda row: row[3])


# -- a device's events

BOUNDS = [(100, 200), (200, 300), (350, 400)]


def test_a_kernel_belongs_to_the_step_that_launched_it_not_to_the_one_in_which_it_ran():
    events = [
        gpu_kernel("gemm", 210, 260, correlation=1),
        gpu_kernel("softmax", 320, 330, correlation=2),
        gpu_kernel("norm", 420, 430, correlation=3),
        launch(399, 3),
        launch(150, 1),
        launch(299, 2, activity="cuda_driver"),  # Triton's
    ]
    assert read(events, BOUNDS) == [
        ("gemm", Kind.COMPUTE, 0, 210, 260, 1),
        ("softmax", Kind.COMPUTE, 1, 320, 330, 1),
        ("norm", Kind.COMPUTE, 2, 420, 430, 1),
    ]


def test_a_kernel_launched_before_the_first_step_between_two_or_after_the_last_is_in_none():
    events = [launch(time, number) for number, time in enumerate((90, 320, 400))]
    events += [gpu_kernel("late", 110 + number, 111 + number, correlation=number) for number in range(3)]
    assert [row[2] for row in read(events, BOUNDS)] == [-1, -1, -1]


def test_steps_are_closed_at_their_start_and_open_at_their_end():
    times = {100: 0, 199: 0, 200: 1, 299: 1, 300: -1, 349: -1, 350: 2, 399: 2, 400: -1, 99: -1}
    events = [launch(time, time) for time in times]
    events += [gpu_kernel("k", 500 + time, 501 + time, correlation=time) for time in times]
    assert {row[3] - 500: row[2] for row in read(events, BOUNDS)} == times


def test_a_kernel_whose_launch_lies_before_the_profile_belongs_to_no_step():
    events = [gpu_kernel("left over", 110, 160, correlation=9), launch(110, 1)]
    assert [row[2] for row in read(events, BOUNDS)] == [-1]


def test_without_any_recorded_launch_kernels_go_by_their_own_start():
    assert [row[2] for row in read([gpu_kernel("gemm", 210, 260, correlation=9)], BOUNDS)] == [1]


def test_kinds_of_device_activity():
    events = [
        gpu_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 110, 150, 1),
        gpu_kernel("gemm", 120, 130, 2),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 131, 134, correlation=3),
        event("Memset (Device)", "gpu_memset", 140, 141, correlation=4),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 142, 144, correlation=5),
        *(launch(105, correlation) for correlation in (1, 2, 3, 4, 5)),
    ]
    assert [(row[0][:8], row[1], row[2]) for row in read(events, BOUNDS)] == [
        ("ncclDevK", Kind.COMMUNICATION, 0),
        ("gemm", Kind.COMPUTE, 0),
        ("Memcpy D", Kind.COPY, 0),
        ("Memset (", Kind.COPY, 0),
        ("Memcpy P", Kind.COMMUNICATION, 0),
    ]


def test_a_copy_has_its_size_as_its_launch_shape() -> None:
    told = ['"device": 0, "bytes": 4096, "memory bandwidth (GB/s)": 1.5', '"bytes": 0', '"bytes": "many"', ""]
    events = [
        event("Memcpy DtoH", "gpu_memcpy", 131 + i, 132 + i, correlation=i + 1, metadata=text)
        for i, text in enumerate(told)
    ]
    kernels = read_events([*events, launch(105, 1)], BOUNDS, TRAINING_THREAD, on_device=True)
    assert [kernels.shapes[number] for number in kernels.shape] == ["4096 bytes", "", "", ""]
    assert kernels.launches == (None, None)


def test_a_pattern_of_the_user_names_copies_in_a_live_profile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_rules, "communication_patterns", [*name_rules.communication_patterns, "Memcpy DtoD"])
    events = [event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 131, 134, correlation=3), launch(105, 3)]
    assert [row[1] for row in read(events, BOUNDS)] == [Kind.COMMUNICATION]


def test_annotations_and_operators_are_no_kernels_where_there_is_a_device():
    events = [
        event("nccl:all_reduce", "gpu_user_annotation", 110, 190, correlation=1, resource=7),
        event("## forward ##", "user_annotation", 100, 190, correlation=2, resource=TRAINING_THREAD),
        event("gloo:all_reduce", "user_annotation", 100, 190, resource=OTHER_THREAD, is_async=True),
        op("aten::mm", 120, 130),
        launch(105, 1),
        gpu_kernel("gemm", 120, 130, 1),
    ]
    assert read(events, BOUNDS) == [("gemm", Kind.COMPUTE, 0, 120, 130, 1)]


def test_events_of_an_older_torch_are_distinguished_by_device_and_name():
    events = [
        old_event("cudaLaunchKernel", "CPU", 150, 155, correlation=1, resource=TRAINING_THREAD),
        old_event("hipExtLaunchKernel", "CPU", 160, 165, correlation=2, resource=TRAINING_THREAD),
        old_event("cuLaunchKernelEx", "CPU", 170, 175, correlation=3, resource=TRAINING_THREAD),
        old_event("cudaMemcpyAsync", "CPU", 180, 185, correlation=4, resource=TRAINING_THREAD),
        old_event("aten::mm", "CPU", 140, 190, correlation=9, resource=TRAINING_THREAD),
        old_event("nccl:all_reduce", "CUDA", 200, 290, correlation=5, is_user_annotation=True),
        old_event("gemm", "CUDA", 210, 220, correlation=1),
        old_event("ncclDevKernel_Generic", "CUDA", 221, 230, correlation=2),
        old_event("triton_poi_fused_0", "CUDA", 231, 240, correlation=3),
        old_event("Memcpy HtoD (Pinned -> Device)", "CUDA", 241, 250, correlation=4),
        old_event("Memset (Device)", "CUDA", 251, 252, correlation=4),
    ]
    assert [row[:3] for row in read(events, BOUNDS)] == [
        ("gemm", Kind.COMPUTE, 0),
        ("ncclDevKernel_Generic", Kind.COMMUNICATION, 0),
        ("triton_poi_fused_0", Kind.COMPUTE, 0),
        ("Memcpy HtoD (Pinned -> Device)", Kind.COPY, 0),
        ("Memset (Device)", Kind.COPY, 0),
    ]


def test_launch_shapes_are_read_and_those_that_differ_in_registers_alone_are_apart():
    events = [launch(110 + number, number) for number in range(1, 6)]
    for number, (grid, registers) in enumerate([((8, 1, 1), 32), ((8, 1, 1), 32), ((8, 1, 1), 64), ((9, 2, 1), 32)], 1):
        metadata = launch_metadata(grid, registers=registers, correlation=number)
        events.append(gpu_kernel("gemm", 120 + number, 121 + number, number, metadata=metadata))
    events.append(gpu_kernel("gemm", 130, 131, 5, metadata='"grid": [1, 1'))  # cut off
    found = read_events(events, [(EPOCH_NS + 100, EPOCH_NS + 200)], TRAINING_THREAD)
    shapes = [found.shapes[number] for number in found.shape.tolist()]
    launches = [found.launches[number] for number in found.shape.tolist()]
    assert shapes == ["[8, 1, 1] [128, 1, 1]"] * 3 + ["[9, 2, 1] [128, 1, 1]", ""]
    assert len(found.shapes) == len(found.launches) == 4
    assert [shape and (shape.num_blocks, shape.registers_per_thread, shape.num_sms) for shape in launches] == [
        (8, 32, 132), (8, 32, 132), (8, 64, 132), (18, 32, 132), None,
    ]  # fmt: skip


def test_equal_launch_shapes_are_parsed_once(monkeypatch):
    parsed = []
    of = LaunchShape.of
    monkeypatch.setattr(LaunchShape, "of", lambda metadata: parsed.append(metadata) or of(metadata))
    events = [
        gpu_kernel("gemm", 120, 130, number, metadata=launch_metadata((number % 3 + 1, 1, 1), correlation=number))
        for number in range(300)
    ]
    read_events(events, [], TRAINING_THREAD)
    assert len(parsed) == 3


def test_kernels_of_a_graph_and_kernels_without_a_launch_are_marked():
    events = [
        launch(110, 1, name="cudaGraphLaunch"),
        launch(111, 2, name="hipGraphLaunch_spt"),
        launch(112, 3),
        gpu_kernel("a", 120, 130, 1),
        gpu_kernel("b", 130, 140, 1),
        gpu_kernel("c", 140, 150, 2),
        gpu_kernel("d", 150, 160, 3),
        gpu_kernel("e", 160, 170, 4),
        gpu_kernel("f", 170, 180, 3),
    ]
    found = read_events(events, [(EPOCH_NS + 100, EPOCH_NS + 200)], TRAINING_THREAD)
    assert found.from_graph.tolist() == [True, True, True, False, False, False]
    assert found.without_launch.tolist() == [False] * 4 + [True, False]
    assert found.step.tolist() == [0] * 6


def test_a_device_profile_without_kernels_is_not_read_as_a_cpu_profile():
    events = [launch(110, 1), op("aten::mm", 120, 130), event("gloo:all_reduce", "cpu_op", 10, 20, is_async=True)]
    assert len(read_events(list(events), BOUNDS, TRAINING_THREAD, on_device=True)) == 0
    assert len(read_events(events, BOUNDS, TRAINING_THREAD)) == 2


def test_without_steps_nothing_is_in_a_step():
    assert [row[2] for row in read([gpu_kernel("gemm", 1, 2, 1), launch(0, 1)], [])] == [-1]
    assert [row[2] for row in read([op("aten::mm", 1, 2)], [])] == [-1]


def test_a_range_of_gloo_ends_at_the_latest_where_nothing_was_in_flight():
    events = [
        event("gloo:all_reduce", "cpu_op", 10, 20, is_async=True),  # before any quiet time
        event("gloo:all_reduce", "cpu_op", 20, 300, is_async=True),  # outlives two of them
        event("gloo:all_reduce", "cpu_op", 150, 300, is_async=True),  # outlives one
        event("gloo:all_reduce", "cpu_op", 250, 300, is_async=True),  # after the last
        op("aten::mm", 90, 190),  # compute is not cut
    ]
    rows = read(events, [(0, 100), (100, 200)], quiet=[100, 200])
    assert [(start, end) for _, _, _, start, end, _ in rows] == [(10, 20), (20, 100), (90, 190), (150, 200), (250, 300)]


def test_a_profile_without_events_is_an_empty_timeline():
    assert read([], BOUNDS) == []


# -- a host's events


def test_operators_count_by_self_time_and_once_each():
    events = [
        op("aten::linear", 100, 180),
        op("aten::t", 110, 120),
        op("aten::addmm", 130, 170),
        op("aten::relu", 180, 190),
    ]
    assert read(events, BOUNDS) == [
        ("aten::linear", Kind.COMPUTE, 0, 100, 110, 1),
        ("aten::t", Kind.COMPUTE, 0, 110, 120, 1),
        ("aten::linear", Kind.COMPUTE, 0, 120, 130, 0),
        ("aten::addmm", Kind.COMPUTE, 0, 130, 170, 1),
        ("aten::linear", Kind.COMPUTE, 0, 170, 180, 0),
        ("aten::relu", Kind.COMPUTE, 0, 180, 190, 1),
    ]


def test_an_operator_that_crosses_the_end_of_its_step_stays_whole():
    rows = read([op("aten::linear", 190, 230), op("aten::mm", 205, 215)], BOUNDS)
    assert [(row[0], row[2]) for row in rows] == [("aten::linear", 0), ("aten::mm", 1), ("aten::linear", 0)]


def test_other_threads_operators_are_left_out():
    events = [op("aten::mm", 100, 110), op("aten::copy_", 100, 190, thread=OTHER_THREAD)]
    assert read(events, BOUNDS) == [("aten::mm", Kind.COMPUTE, 0, 100, 110, 1)]


def test_waiting_and_issuing_are_no_compute_but_operators_within_them_are():
    events = [
        op("c10d::allreduce_", 100, 130),
        op("aten::empty", 105, 110),
        op("_c10d_functional::wait_tensor", 130, 140),
        op("aten::wait_tensor", 140, 145),
        op("aten::record_stream", 145, 150),
        op("aten::is_pinned", 150, 155),
        op("autograd::engine::evaluate_function: MmBackward0", 155, 185),
        op("aten::mm", 160, 170),
        event("Optimizer.step#SGD.step", "user_annotation", 186, 199, resource=TRAINING_THREAD),
        op("aten::add_", 188, 190),
    ]
    assert read(events, BOUNDS) == [
        ("aten::empty", Kind.COMPUTE, 0, 105, 110, 1),
        ("aten::mm", Kind.COMPUTE, 0, 160, 170, 1),
        ("aten::add_", Kind.COMPUTE, 0, 188, 190, 1),
    ]


def test_waiting_inside_an_operator_is_not_the_operator_s_time():
    rows = read([op("aten::mul", 100, 190), op("_c10d_functional::wait_tensor", 110, 180)], BOUNDS)
    assert [(row[3], row[4]) for row in rows] == [(100, 110), (180, 190)]


def test_gloo_ranges_are_communication_in_the_step_in_which_they_begin():
    def gloo(name, start, end):
        return event(name, "user_annotation", start, end, resource=OTHER_THREAD, is_async=True)

    events = [
        op("aten::mm", 100, 150),
        gloo("gloo:all_reduce", 120, 220),
        gloo("gloo:all_reduce", 230, 240),
        gloo("data_loading", 100, 200),
    ]
    assert read(events, BOUNDS) == [
        ("aten::mm", Kind.COMPUTE, 0, 100, 150, 1),
        ("gloo:all_reduce", Kind.COMMUNICATION, 0, 120, 220, 1),
        ("gloo:all_reduce", Kind.COMMUNICATION, 1, 230, 240, 1),
    ]


# -- what is an operator of a host


def test_operators_of_any_name_compute():
    names = [
        "mylib::heavy",
        "ScaleBackward",
        "CompiledFunction",
        "graph_0_cpp_fused_add_0",
        "## Call CompiledFxGraph f ##",
    ]
    events = [op(name, 100 + 10 * place, 110 + 10 * place) for place, name in enumerate(names)]
    assert [row[0] for row in read(events, BOUNDS)] == names


def test_a_range_named_by_hand_leaves_its_time_to_the_operator_around_it():
    note = event("my part", "user_annotation", 110, 190, resource=TRAINING_THREAD)
    old_note = old_event("my part", "CPU", 120, 130, resource=TRAINING_THREAD, is_user_annotation=True)
    python = event("train.py: step", "python_function", 100, 199, resource=TRAINING_THREAD)
    assert read([op("mylib::heavy", 100, 195), note, old_note, python], BOUNDS) == [
        ("mylib::heavy", Kind.COMPUTE, 0, 100, 195, 1)
    ]


def test_an_operator_that_issues_a_collective_may_wait_for_it_so_its_own_time_is_no_compute():
    events = [
        op("AsyncLinearBackward", 100, 190),
        op("aten::mm", 110, 120),
        op("c10d::allreduce_", 120, 125),  # its wait is somewhere until 190
        op("aten::mm", 130, 140),
        op("## Call CompiledFxGraph f ##", 200, 290),
        op("_c10d_functional::all_reduce", 210, 220),
        op("c10d::allreduce_", 212, 218),
        op("_c10d_functional::wait_tensor", 230, 240),  # this one has a range for the wait
    ]
    assert [(row[0], row[3], row[4]) for row in read(events, BOUNDS)] == [
        ("aten::mm", 110, 120),
        ("aten::mm", 130, 140),
        ("## Call CompiledFxGraph f ##", 200, 210),
        ("## Call CompiledFxGraph f ##", 220, 230),
        ("## Call CompiledFxGraph f ##", 240, 290),
    ]


def test_hooks_run_in_the_time_of_the_engine_and_do_not_count():
    events = [op("autograd::engine::evaluate_function: X", 100, 190), op("torch::autograd::AccumulateGrad", 110, 180)]
    assert read(events, BOUNDS) == []


def test_the_share_of_a_step_outside_operators_is_reported():
    events = [
        op("aten::mm", 100, 150),
        op("c10d::allreduce_", 150, 160),
        event("gloo:all_reduce", "user_annotation", 155, 170, resource=OTHER_THREAD, is_async=True),
        op("aten::mm", 200, 300),
    ]
    steps = [(EPOCH_NS + start, EPOCH_NS + end) for start, end in BOUNDS]
    found = read_events(events, steps, TRAINING_THREAD)
    assert np.allclose(found.uncounted, [0.3, 0.0, 1.0])
    assert found[found.kind == Kind.COMPUTE].uncounted == found.uncounted
    assert uncounted_note(found.uncounted[:1]).startswith("30% of a step runs in no torch operator")
    assert not uncounted_note(found.uncounted[1:2])
    assert not uncounted_note([])


def test_events_are_read_in_bursts_between_which_other_threads_run_and_are_freed_with_them(monkeypatch):
    left = []
    events = [op("aten::mm", 110 + number, 111 + number) for number in range(2000)]
    monkeypatch.setattr(profiler.time, "sleep", lambda _: left.append(len(events)))
    found = read_events(events, [(EPOCH_NS + 100, EPOCH_NS + 5000)], TRAINING_THREAD)
    assert len(found) == 2000
    assert left[-1] == 0
    assert all(before - after <= 512 for before, after in itertools.pairwise([2000, *left]))
    starts = found.intervals.start_ns - EPOCH_NS
    assert starts.tolist() == list(range(110, 2110))
