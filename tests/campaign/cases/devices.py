"""Faults of a GPU, of NCCL, CUPTI and NVML, which the simulated device has at a moment chosen by chance."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.campaign.case import CASES, ON_DEVICES, Case, Job, case
from tests.campaign.cases.endings import CUT_SHORT, FAR, train_on
from tests.campaign.cases.stores import train_and_close
from tests.campaign.job import Rank, Training, device_of, kept

# Of the first two windows or between them. DDP has a collective more in its first step.
_COLLECTIVES_A_STEP, _KERNELS_A_STEP = 3, 30
# What ranks end with that lose their device, or a rank that they wait for: their own call may fail first, or NCCL's
# watchdog may end them.
_BACKEND_ERROR = "torch.distributed.DistBackendError"
_LOST = tuple(
    f"{code}{error and ' '}{error}"
    for code in ("-SIGABRT", "1")
    for error in ("", "RuntimeError", "torch.AcceleratorError", _BACKEND_ERROR, "ncclRemoteError")
)
_PAUSE_S = 4.0


def _at(fault: str, chance: random.Random, point: str = "collective") -> str:
    a_step = _COLLECTIVES_A_STEP if point == "collective" else _KERNELS_A_STEP
    return f"{fault}@{point}={chance.randint(3 * a_step, 34 * a_step)}"


def _enter(
    name: str, what: str, fault: str, point: str = "", run: Callable[[Rank], None] = train_on, **attributes: Any
) -> None:
    def faults(chance: random.Random) -> str:
        return _at(fault, chance, point) if point else fault

    CASES[name] = Case(name, ON_DEVICES, what, run, faults=faults, **{"device_runs": 3, **attributes})


_ENDS: dict[str, Any] = {
    "record": "maybe", "ends": True, "says": CUT_SHORT, "may_be_silent": True, "also": _LOST, "limit_s": 120.0,
}  # fmt: skip
_ENDS_SLOWLY = {**_ENDS, "nightly": "it waits for NCCL's watchdog, as another case does"}


def _kill_after_the_others(job: Job, chance: random.Random) -> None:
    """A launcher ends the rank that stopped once the other has ended."""
    job.await_end(0)
    job.signal(1, signal.SIGKILL)


def _wake_after_a_pause(job: Job, chance: random.Random) -> None:
    if job.await_stop(1):
        time.sleep(_PAUSE_S)
        job.signal(1, signal.SIGCONT)


_enter("dies-in-collective", "rank 1 is killed in a collective of NCCL", "1:signal=9", "collective", **_ENDS)
_enter(
    "stops-in-collective", "rank 1 stops for good in a collective of NCCL: the watchdog ends rank 0",
    "1:signal=19", "collective", disturb=_kill_after_the_others, **_ENDS_SLOWLY,
)  # fmt: skip
_enter(
    "pauses-in-collective", f"rank 1 stops in a collective of NCCL, and goes on after {_PAUSE_S:.0f} s",
    "1:signal=19", "collective", train_and_close, disturb=_wake_after_a_pause, bound_s=25.0,
    says=r"a window has no sequential steps|a window is left out", may_be_silent=True,
)  # fmt: skip
_enter("nccl-error", "an asynchronous error of NCCL on rank 1", "1:nccl=6", "collective", **_ENDS)


def abort_and_raise(rank: Rank, handling: str = "2") -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = handling
    rank.start()
    training = Training(rank.number)
    kept.append(training)
    kept.append(rank.attach(training))
    for step in range(FAR):
        training.step()
        weights = training.digest()
        # Of an aborted collective nothing is left but garbage. This one raises then, before weights are noted.
        dist.all_reduce(torch.zeros(1, device=device_of(rank.number)))
        rank.note(str(step), weights)


def tear_down(rank: Rank) -> None:
    abort_and_raise(rank, "1")


_enter(
    "nccl-error-raised", "the same with `TORCH_NCCL_ASYNC_ERROR_HANDLING=2`: the next collective raises", "1:nccl=6",
    "collective", abort_and_raise, **_ENDS_SLOWLY,
)  # fmt: skip
_enter(
    "nccl-error-torn-down", "the same with `1`: the watchdog aborts the communicators too", "1:nccl=6",
    "collective", tear_down, **_ENDS_SLOWLY,
)  # fmt: skip
for _name, _error, _what in (
    ("device-lost", 719, "the device of rank 1 is lost: unspecified launch failure"),
    ("device-ecc", 214, "the same: uncorrectable ECC error"),
    ("device-unavailable", 46, "the same: busy or unavailable"),
):  # fmt: skip
    _enter(
        _name,
        _what,
        f"1:device={_error}",
        "kernel",
        **(_ENDS if _error == 719 else _ENDS_SLOWLY),
    )

_enter(
    "sensors-lost", "NVML reports that the GPU of rank 1 is lost", "1:sensors=15", "collective", train_and_close,
    says=r"power is no longer measured: the GPU is lost",
)  # fmt: skip

# Each window says what its profile lacks, and of which ranks.
_PROFILE: dict[str, Any] = {
    "in_record": True, "sentences": 6,
    "says": r"profile ends before|profiled steps were left out|kernel times are missing",
}  # fmt: skip
_enter(
    "cupti-overflow", "CUPTI's buffers overflow: it drops records", "overflow=150", run=train_and_close, **_PROFILE,
)  # fmt: skip
_enter(
    "cupti-lost", "one of 50 kernels has no record", "lost_records=50", run=train_and_close, **_PROFILE,
)  # fmt: skip
_enter(
    "cupti-late", "records of the last 5 ms come with the next profile", "late_records=5000",
    run=train_and_close, **_PROFILE,
)  # fmt: skip
_enter(
    "cupti-held", "another subscriber holds CUPTI", "cupti_held=1", run=train_and_close,
    **{**_PROFILE, "says": r"the profiler saw no kernels", "sentences": 1},
)  # fmt: skip


_TIMED_STEP, _PROFILED_STEP = 5, 8  # of the first window


@case(
    "raises-with-collective", ON_DEVICES, "rank 0 raises in a profiled step, while a collective waits for rank 1",
    device_runs=3, record="maybe", ends=True, says=CUT_SHORT, may_be_silent=True,
)  # fmt: skip
def raise_with_collective(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    with contextlib.suppress(KeyError), monitor if rank.library else contextlib.nullcontext():
        rank.train(training, _PROFILED_STEP)
        if rank.number == 0:
            training.step()
            raise KeyError("of the user")
        time.sleep(_PAUSE_S)
    os._exit(3)


def _fill_memory(rank: Rank) -> None:
    """Ask the device for more than it has left."""
    torch.empty(2**40, dtype=torch.uint8, device=device_of(rank.number))


@case(
    "out-of-memory", ON_DEVICES, "the device of rank 1 has no memory left for a step", device_runs=3, **_ENDS_SLOWLY,
)  # fmt: skip
def run_out_of_memory(rank: Rank) -> None:
    step = rank.some_step()
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    within = {step: functools.partial(_fill_memory, rank)} if rank.number == 1 else {}
    rank.train(training, 60, within)
    monitor.close()


@case(
    "out-of-memory-skipped", ON_DEVICES, "all ranks run out of memory in a step, and leave it out",
    device_runs=3, says=r"", may_be_silent=True,
)  # fmt: skip
def leave_out_without_memory(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    rank.train(training, _TIMED_STEP)
    try:
        training.step(functools.partial(_fill_memory, rank))
    except torch.cuda.OutOfMemoryError:
        training.num_steps += 1
    rank.train(training, 60 - _TIMED_STEP)
    monitor.close()


def _check_without_memory(rank: Rank, *, taken: bool) -> None:
    rank.start()
    training = Training(rank.number, width=_WIDE)
    device = device_of(rank.number)
    batch = torch.ones(8, 16, device=device)
    rank.train(training, 3)
    if rank.number == 1:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                kept.append(torch.empty(_WIDE, _WIDE, device=device))
        if taken and rank.library:
            from overlap_callbacks.instruments import device as devices

            devices.free_bytes = lambda device, share: float(total)  # as before another process took the memory
    repeat: dict[str, Any] = {"repeat_step": lambda: training.model(batch).square().mean().backward()}
    monitor = rank.attach(training, model=training.model, check_gradients=True, **repeat)
    rank.train(training, 18)
    monitor.close()


_WIDE = 384  # a layer's gradient then fills most of a block of the allocator's
_NO_MEMORY: dict[str, Any] = {"device_runs": 3, "bound_s": 25.0}


@case(
    "race-without-memory", ON_DEVICES, "rank 1 has no memory for the race check (`set_per_process_memory_fraction`)",
    says=r"no step was checked: cuda:1 has not the memory", **_NO_MEMORY,
)  # fmt: skip
def check_without_memory(rank: Rank) -> None:
    _check_without_memory(rank, taken=False)


@case(
    "race-memory-taken", ON_DEVICES, "another process takes it before the race check can",
    says=r"no step was checked: what a repeated step may change could not be held: CUDA out of memory", **_NO_MEMORY,
)  # fmt: skip
def check_with_memory_taken(rank: Rank) -> None:
    _check_without_memory(rank, taken=True)
