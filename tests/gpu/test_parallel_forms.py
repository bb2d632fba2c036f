"""Each way of being data parallel, on two ranks: what a sequential step is, and that it costs the job nothing else."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_callbacks import Mode
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.gpu.dimensions import dimensions_between_ranks
from tests.gpu.jobs import ONE_WINDOW
from tests.gpu.machine import ON_CPU, backend, need_nccl, synchronize
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU
from tests.toggling import at_night

TRIED_ON_CPU = True
TIMEOUT_S = 240
NUM_STEPS = 20
# No window for as long as the test runs.
NO_WINDOW: dict[str, Any] = {**ONE_WINDOW, "every_n_steps": 10_000, "first_step": 5_000, "sinks": []}
FORMS = ("gate", "native")


def train(job: jobs.Job, monitor: Any = None) -> list[Mode]:
    """The mode of each step."""
    modes = []
    for _ in range(NUM_STEPS):
        job.forward_backward()
        if monitor is not None:
            modes.append(monitor.mode)
        job.update()
    return modes


# -- weights


def _train_in_all_ways(rank: int, kind: str) -> dict[str, str]:
    found = {}
    with jobs.job(rank, kind) as job:
        train(job)
        found["absent"] = job.digest()
    for form in FORMS:
        for forced in (False, True):
            with jobs.job(rank, kind) as job, job.attach(sequential=form, **{**ONE_WINDOW, "sinks": []}) as monitor:
                if forced:
                    monitor.force(Mode.SEQUENTIAL)
                sequential = train(job, monitor).count(Mode.SEQUENTIAL)
                # Forced: all but the recorded step, and the one under way where attach does not begin a step.
                assert sequential in ((NUM_STEPS - 2, NUM_STEPS - 1) if forced else (4 + 2,))
                monitor.close()
                found[f"{form}, {'forced' if forced else 'toggling'}"] = job.digest()
    return found


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_weights_and_losses_are_bit_identical_absent_toggling_and_forced_by_gate_and_native_form(kind: str) -> None:
    jobs.need(kind)
    for found in run_ranks(_train_in_all_ways, 2, kind, backend=backend(), timeout_s=TIMEOUT_S):
        assert len(found) == 1 + 2 * len(FORMS)
        assert set(found.values()) == {found["absent"]}


# -- overlap


def _train_a_window(rank: int, kind: str, folder: str) -> None:
    for form in FORMS:
        with (
            jobs.job(rank, kind) as job,
            job.attach(sequential=form, run_dir=Path(folder, form), **ONE_WINDOW) as monitor,
        ):
            train(job, monitor)


# On the simulated GPU, test_truth.py and the matrix have these jobs for each change, by the device's log.
@pytest.mark.parametrize("kind", at_night(jobs.KINDS, jobs.KINDS if ON_SIMULATED_GPU else ()))
def test_sequential_steps_have_no_overlap_and_overlapped_ones_have_some(tmp_path: Path, kind: str) -> None:
    need_nccl()
    jobs.need(kind)
    run_ranks(_train_a_window, 2, kind, str(tmp_path), backend=backend(), timeout_s=TIMEOUT_S)
    for form in FORMS:
        (window,) = record.read(tmp_path / form).windows
        assert window.complete, window.problems
        assert window.e2e_sequential_ms is not None
        assert window.collectives
        assert dimensions_between_ranks(window.collectives) == {"data"}
        if form == "gate":
            assert any(c.isolated_ms is not None for c in window.collectives)
        if ON_CPU:
            continue  # Gloo's collectives are synchronous in most of these jobs
        assert window.valid, window.problems
        assert window.residual_overlap is not None
        assert window.residual_overlap.value < 0.02
        assert window.overlap_ratio is not None
        assert window.overlap_ratio.value > 0.02


# -- the host


def _time_the_host(rank: int, kind: str) -> dict[str, dict[str, float]]:
    """Medians over the steps of a mode, in milliseconds; of ``host`` the least.

    A host that waits for the device does so in every step; one that the machine keeps from running, in most.

    ``calls`` is what the host spends in calls of collectives, ``host`` in the whole of a step that begins with an idle
    device, and ``step`` is the step until the device is idle again.
    """
    found: dict[Mode, list[dict[str, float]]] = {Mode.OVERLAPPED: [], Mode.SEQUENTIAL: []}
    with jobs.job(rank, kind) as job, job.attach(**NO_WINDOW) as monitor:
        train(job, monitor)
        for forced in (None, Mode.SEQUENTIAL):
            monitor.force(forced)
            # The first of a mode wait for the order check, and the allocator settles.
            for step in range(4 + 10):
                times, mode = _time_a_step(job, monitor)
                if step >= 4:
                    assert mode is (forced or Mode.OVERLAPPED)
                    found[mode].append(times)
    return {
        mode.value: {
            name: (min if name == "host" else statistics.median)(times[name] for times in steps) for name in steps[0]
        }
        for mode, steps in found.items()
    }


def _time_a_step(job: jobs.Job, monitor: Any) -> tuple[dict[str, float], Mode]:
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        job.forward_backward()
        mode = monitor.mode
        job.update()
        enqueued = time.perf_counter()
        synchronize()
        done = time.perf_counter()
    calls = [event for event in profile.events() if event.name.startswith("c10d::")]
    assert calls
    times = {
        "calls": sum(event.cpu_time_total for event in calls) / 1e3,
        "host": 1e3 * (enqueued - start),
        "step": 1e3 * (done - start),
    }
    return times, mode


# The frameworks' jobs take longest. The simulated GPU's host does the same for all of them.
@pytest.mark.parametrize("kind", at_night(jobs.KINDS, jobs.KINDS[1 if ON_SIMULATED_GPU else 2 :]))
def test_the_host_does_not_wait_for_the_device_in_sequential_steps(kind: str) -> None:
    need_nccl()
    jobs.need(kind)
    for found in run_ranks(_time_the_host, 2, kind, backend=backend(), timeout_s=TIMEOUT_S):
        overlapped, sequential = found["overlapped"], found["sequential"]
        # A host that waits for each collective spends most of its time in their calls. On a CPU it does: the measure
        # would see it.
        waits = sequential["calls"] > overlapped["calls"] + 0.2 * sequential["step"]
        assert waits is ON_CPU, found
        if (
            kind in ("ddp", "fsdp2") and not ON_CPU
        ):  # the others read a norm of the gradients, or an overflow, in each step
            assert overlapped["host"] < 0.5 * overlapped["step"], "the job is too small to tell"
            assert sequential["host"] < 1.5 * overlapped["host"] + 0.2 * sequential["step"], found
