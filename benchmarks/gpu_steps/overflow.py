"""A profile that is cut off, and one to which CUPTI gives nothing: both must be noticed."""

from __future__ import annotations

import ctypes
import signal
import time
from typing import Any

import torch

from gpu_steps import figures
from gpu_steps.figures import Recorder
from gpu_steps.runner import Step, run_step
from overlap_callbacks.instruments.profiler import Profile, may_end_the_process

_COUNTS = (30_000, 300_000, 600_000)
# What a figure proves that may fail by Kineto's limit alone.
KNOWN_FAULT = "with this build of torch, reaching Kineto's limit may end the process: no fault of the library"


def run(record: Recorder) -> None:
    many = run_step(Step("many", "gpu_steps.overflow:many_kernels", "", 180), on_cpu=record.on_cpu, own_group=False)
    known = is_known_fault(many.error)
    for line in many.output:
        print(line)
    for figure in many.figures:
        record.copy(figure)
    for name, value in many.raw.items():
        record.raw(name, value)
    record.raw("many kernels: ended", many.error)
    record.figure(
        "profiles of many kernels: ran to their end", not many.error,
        proves=KNOWN_FAULT if known else many.error, expect=None if known else figures.YES,
    )  # fmt: skip
    # Kineto subscribes once in a process: another subscriber must be there first, so in a process of its own.
    taken = run_step(
        Step("taken", "gpu_steps.overflow:with_other_subscriber", "", 90), on_cpu=record.on_cpu, own_group=False
    )
    for line in taken.output:
        print(line)
    for figure in taken.figures:
        record.copy(figure)
    record.raw("other subscriber", taken.raw | {"error": taken.error})
    record.figure("another subscriber does not crash the profile", not taken.error, expect=figures.YES)


def is_known_fault(error: str) -> bool:
    """Whether a process that may reach Kineto's limit ended as such a process may with this torch.

    Args:
        error: of the process; empty if it came to its end.
    """
    crashed = error == f"was ended by {signal.SIGSEGV.name}"
    return crashed and may_end_the_process(torch.__version__, torch.version.cuda)


def many_kernels(record: Recorder) -> None:
    """Profile ever more kernels; in a process of its own, which Kineto's limit may end."""
    for count in (1_000,) if record.on_cpu else _COUNTS:
        check_many_kernels(record, count)


def check_many_kernels(record: Recorder, count: int) -> None:
    """Profile ``count`` tiny kernels: is the profile whole, and if not, does torch say so?"""
    tensor = torch.zeros(1, device="cpu" if record.on_cpu else "cuda")
    profile = Profile(on_cuda=not record.on_cpu)
    profile.start()
    profile.begin_step()
    for _ in range(count):
        tensor.neg_()
    profile.end_step()
    if not record.on_cpu:
        torch.cuda.synchronize()
    asked = getattr(torch.autograd, "_is_kineto_stopped", None)
    stopped = None if asked is None else bool(asked())  # the question comes too late once the session has ended
    start = time.perf_counter()
    profile.stop()
    stop_ms = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    table = profile.kernels()
    read_ms = 1e3 * (time.perf_counter() - start)
    recorded = len(table)
    found = {"launched": count, "recorded": recorded, "stopped": stopped, "stop_ms": stop_ms, "read_ms": read_ms}
    record.raw(f"{count} kernels", found)
    record.figure(f"{count} kernels: recorded", recorded / count, "of all")
    record.figure(f"{count} kernels: reading the events", read_ms, "ms of the reporting thread")
    record.figure(
        f"{count} kernels: all recorded, or torch says that it stopped", recorded == count or stopped is True,
        proves="a profile that was cut off can be noticed", expect=figures.YES,
    )  # fmt: skip


def with_other_subscriber(record: Recorder) -> None:
    """Hold CUPTI as another tool does, then profile; in a process of its own."""
    if not record.on_cpu:
        status = subscribe()
        record.raw("cuptiSubscribe returned", status)
        record.figure("another subscriber of CUPTI is there", status == 0, expect=figures.YES)
    a = torch.randn(64, 64, device="cpu" if record.on_cpu else "cuda")
    a @ a
    profile = Profile(on_cuda=not record.on_cpu)
    profile.start()
    profile.begin_step()
    for _ in range(100):
        a.neg_()
    profile.end_step()
    if not record.on_cpu:
        torch.cuda.synchronize()
    profile.stop()
    recorded = int((profile.kernels().step == 0).sum())
    record.figure(
        "kernels recorded beside another subscriber, of 100", recorded,
        proves="a profile beside another tool is whole or empty, never a part",
        expect=figures.Expectation("0 or 100", lambda number: number in (0, 100)),
    )  # fmt: skip


_kept: list[Any] = []  # CUPTI keeps the pointers


def subscribe() -> int:
    """Subscribe to CUPTI, for no callback at all; the CUptiResult."""
    torch.cuda.init()
    version = str(torch.version.cuda).split(".", maxsplit=1)[0]
    cupti = ctypes.CDLL(f"libcupti.so.{version}")  # torch has loaded it: it is found by its name
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)(lambda *_: None)
    handle = ctypes.c_void_p()
    _kept.extend((cupti, callback, handle))
    return int(cupti.cuptiSubscribe(ctypes.byref(handle), callback, None))
