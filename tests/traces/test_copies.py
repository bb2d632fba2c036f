"""Collectives that copy engines run: which copies of a file communicate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import TraceFigures
from tests import kineto
from tests.traces.events import collective, figures_of, gemm, said

WITHIN, PEER = "Memcpy DtoD (Device -> Device)", "Memcpy PtoP (Device -> Device)"
NOTE = "launched copies within the device and no kernel"


def copy(
    start: float, end: float, number: int, *, stream: int = 20, name: str = WITHIN, **options: Any
) -> kineto.Event:
    return {**gemm(start, end, number, stream=stream, **options), "name": name, "cat": "gpu_memcpy"}


def operator(start: int, end: int, kind: str = "_allgather_base", size: int | None = 2, **args: Any) -> kineto.Event:
    """Torch's operator around what a collective launches."""
    told = {} if size is None else {"Group size": size, "Process Group Name": "0"}
    args = {"Collective name": kind, "In msg nelems": 8, "Out msg nelems": 16, "dtype": "Float", **told, **args}
    return kineto.host_range("record_param_comms", start, end, cat="cpu_op", **args)


def job(*more: kineto.Event, stream: int = 20, **options: Any) -> list[kineto.Event]:
    """A GEMM, an all-gather that launches two copies, and a copy that is launched outside of all collectives."""
    launches = [kineto.launch(time, number) for time, number in ((1, 1), (10, 2), (12, 3), (40, 4))]
    copies = [copy(4, 9, 2, stream=stream), copy(9, 10, 3, stream=stream), copy(11, 13, 4, stream=21)]
    return [*launches, operator(5, 25, **options), gemm(0, 6, 1), *copies, *more]


def comm_and_copies(found: TraceFigures) -> tuple[float, float]:
    return found.total.comm_ms, found.total.copy_ms


@pytest.mark.parametrize("kind", ["_allgather_base", "alltoall_base", "gather", "scatter", "broadcast"])
def test_copies_that_a_collective_without_a_kernel_launched_communicate(tmp_path: Path, kind: str) -> None:
    found = figures_of(tmp_path, job(kind=kind))
    assert comm_and_copies(found) == (6, 2)
    assert found.total.hidden_comm_ms == 2
    (row,) = found.collectives
    assert (row.count, row.time_ms, row.group, row.group_size) == (2, 6, "0", 2)
    # Two copies are one collective: its bytes would count twice.
    assert (row.bytes, row.bus_bandwidth_gb_s) == (None, None)
    assert not said(found.problems, NOTE)


def test_copies_that_communicate_have_a_name_of_their_own(tmp_path: Path) -> None:
    kernels = read_trace(kineto.write(tmp_path / "trace.json", job())).kernels
    assert [kernels.names[name] for name in kernels.name[1:]] == [f"{WITHIN} of a collective"] * 2 + [WITHIN]


def test_copies_on_a_stream_that_computes_stay_copies_and_are_named(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(stream=7))
    assert comm_and_copies(found) == (0, 8)
    assert said(found.problems, "1 collective", NOTE, "all_gather")


def test_streams_of_two_devices_are_distinguished(tmp_path: Path) -> None:
    # The other device computes on a stream of the same number.
    path = kineto.write(tmp_path / "trace.json", job(gemm(0, 6, stream=20, device=1)))
    first, _ = analyze([read_trace(path)]).traces
    assert comm_and_copies(first) == (6, 2)


def test_with_a_kernel_copies_pack_and_unpack(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(kineto.launch(14, 5), collective(13, 14, 5, kineto.ALL_GATHER)))
    assert comm_and_copies(found) == (1, 8)
    assert not said(found.problems, NOTE)


def test_a_group_of_one_rank_copies_and_does_not_communicate(tmp_path: Path) -> None:
    found = figures_of(tmp_path, job(size=1))
    assert comm_and_copies(found) == (0, 8)
    assert not said(found.problems, NOTE)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(job(size=None), id="the size of the group is not told"),
        pytest.param(job(kind="allreduce"), id="copy engines do not reduce"),
        pytest.param(job(collective(13, 14, 99, kineto.ALL_GATHER)), id="the launch of a kernel is missing"),
    ],
)
def test_copies_of_which_the_file_does_not_tell_stay_copies_and_are_named(
    tmp_path: Path, events: list[kineto.Event]
) -> None:
    found = figures_of(tmp_path, events)
    assert found.total.copy_ms == 8
    assert said(found.problems, "1 collective", NOTE)


def test_files_that_do_not_describe_their_collectives_name_those_that_launched_copies(tmp_path: Path) -> None:
    annotation = kineto.host_range("nccl:_all_gather_base", 5, 25)
    undescribed = kineto.host_range("record_param_comms", 4, 26, cat="cpu_op")
    found = figures_of(tmp_path, [annotation, undescribed, *job()[:4], *job()[5:]])
    assert comm_and_copies(found) == (0, 8)
    assert said(found.problems, "1 collective", NOTE, "_all_gather_base")


def test_several_copies_to_a_peer_do_not_multiply_the_size_of_their_collective(tmp_path: Path) -> None:
    inputs = {"Input Dims": [[1_000]], "Input type": ["float"]}
    events = [
        kineto.host_range("nccl:all_to_all", 5, 25, **inputs),
        *[kineto.launch(10 + number, number) for number in (1, 2)],
        *[copy(number, number + 1, number, name=PEER) for number in (1, 2)],
    ]
    (row,) = figures_of(tmp_path, events).collectives
    assert (row.collective, row.count, row.time_ms, row.bytes) == ("all_to_all", 2, 2, None)


def test_copies_do_not_wait_for_other_ranks(tmp_path: Path) -> None:
    traces = [
        read_trace(
            kineto.write(tmp_path / f"{rank}.json", [gemm(0, 6), copy(1, end, 0, name=PEER)], **kineto.job(rank))
        )
        for rank, end in enumerate((3, 9))
    ]
    assert analyze(traces).skew == ()
