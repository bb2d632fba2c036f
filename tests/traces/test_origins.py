"""Traces of other devices, of other versions of torch, and of files that are not whole."""

from __future__ import annotations

import gzip
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.traces import TraceError, analyze, compare, read_trace
from overlap_callbacks.traces.checks import MAX_SUSPECTS
from tests import kineto
from tests.traces import reference
from tests.traces.events import MS, all_reduce, error_of, figures_of, gemm, overlap, said, short_trace

# -- devices that are not known


def operators() -> list[kineto.Event]:
    return [
        kineto.host_range("aten::mm", 0, 5 * MS, cat="cpu_op"),
        kineto.host_range("hccl:all_reduce", 1 * MS, 3 * MS),
        kineto.step(1, 0, 9 * MS),
    ]


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op", "some_new_device_op"])
def test_a_trace_of_a_device_that_is_not_known_is_refused_and_not_read_as_of_a_cpu(
    tmp_path: Path, category: str
) -> None:
    event = {**gemm(1, 2), "cat": category}
    path = kineto.write(tmp_path / "trace.json", [*operators(), event, event])
    with pytest.raises(TraceError, match=rf"no kernels, but 2 events of other devices \({category}\)"):
        read_trace(path)
    assert "is of a device that is not known" in error_of("analyze", str(path))


def test_events_of_another_device_beside_kernels_are_left_out_and_said(tmp_path: Path) -> None:
    events = [gemm(0, 2), all_reduce(1, 3), {**gemm(0, 9), "cat": "mtia_ccp_events"}]
    found = figures_of(tmp_path, events)
    assert (found.total.compute_ms, found.total.hidden_comm_ms) == (2, 1)
    assert said(found.problems, "1 event of other devices (mtia_ccp_events)", "left out")


@pytest.mark.parametrize("library", ["nccl", "hccl", "xccl", "oneccl"])
def test_a_hosts_range_of_a_devices_collective_is_no_communication(tmp_path: Path, library: str) -> None:
    events = [operators()[0], kineto.host_range(f"{library}:all_reduce", 1 * MS, 3 * MS)]
    found = figures_of(tmp_path, events)
    assert (found.total.compute_ms, found.total.comm_ms) == (5, 0)
    assert said(found.problems, "collectives but no kernels of their device")


# -- launches


def by_category(events: list[kineto.Event], launches: str | None) -> list[kineto.Event]:
    kept = [event for event in events if event["cat"] != "cuda_runtime" or launches is not None]
    return [{**event, "cat": launches} if event["cat"] == "cuda_runtime" else event for event in kept]


LATE = [kineto.step(1, 0, MS), kineto.step(2, MS, 2 * MS), kineto.launch(10, 7), gemm(1.5, 1.7, 7)]


@pytest.mark.parametrize("category", ["xpu_runtime", "privateuse1_runtime"])
def test_kernels_of_other_devices_belong_to_the_step_of_their_launch(tmp_path: Path, category: str) -> None:
    found = figures_of(tmp_path, by_category(LATE, category))
    assert [step.step for step in found.steps] == [1]
    assert not said(found.problems, "no launches")


def test_a_file_without_launches_says_that_its_kernels_are_placed_by_their_start(tmp_path: Path) -> None:
    found = figures_of(tmp_path, by_category(LATE, None))
    assert [step.step for step in found.steps] == [2]
    assert said(found.problems, "holds no launches", "step that the host was in when they started")


# -- ranks


def test_ranks_without_a_world_size_come_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    names = []
    for rank, name in ((1, "a.json"), (0, "b.json")):
        events = [gemm(0, 5), all_reduce(1, 2 + rank)]
        names.append(str(kineto.write(tmp_path / name, events, distributedInfo={"backend": "nccl", "rank": rank})))
    found = analyze([read_trace(name) for name in names])
    assert [trace.rank for trace in found.traces] == [1, 0]
    (row,) = found.skew
    assert {rank.rank: rank.waiting_ms for rank in row.ranks} == {0: 0, 1: 1}
    assert not said(found.problems, "do not say which rank they are")
    output = overlap("analyze", "--all", *names).output
    assert output.index("b.json, rank 0,") < output.index("a.json, rank 1,")


# -- old files


def test_steps_and_ranges_of_2021_are_found_among_the_operators(tmp_path: Path) -> None:
    new = {"kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"}
    events = [{**event, "cat": new.get(event["cat"], event["cat"])} for event in short_trace()]
    found = figures_of(tmp_path, events)
    assert [step.step for step in found.steps] == [1]
    assert found == figures_of(tmp_path, short_trace())


# -- files that are cut off


def cut_after(content: bytes, events: int, style: str) -> bytes:
    """A trace that ends within the event after so many."""
    end = content.index(b"[", content.index(b'"traceEvents"')) + 1
    for _ in range(events):
        end = content.index(b'"ph"', end + 1)
    return content[: content.index(b'"ph"', end + 1) + 20]


def in_order() -> list[kineto.Event]:
    """Three steps with two kernels each, in the order of Kineto: first the host, then the device."""
    host: list[kineto.Event] = [kineto.step(number, number * MS, (number + 1) * MS) for number in range(3)]
    device: list[kineto.Event] = []
    correlations = itertools.count(1)
    for number in range(3):
        for make, start, end in ((gemm, 0.1, 0.5), (all_reduce, 0.3, 0.6)):
            correlation = next(correlations)
            host.append(kineto.launch(number * MS + 1_000 * correlation, correlation))
            device.append(make(number + start, number + end, correlation))
    return host + device


@pytest.mark.parametrize(
    ("kernels", "steps", "named"),
    [
        (6, [0, 1, 2], "any step may lack some, and none is in a mean"),
        (4, [0, 1], "and none is in a mean; step 2 has none"),
        (1, [0], "and none is in a mean; steps 1, 2 have none"),
    ],
)
def test_of_a_file_that_is_cut_off_no_step_counts_as_whole(
    tmp_path: Path, kernels: int, steps: list[int], named: str
) -> None:
    content = kineto.text(in_order())
    path = tmp_path / "trace.json"
    path.write_bytes(cut_after(content, 9 + kernels, "pretty") if kernels < 6 else content[: content.rindex(b"]")])
    (found,) = analyze([read_trace(path)]).traces
    assert found.total.kernels == kernels
    assert [(step.step, step.cut) for step in found.steps] == [(number, True) for number in steps]
    assert found.total.cut
    assert said(found.warnings, named)
    assert not said(found.problems, "no kernels were launched in steps")
    assert found.paths == ()
    assert found.host_limit is None
    assert [time.step for time in found.time] == [None]
    output = overlap("analyze", str(path), "--all").output
    assert output.index("Attention: the file is cut off") < output.index("not known: kernels are missing")
    assert output.index("not known: kernels are missing") < output.index("Kernel times by step")
    assert re.search(f"^{steps[-1]}, cut ", output, re.MULTILINE)
    assert not re.search("would be won|computes|Launch-bound", output)


@pytest.mark.parametrize("name", ["ddp_a100_x2", "ddp_v100_x2", "job128_rank0"])
@pytest.mark.parametrize("part", [0.35, 0.6, 0.9])
def test_a_real_file_that_is_cut_off_gives_no_step_out_as_whole(tmp_path: Path, name: str, part: float) -> None:
    """In these files buffers of later steps come before those of earlier ones."""
    content = gzip.decompress(reference.shared_trace(f"{name}.json.gz").read_bytes())
    first = content.index(b'"kernel"')
    path = tmp_path / "trace.json"
    path.write_bytes(content[: first + int(part * (len(content) - first))])
    (found,) = analyze([read_trace(path)]).traces
    assert found.steps
    assert all(step.cut for step in found.steps)
    path.write_bytes(content[: first - 1000])
    with pytest.raises(TraceError, match="cut off before its first kernel of the device"):
        read_trace(path)


def test_a_file_with_launches_and_no_kernels_is_not_read_as_of_a_cpu_job(tmp_path: Path) -> None:
    call = kineto.launch(1_000, 1)
    of_kernel = kineto.write(tmp_path / "a.json", [*operators(), call])
    assert "holds the launches of 1 kernel of a device" in error_of("analyze", str(of_kernel))
    of_copy = kineto.write(tmp_path / "b.json", [*operators(), {**call, "name": "cudaMemcpyAsync"}])
    assert read_trace(of_copy).on_host


@pytest.mark.parametrize("value", [None, "soon", ""])
def test_a_kernel_without_a_time_that_can_be_read_makes_no_file_of_a_device(tmp_path: Path, value: Any) -> None:
    events = [*operators(), {**kineto.kernel(kineto.GEMM, 0, MS, 1), "ts": value}]
    assert read_trace(kineto.write(tmp_path / "a.json", events, deviceProperties=[])).on_host
    launched = kineto.write(tmp_path / "b.json", [*events, kineto.launch(1_000, 1)])
    assert "holds the launches of 1 kernel of a device, but not the kernels" in error_of("analyze", str(launched))


def test_a_file_of_a_cpu_job_that_is_cut_off_is_read(tmp_path: Path) -> None:
    events = [kineto.step(0, 0, MS), kineto.host_range("aten::mm", 0, MS // 2, cat="cpu_op")]
    content = kineto.text([*events, kineto.host_range("aten::mm", MS // 2, MS, cat="cpu_op")], deviceProperties=[])
    path = tmp_path / "trace.json"
    path.write_bytes(content[: content.rindex(b'"ph"')])
    (found,) = analyze([read_trace(path)]).traces
    assert (found.on_host, found.total.cut, found.total.compute_ms) == (True, True, 0.5)


def test_collectives_of_a_file_that_is_cut_off_are_not_matched_by_their_order(tmp_path: Path) -> None:
    whole = kineto.write(tmp_path / "a.json", in_order(), **kineto.job(0, 2))
    cut = tmp_path / "b.json"
    cut.write_bytes(cut_after(kineto.text(in_order(), **kineto.job(1, 2)), 9 + 4, "pretty"))
    other = kineto.write(tmp_path / "c.json", in_order(), **kineto.job(1, 2))
    assert sum(row.count for row in analyze([read_trace(whole), read_trace(other)]).skew) == 3
    assert analyze([read_trace(whole), read_trace(cut)]).skew == ()


def test_a_step_that_is_cut_is_in_no_mean_of_a_comparison(tmp_path: Path) -> None:
    whole = kineto.write(tmp_path / "whole.json", in_order())
    cut = tmp_path / "cut.json"
    cut.write_bytes(cut_after(whole.read_bytes(), 9 + 3, "pretty"))
    found = compare(read_trace(cut), read_trace(whole))
    assert not found.valid
    assert said(found.problems, "the overlapped file is cut off, and no step of it is known to be whole")


# -- jobs of several ranks in which nothing communicates


def test_a_job_of_several_ranks_without_communication_is_said_first_with_what_looks_like_it(tmp_path: Path) -> None:
    names = ["my_ring_exchange", "fused_allreduce_v9", "plain", *(f"k{i}" for i in range(20))]
    events = [gemm(0, 9), *(kineto.kernel(name, i, i + 10, 0, stream=20) for i, name in enumerate(names))]
    path = kineto.write(tmp_path / "trace.json", events, **kineto.job(0, 8))
    trace = read_trace(path)
    assert not (trace.kernels.kind == Kind.COMMUNICATION).any()
    (warning,) = trace.warnings
    assert "8 ranks" in warning
    assert "--communication REGEX" in warning
    listed = warning.split(": ")[-1].split(", ")
    assert len(listed) == MAX_SUSPECTS == 10
    assert listed[0].startswith("fused_allreduce_v9 (")
    assert listed[1].startswith("my_ring_exchange (")
    assert "cutlass" not in warning
    output = overlap("analyze", str(path), "--all").output
    assert output.index("Attention: the job has 8 ranks") < output.index("Kernel times by step")
    assert output.count("the job has 8 ranks") == 1


@pytest.mark.parametrize("job", [{}, kineto.job(0, 1)])
def test_a_job_of_one_rank_may_have_no_communication(tmp_path: Path, job: dict[str, Any]) -> None:
    assert read_trace(kineto.write(tmp_path / "trace.json", [gemm(0, 9)], **job)).warnings == ()


def test_of_a_cpu_job_the_ranges_that_sound_like_communication_are_named(tmp_path: Path) -> None:
    events = [operators()[0], kineto.host_range("my_all_gather", 0, 9), kineto.host_range("forward", 0, 9)]
    (warning,) = read_trace(kineto.write(tmp_path / "trace.json", events, **kineto.job(0, 4))).warnings
    assert warning.endswith(": my_all_gather [OC721]")


@pytest.mark.parametrize("thread", [{}, {"tid": 9}])
def test_a_step_on_a_thread_without_operators_hides_none(tmp_path: Path, thread: dict[str, int]) -> None:
    events = [
        kineto.step(1, 0, 600_000),
        kineto.host_range("aten::mm", 0, 120_000, cat="cpu_op"),
        kineto.host_range("aten::add", 400_000, 420_000, cat="cpu_op"),
    ]
    again = {**{key: value for key, value in events[0].items() if key != "tid"}, **thread}
    (found,) = analyze([read_trace(kineto.write(tmp_path / "a.json", [again, *events]))]).traces
    assert found.total.compute_ms == pytest.approx(0.14)
