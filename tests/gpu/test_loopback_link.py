"""The phantom's link itself: what it writes, when its works are done, and that its kernels compile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.experiments.loopback import device_link as build
from overlap_callbacks.experiments.loopback.collectives import KERNEL_NAMES, OPERATORS, Call, parse
from overlap_callbacks.experiments.loopback.device_link import compile_library, compiler, open_library
from overlap_callbacks.experiments.loopback.host_link import HostLink
from tests.distributed import run_alone
from tests.gpu.loopback import LoopSettings, open_job, packing

HAS_CPU_FORM = True
RANKS_LOAD = ("tests.gpu.loopback.runs",)
ROWS, WIDTH = 4, 6
FAST = LoopSettings("cpu", gb_s=1.0)


def _numbers(rows: int = ROWS) -> torch.Tensor:
    return torch.arange(1.0, rows * WIDTH + 1).view(rows, WIDTH)


def _calls(operator: str) -> list[Call]:
    """Calls of an operator with tensors of their own, without a process group."""
    if operator in ("allreduce_", "allreduce_coalesced_"):
        count = 1 if operator == "allreduce_" else 3
        calls = []
        for reduction in (0, 1, 4):
            tensors = [_numbers() + i for i in range(count)]
            calls.append(Call(operator, tensors, tensors, reduction=reduction))
        return calls
    if operator == "broadcast_":
        tensors = [_numbers()]
        return [Call(operator, tensors, tensors, root=0)]
    if operator == "allgather_":
        return [Call(operator, [[torch.zeros(ROWS, WIDTH) for _ in range(2)]], [_numbers()])]
    if operator == "alltoall_base_":
        return [Call(operator, [torch.zeros(ROWS, WIDTH)], [_numbers()])]
    inputs = [_numbers() + i for i in range(3 if "coalesced" in operator else 1)]
    if "reduce_scatter" in operator:
        return [Call(operator, [torch.zeros(ROWS // 2, WIDTH) for _ in inputs], inputs, reduction=0)]
    return [Call(operator, [torch.zeros(2 * ROWS, WIDTH) for _ in inputs], inputs)]


def _compare(operator: str) -> None:
    with open_job(FAST) as loop:
        assert isinstance(loop.link, HostLink)
        group = dist.group.WORLD
        assert group is not None
        calls = [(by_gloo, by_moves) for by_gloo, by_moves in zip(_calls(operator), _calls(operator), strict=True)]
        assert calls
        for by_gloo, by_moves in calls:
            work = loop.link.issue(by_gloo, group, FAST)
            assert work is not None
            work.wait()
            for move in by_moves.moves(2):
                move.dst.copy_(move.src * move.factor)
            for expected, written in zip(by_gloo.output_tensors, by_moves.output_tensors, strict=True):
                assert expected.count_nonzero() == expected.numel()
                assert torch.equal(written, expected), (operator, by_gloo.reduction)


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_the_kernels_write_is_what_gloo_writes_where_both_ranks_have_the_same_data(operator: str) -> None:
    run_alone(_compare, operator)


def _time_a_collective() -> tuple[float, float, bool]:
    with open_job(LoopSettings("cpu", gb_s=0.001)) as loop:
        tensor = torch.ones(4096)
        dist.all_reduce(tensor)  # makes the connection
        begin = time.perf_counter()
        work: Any = dist.all_reduce(tensor, async_op=True)
        issued = time.perf_counter()
        early = bool(work.is_completed()) and time.perf_counter() - begin < 4 * 4096 / 1e6  # a stalled host is late
        work.wait()
        assert tensor[0] == 4
        assert [c.num_bytes for c in loop.issued] == [4 * 4096] * 2
        assert [c.asynchronous for c in loop.issued] == [False, True]
        return issued - begin, time.perf_counter() - begin, early


def test_an_asynchronous_collective_takes_the_time_of_the_link_and_its_issuer_does_not_wait() -> None:
    to_issue_s, to_complete_s, early = run_alone(_time_a_collective)
    assert to_complete_s >= 4 * 4096 / 1e6
    assert to_issue_s < to_complete_s
    assert not early


def _use_all_of_torch() -> None:
    with open_job(FAST) as loop:
        alone = dist.new_group([0])
        tensor = torch.ones(8)
        dist.all_reduce(tensor, group=alone)
        assert tensor[0] == 1
        assert loop.issued == []  # NCCL has no kernel for a group of one rank
        dist.all_reduce(tensor, group=dist.new_group([0, 1]), op=dist.ReduceOp.AVG)
        assert tensor[0] == 1
        dist.barrier()
        with dist._coalescing_manager(async_ops=True) as block:
            for number in range(3):
                dist.all_reduce(torch.full((4,), float(number)))
        block.wait()
        assert [c.operator for c in loop.issued] == ["allreduce_", "allreduce_coalesced_"]
    assert not dist.is_initialized()
    with open_job(FAST):  # and once more in the same process
        dist.all_reduce(tensor)
        assert tensor[0] == 2


def test_groups_of_one_rank_coalesced_calls_and_a_second_job_work() -> None:
    run_alone(_use_all_of_torch)


def _null_work() -> None:
    boxed = dist.Work.boxed(None)
    assert dist.Work.unbox(boxed) is None
    with open_job(FAST):
        tensor = torch.ones(4)
        library = torch.library.Library("c10d", "IMPL")
        library.impl("allreduce_", lambda tensors, *_: (tensors, boxed), "CPU")
        assert dist.all_reduce(tensor) is None
        library._destroy()  # type: ignore[no-untyped-call]


def test_a_synchronous_collective_can_have_no_work_as_on_nccl() -> None:
    run_alone(_null_work)


def test_a_reduction_that_the_phantom_does_not_know_is_refused() -> None:
    class Product:
        def op(self) -> int:
            return 2

    with pytest.raises(NotImplementedError, match="reduction 2"):
        parse("allreduce_", 1, 4, ([torch.ones(1)], None, Product()))


@pytest.mark.skipif(compiler() is None, reason="there is no nvcc")
def test_the_kernels_compile_and_have_the_names_of_nccl(tmp_path: Path) -> None:
    path = compile_library("sm_90", tmp_path)
    library = open_library(str(path))
    assert library.loopback_max_moves() == 64
    if not torch.cuda.is_available():
        assert library.loopback_launch(0, None, 0, 1, 0, None) != 0  # refused, with no device to run on
    code = path.read_bytes()
    for name in KERNEL_NAMES.values():
        assert name.encode() in code
    assert compile_library("sm_90", tmp_path) == path  # once


@pytest.mark.skipif(compiler() is None, reason="there is no nvcc")
def test_packed_kernels_are_used_where_there_is_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "_PACKED_FOR", ("90",))  # each takes seconds
    packed = packing.pack(tmp_path / "packed")
    assert packing.unpack(tmp_path / "packed") is not None
    assert build.find_library() is None  # nvcc is here
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = build.find_library()
    assert found is not None
    assert found.read_bytes() == packed.read_bytes()
    assert open_library(str(found)).loopback_max_moves() == 64
    changed = tmp_path / "kernels.cu"
    changed.write_bytes(build.SOURCE.read_bytes() + b"// changed")
    monkeypatch.setattr(build, "SOURCE", changed)
    assert build.find_library() is None  # a library of other sources is none
