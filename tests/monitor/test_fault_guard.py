"""What becomes of errors of our own, without a job."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import MisuseError
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.monitor.faults import FaultGuard, Notices
from tests.distributed import captured_log


class Owner:
    """Stands for the monitor: notes what the guard asks of it."""

    def __init__(self, strict: bool) -> None:
        self.asked: list[str] = []
        self.guard = FaultGuard(
            Notices(), Gate(), strict=strict, stop=self.note_stop, fail=self.note_fail, wake=self.note_wake
        )

    def note_stop(self) -> None:
        self.asked.append("stop")

    def note_fail(self) -> None:
        self.asked.append("fail")

    def note_wake(self) -> None:
        self.asked.append("wake")


def fail(message: str = "broken") -> None:
    raise KeyError(message)


def test_in_production_the_first_error_warns_and_none_is_raised() -> None:
    owner = Owner(strict=False)
    with captured_log() as lines:
        owner.guard.run(fail)
        owner.guard.run(fail, message="again")
    assert owner.asked == ["fail", "fail"]
    assert lines == [
        "overlap-callbacks: an internal error switched measuring off, training goes on: KeyError('broken') [OC113]"
    ]


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    ],
)
def test_an_error_of_the_device_or_of_a_collective_is_no_bug(error: Exception) -> None:
    owner = Owner(strict=False)
    owner.guard.report(error)
    with captured_log() as lines:
        owner.guard.run(owner.guard.raise_reported)
    said = str(error).splitlines()[0]
    assert lines == [
        f"overlap-callbacks: the device or a collective failed, and measuring is switched off: {said} [OC128]"
    ]


def test_in_strict_mode_an_error_is_raised_after_measuring_was_switched_off() -> None:
    owner = Owner(strict=True)
    with captured_log() as lines, pytest.raises(KeyError, match="broken"):
        owner.guard.run(fail)
    assert (owner.asked, lines) == (["fail"], [])


def test_misuse_switches_nothing_off() -> None:
    owner = Owner(strict=False)
    with captured_log() as lines:
        for _ in range(2):
            owner.guard.run(owner.guard.misuse, "end", "step_end without step_begin")
    assert (owner.asked, lines) == ([], ["overlap-callbacks: step_end without step_begin"])
    strict = Owner(strict=True)
    with pytest.raises(MisuseError):
        strict.guard.run(strict.guard.misuse, "end", "step_end without step_begin")
    assert strict.asked == []


def test_what_a_thread_reports_waits_for_the_training_thread_and_is_raised_once() -> None:
    owner = Owner(strict=True)
    owner.guard.report(KeyError("of a thread"))
    assert owner.asked == ["wake"]
    assert owner.guard.pending
    with pytest.raises(KeyError, match="of a thread"):
        owner.guard.run(owner.guard.raise_reported)
    assert not owner.guard.pending
    owner.guard.run(owner.guard.raise_reported)
    owner.guard.report(KeyError("of a report that was queued behind it"))
    owner.guard.run(owner.guard.raise_reported)
    assert owner.asked == ["wake", "fail", "wake"]


def test_an_owner_that_was_dropped_is_neither_kept_alive_nor_needed() -> None:
    owner = Owner(strict=False)
    guard, reference = owner.guard, weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None
    with captured_log() as lines:
        guard.report(KeyError("late"))
        guard.switch_off("alone", "there is one rank")
    assert lines == ["overlap-callbacks: there is one rank"]
