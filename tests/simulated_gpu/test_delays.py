"""A delay lengthens one collective alone: by the device's log compute goes on at once. Results have the same bits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate import delays as delays_module
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report import record
from overlap_callbacks.report.views.causal import causal
from overlap_callbacks.report.views.elements import Note
from tests.distributed import run_ranks
from tests.gate.test_delays import accepted_orders, run_orders
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.left_out import Wait, host_ahead
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, StepTruth

DELAY_MS = 7.0
SLIGHT_NS = 2e5  # some launches
# A product takes 4 ms, the collective 2.
TIMES = {"rules": "gemm=4000", "collective_us": 2000, "kernel_us": 10}
Job = Callable[[torch.device], Callable[[], torch.Tensor]]


def _asynchronous(device: torch.device) -> Callable[[], torch.Tensor]:
    """An all-reduce on the communicator's stream, and two products beside it."""
    numbers, gradient = torch.ones(64, 64, device=device), torch.ones(64, device=device)

    def step() -> torch.Tensor:
        torch.add(numbers[0], dist.get_rank(), out=gradient)
        work = dist.all_reduce(gradient, async_op=True)
        beside = (numbers @ numbers) @ numbers
        work.wait()
        return beside[0] + gradient

    return step


def _own_stream(device: torch.device) -> Callable[[], torch.Tensor]:
    """The same on a stream of the job's, as FSDP2 communicates."""
    numbers, gradient = torch.ones(64, 64, device=device), torch.ones(64, device=device)
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def step() -> torch.Tensor:
        torch.add(numbers[0], dist.get_rank(), out=gradient)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            dist.all_reduce(gradient)
        beside = (numbers @ numbers) @ numbers
        compute.wait_stream(side)
        return beside[0] + gradient

    return step


JOBS: dict[str, Job] = {"asynchronous": _asynchronous, "own stream": _own_stream}


def _run(
    rank: int, parameters: Parameters, without: str = ""
) -> tuple[int, dict[str, tuple[list[int], list[list[float]], list[float]]]]:
    """Train with delays; ``without`` a wait of theirs."""
    found = {}
    left_out = Wait(without).left_out(delays_module) if without else contextlib.nullcontext()
    with on_device(rank, parameters) as device, left_out:
        dist.all_reduce(torch.ones(1, device=device))
        for name, job in JOBS.items():
            gate = Gate()
            gate.register()
            step, begun, numbers, measured = job(device), [], [], []
            for delay_ms in (None, 0.0, DELAY_MS):
                delays = None if delay_ms is None else {("allreduce_", dist.group.WORLD.group_name, 0): delay_ms}  # type: ignore[union-attr]
                with host_ahead():
                    begun.append(time.monotonic_ns())
                    gate.begin_step(sequential=False, compute_stream=torch.cuda.current_stream(), delays_ms=delays)
                    result = step()
                    log = gate.end_step()
                    assert torch.cuda.current_stream() == torch.cuda.default_stream()
                assert gate.last_error is None
                numbers.append(result.tolist())
                measured += [start.elapsed_time(end) for start, end in log.delays]  # type: ignore[misc, union-attr]
            gate.close()
            found[name] = ([*begun, time.monotonic_ns()], numbers, measured)
    return os.getpid(), found


def test_the_wait_of_a_delay_shows_in_the_numbers_when_it_is_left_out(tmp_path: Path) -> None:
    told = Parameters(computes=True, stall_s=30, log=tmp_path / "log", **TIMES)  # type: ignore[arg-type]
    for _, found in run_ranks(_run, 2, told, "StepDelays._on_device", backend="", timeout_s=120):
        numbers = found["asynchronous"][1]
        assert repr(numbers[0]) != repr(numbers[1])


def _ends(step: StepTruth) -> tuple[int, int, int, int]:
    """From a step's first kernel on: the ends of its products, the begin and the end of its collective, its own end."""
    compute = [task for task in step.of_class("compute") if "spin" not in task.name]
    first, (collective,) = compute[0].start, step.of_class("communication")
    products = max(task.end for task in compute if "gemm" in task.name)
    return products - first, collective.start - first, collective.end - first, step.end - first


def test_a_delay_lengthens_the_collective_alone_and_changes_no_bit(tmp_path: Path) -> None:
    told = Parameters(computes=True, stall_s=30, log=tmp_path / "log", **TIMES)  # type: ignore[arg-type]
    for process, found in run_ranks(_run, 2, told, backend="", timeout_s=120):
        log = DeviceLog.read(tmp_path / "log", process)
        for name, (begun, numbers, measured) in found.items():
            assert repr(numbers[0]) == repr(numbers[1]) == repr(numbers[2]), name
            assert "nan" not in repr(numbers)
            plain, undelayed, delayed = map(_ends, log.steps(begun))
            assert measured[1] == pytest.approx(DELAY_MS, abs=SLIGHT_NS / 1e6)
            # Compute goes on at once, the collective begins later.
            assert undelayed[:2] == pytest.approx(plain[:2], abs=SLIGHT_NS)
            assert delayed[:2] == pytest.approx((plain[0], plain[1] + DELAY_MS * 1e6), abs=SLIGHT_NS)
            # The step ends with whichever comes last, however late the other rank was.
            for products, _, collective, end in (plain, undelayed, delayed):
                assert end == pytest.approx(max(products, collective), abs=SLIGHT_NS)


def _run_orders(rank: int, parameters: Parameters, orders: list[list[list[str]]]) -> int:
    with on_device(rank, parameters) as device:
        return run_orders(rank, orders, device)


@pytest.mark.nightly
def test_delays_hang_in_no_order_that_the_order_check_accepts() -> None:
    # Each group has a communicator and a stream of its own; the device says which collectives wait for each other.
    orders, _ = accepted_orders(60)
    told = Parameters(devices=3, computes=True, stall_s=30, collective_us=500)
    found = run_ranks(_run_orders, 3, told, orders, backend="", timeout_s=240)
    assert found == [sum([len(of_ranks[rank]) for of_ranks in orders]) for rank in range(3)]


# The device is through with a step after 8 ms, the host after 80.
HOST_S, WINDOW_EVERY = 0.08, 110


def _train_slowly(rank: int, parameters: Parameters, folder: str) -> None:
    """A job of DDP whose host is slow, so that no collective holds it up."""
    with on_device(rank, parameters) as device:
        model = DistributedDataParallel(torch.nn.Linear(64, 64, device=device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"first_step": 4, "every_n_steps": WINDOW_EVERY, "repeats": 2, "max_overhead": None, "spread": False}
        with attach(optimizer, model=model, causal=True, run_dir=folder, power=False, strict=True, **options):  # type: ignore[arg-type]
            for _ in range(4 + 5 * WINDOW_EVERY):
                optimizer.zero_grad()
                model(torch.ones(64, 64, device=device)).sum().backward()
                optimizer.step()
                time.sleep(HOST_S)


@pytest.mark.alone  # slack shows where steps vary little
@pytest.mark.nightly
def test_where_the_critical_path_and_delays_differ_the_page_says_that_the_host_is_late(tmp_path: Path) -> None:
    # Nothing runs beside the collective, so it is on the path of steps without delay; and yet delays cost nothing.
    run_ranks(_train_slowly, 2, Parameters(stall_s=30, **TIMES), str(tmp_path), backend="", timeout_s=240)  # type: ignore[arg-type]
    found = record.read(tmp_path)
    assert all(row.path_ms is not None and row.path_ms > 0 for window in found.causal for row in window.names)
    assert len([window for window in found.causal if window.names]) == len(found.causal) > 0
    (section,) = causal(found)
    notes = [block.text for block in section.blocks if isinstance(block, Note)]
    (words,) = [text for text in notes if "slack of at least" in text]
    assert "critical path for" in words
    assert "in undelayed steps of the same windows" in words
    assert "the step waits for the host or its input, as nothing runs on the device for " in words
