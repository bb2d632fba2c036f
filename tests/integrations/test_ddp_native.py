"""DDP (and FSDP, as far as a CPU shows it) made sequential by its own parts: the same weights, really sequential, and
as fast as by the gate."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks import native
from overlap_callbacks import Mode
from overlap_callbacks.integrations import _pytorch_ddp
from overlap_callbacks.integrations.pytorch import switchable
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.integrations import parallel_jobs as jobs
from tests.integrations.parallel_jobs import Job, Training

NUM_STEPS = 20
NUM_BUCKETS = 2  # four layers of 1088 bytes, in buckets that are full at 2097
TOGGLING: dict[str, Any] = {"first_step": 2, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 0}


def ddp(rank: int, **options: Any) -> Job:
    return jobs.ddp(rank, **options)


def static_graph(rank: int) -> Job:
    return jobs.ddp(rank, static_graph=True)


def unused_parameters(rank: int) -> Job:
    return jobs.ddp(rank, find_unused_parameters=True)


def gradients_as_views(rank: int) -> Job:
    return jobs.ddp(rank, gradient_as_bucket_view=True)


def fp16_hook(rank: int) -> Job:
    return jobs.ddp(rank, switchable(fp16_compress_hook))


DEFAULT = (ddp, static_graph, unused_parameters, gradients_as_views)


def _train(rank: int, make: Callable[..., Job], force: bool | None) -> str:
    training = Training(rank, make)
    with contextlib.ExitStack() as stack:
        if force is not None:
            monitor = stack.enter_context(
                training.attach(sequential="native", spread=False, every_n_steps=1000, **TOGGLING)
            )
            if force:
                monitor.force(Mode.SEQUENTIAL)
        sequential = 0
        for _ in range(NUM_STEPS):
            training.step()
            sequential += force is not None and monitor.mode is Mode.SEQUENTIAL
    assert sequential == {None: 0, False: 8, True: NUM_STEPS - 1}[force]
    return training.digest()


def _train_all_ways(rank: int, make: Callable[..., Job]) -> list[str]:
    return [_train(rank, make, force) for force in (None, False, True)]


@pytest.mark.parametrize("make", [*DEFAULT, fp16_hook, jobs.fsdp2, jobs.fsdp1])
def test_weights_are_bit_identical_without_with_and_in_forced_sequential_mode(make: Callable[..., Job]) -> None:
    for absent, toggled, forced in run_ranks(_train_all_ways, 2, make):
        assert toggled == absent
        assert forced == absent


def _count_waits(rank: int, make: Callable[..., Job]) -> list[tuple[bool, int]]:
    """Whether each step was sequential, and the buckets that were waited for in it."""
    training = Training(rank, make)
    found = []
    waits = 0
    wait = _pytorch_ddp.WaitingGroup.allreduce

    def counted(group: Any, *args: Any) -> Any:
        nonlocal waits
        work = wait(group, *args)
        assert work.is_completed()
        waits += 1
        return work

    _pytorch_ddp.WaitingGroup.allreduce = counted  # type: ignore[method-assign]
    with training.attach(sequential="native", spread=False, every_n_steps=1000, **TOGGLING) as monitor:
        for _ in range(NUM_STEPS):
            sequential, waits = monitor.mode is Mode.SEQUENTIAL, 0
            training.step()
            found.append((sequential, waits))
    return found


def test_every_bucket_of_a_sequential_step_is_waited_for_and_none_of_another() -> None:
    for steps in run_ranks(_count_waits, 2, ddp):
        assert {waits for sequential, waits in steps if not sequential} == {0}
        assert {waits for sequential, waits in steps if sequential} == {NUM_BUCKETS}


def _wait_in_hook(rank: int) -> list[tuple[bool, bool]]:
    """Whether each step was sequential, and whether its buckets were complete when the hook returned."""

    def slow(_, bucket):  # DDP compares annotations as objects, and these would be strings
        dist.all_reduce(bucket.buffer().div_(2))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        threading.Timer(0.02, future.set_result, [bucket.buffer()]).start()
        return future

    hook = switchable(slow)
    complete: list[bool] = []

    def watch(state, bucket):
        future = hook(state, bucket)
        complete.append(future.done())
        return future

    watch.overlap_switch = hook.overlap_switch  # type: ignore[attr-defined]
    training = Training(rank, jobs.ddp, hook=watch)
    found = []
    with training.attach(sequential="native", spread=False, every_n_steps=1000, **TOGGLING) as monitor:
        for _ in range(NUM_STEPS):
            sequential = monitor.mode is Mode.SEQUENTIAL
            complete.clear()
            training.step()
            found.append((sequential, all(complete)))
    return found


def test_a_switchable_hook_returns_when_its_bucket_is_complete_in_sequential_steps_alone() -> None:
    for steps in run_ranks(_wait_in_hook, 2):
        assert [complete for sequential, complete in steps if sequential] == [True] * 8
        assert not all(complete for sequential, complete in steps if not sequential)


def _record(rank: int, folder: str) -> None:
    training = Training(rank, jobs.ddp)
    options = {**TOGGLING, "spread": False, "every_n_steps": 1000, "repeats": 1, "profiled_steps": 4}
    monitor = training.attach(sequential="native", sinks=None, run_dir=folder, **options)
    for _ in range(3 + monitor.schedule.window_steps):
        training.step()
    monitor.close()


def test_compute_never_overlaps_communication_in_natively_sequential_steps(tmp_path: Path) -> None:
    run_ranks(_record, 2, str(tmp_path))
    (window,) = record.read(tmp_path).windows
    assert window.complete
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05 or not window.valid


@pytest.mark.nightly  # ``tests/gpu/test_native_agrees.py`` has it on a device, which may be simulated
def test_gate_and_native_form_agree_on_the_sequential_step_time() -> None:
    found = run_ranks(native.compare, 2, 4)[0]  # 8 windows each
    gate, own = (found[form]["e2e_sequential_ms"] for form in native.FORMS)
    assert gate.low <= own.high
    assert own.low <= gate.high
