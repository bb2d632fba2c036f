"""The simulated NCCL: right numbers, and times that depend on the last rank, the slow rank and the slow link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog

CYCLES_PER_MS, LEAD_MS = 1_980_000, 300  # a host comes later than another by less


def _collectives(rank: int, parameters: Parameters) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with on_device(rank, parameters) as device:

        def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor([10 * rank + i for i in range(count)], dtype=dtype).to(device)

        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
            one = numbers(3, dtype)
            dist.all_reduce(one)
            found[f"all_reduce {dtype}"] = one.tolist()
        one = numbers(3)
        dist.all_reduce(one, dist.ReduceOp.MAX)
        found["max"] = one.tolist()
        parts = [torch.empty(2, device=device) for _ in range(2)]
        dist.all_gather(parts, numbers(2))
        found["all_gather"] = [part.tolist() for part in parts]
        part = torch.empty(2, device=device)
        dist.reduce_scatter_tensor(part, numbers(4), dist.ReduceOp.AVG)
        found["reduce_scatter"] = part.tolist()
        exchanged = torch.empty(4, device=device)
        dist.all_to_all_single(exchanged, numbers(4))
        found["all_to_all"] = exchanged.tolist()
        sent = numbers(2)
        dist.broadcast(sent, 1)
        found["broadcast"] = sent.tolist()
        reduced = numbers(2)
        dist.reduce(reduced, 0)
        found["reduce"] = reduced.tolist()
        received = torch.empty(2, device=device)
        if rank == 0:
            dist.send(numbers(2), 1)
            dist.recv(received, 1)
        else:
            dist.recv(received, 0)
            dist.send(numbers(2), 0)
        found["recv"] = received.tolist()
        with dist._coalescing_manager(device=device):
            coalesced = [numbers(1), numbers(2)]
            for one in coalesced:
                dist.all_reduce(one)
        found["coalesced"] = [one.tolist() for one in coalesced]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * (10 + rank)})
        found["objects"] = objects
        alone = dist.new_group([1])
        pair = dist.new_group([0, 1])
        one = numbers(1)
        dist.all_reduce(one, group=pair)
        found["new group"] = one.tolist()
        if rank == 1:
            one = numbers(1)
            dist.all_reduce(one, group=alone)
            gathered = torch.empty_like(one)
            dist.all_gather_into_tensor(gathered, one, group=alone)
            found["alone"] = one.tolist() + gathered.tolist()
        dist.barrier()
    return found


def test_collectives_give_the_right_numbers_on_two_ranks() -> None:
    first, second = run_ranks(_collectives, 2, Parameters(collective_us=20), backend="", timeout_s=90)
    for found in (first, second):
        sums = [value for name, value in found.items() if name.startswith("all_reduce")]
        assert sums == [[10, 12, 14]] * 6
        assert found["max"] == [10, 11, 12]
        assert found["all_gather"] == [[0, 1], [10, 11]]
        assert found["broadcast"] == [10, 11]
        assert found["coalesced"] == [[10], [10, 12]]
        assert found["new group"] == [10]
        assert found["objects"] == [{"rank": rank, "text": "x" * (10 + rank)} for rank in range(2)]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([5, 6], [7, 8])
    assert (first["all_to_all"], second["all_to_all"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert first["reduce"] == [10, 12]
    assert (first["recv"], second["recv"]) == ([10, 11], [0, 1])
    assert second["alone"] == [10, 10]


def _split(rank: int, parameters: Parameters, count: int) -> tuple[int, list[Any]]:
    parameters.apply()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    found: list[Any] = []
    dist.init_process_group("nccl", device_id=device)  # groups are then made of this one's communicator
    for group in (dist.new_group([0, 2]), dist.split_group(split_ranks=[[0, 2], [1]])):
        if rank == 1:
            continue
        numbers, sent = torch.full((count,), rank + 1.0, device=device), torch.tensor([rank], device=device)
        dist.all_reduce(numbers, group=group)
        dist.broadcast(sent, 2, group=group)
        found += [*numbers.cpu()[:: count - 1].tolist(), sent.item()]
    dist.barrier()
    dist.destroy_process_group()
    return os.getpid(), found


def test_groups_that_are_split_off_reduce_among_themselves(tmp_path: Path) -> None:
    told = Parameters(log=tmp_path / "log", devices=3, link_gbs=1, collective_us=100)
    count = 1 << 18
    ranks = run_ranks(_split, 3, told, count, backend="", timeout_s=90)
    assert [found for _, found in ranks] == [[4, 4, 2] * 2, [], [4, 4, 2] * 2]
    logs = [DeviceLog.read(tmp_path / "log", process).tasks for process, _ in ranks]
    kernels = [[task for task in log if "AllReduce_Sum_f32" in task.name] for log in logs]
    for first, second in zip(kernels[0], kernels[2], strict=True):
        assert (first.met, first.end) == (second.met, second.end)
    # Of two ranks each sends all of it once, of three it would be a third more.
    lengths = [task.end - task.met for task in kernels[0] if task.alone_ns > 1e6]
    assert lengths == pytest.approx([100_000 + 4 * count] * 2, abs=2)
    assert [task for task in kernels[1] if task.alone_ns > 1e6] == []


def _late(rank: int, parameters: Parameters) -> int:
    with on_device(rank, parameters) as device:
        numbers = torch.zeros(1 << 20, device=device)
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep((60 + LEAD_MS * rank) * CYCLES_PER_MS)
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
    return os.getpid()


@pytest.mark.parametrize(("slow_link", "factor"), [(None, 1), ("0-1:0.5", 2)])
def test_a_collective_lasts_from_the_last_ranks_arrival(tmp_path: Path, slow_link: str | None, factor: int) -> None:
    told = Parameters(log=tmp_path / "log", link_gbs=1, collective_us=100, slow_link=slow_link)
    processes = run_ranks(_late, 2, told, backend="", timeout_s=90)
    logs = [DeviceLog.read(tmp_path / "log", process).tasks for process in processes]
    first, second = ([task for task in log if task.task_class == "communication"][-1] for log in logs)
    last_sleep = [task for task in logs[1] if "spin_kernel" in task.name][-1]
    # Both ranks see the same moments, to the nanosecond, however late either process got a core.
    assert (first.met, first.end) == (second.met, second.end)
    assert second.start == last_sleep.end == second.met
    assert first.start < second.start
    assert first.end - first.met == pytest.approx(100_000 + factor * 4 * 2**20, abs=2)


def _overlap(rank: int, parameters: Parameters, carve_out: int | None = None) -> int:
    with on_device(rank, parameters) as device:
        torch._C._set_sm_carveout_experimental(carve_out)
        numbers, gradient = torch.zeros(2048, 2048, device=device), torch.zeros(1 << 20, device=device)
        dist.all_reduce(gradient)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(LEAD_MS * CYCLES_PER_MS)
        torch.mm(numbers, numbers)
        work = dist.all_reduce(gradient, async_op=True)
        torch.mm(numbers, numbers)
        work.wait()
        torch.cuda.synchronize()
    return os.getpid()


# 2048 by 2048 is 256 tiles: two waves on 128 multiprocessors, three on the 112 that 16 channels leave. A product that
# leaves as many free itself takes three waves from the first, and loses nothing more.
@pytest.mark.parametrize(("carve_out", "alone_ms", "beside_ms"), [(None, 1, 1.5), (16, 1.5, 1.5)])
def test_channels_take_multiprocessors_from_compute(
    tmp_path: Path, carve_out: int | None, alone_ms: float, beside_ms: float
) -> None:
    told = Parameters(
        log=tmp_path / "log", multiprocessors=128, channels=16, channels_take_sms=True, rules="gemm=1000", link_gbs=1
    )
    process, _ = run_ranks(_overlap, 2, told, carve_out, backend="", timeout_s=90)
    alone, beside = [task for task in DeviceLog.read(tmp_path / "log", process).tasks if "gemm" in task.name]
    assert alone.duration_ns == pytest.approx(1e6 * alone_ms, abs=2)
    assert beside.duration_ns == pytest.approx(1e6 * beside_ms, abs=2)


def test_one_rank_can_be_slow(tmp_path: Path) -> None:
    told = Parameters(log=tmp_path / "log", rules="gemm=1000", slow_rank="1:1.5", link_gbs=1)
    processes = run_ranks(_overlap, 2, told, backend="", timeout_s=90)
    for process, factor in zip(processes, (1, 1.5), strict=True):
        products = [task for task in DeviceLog.read(tmp_path / "log", process).tasks if "gemm" in task.name]
        assert [task.duration_ns for task in products] == pytest.approx([factor * 1e6] * 2, abs=2)
