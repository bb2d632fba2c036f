"""What the gate costs the host and the device for one collective: recorded, and serialised.

The collectives are kernels of the loopback link that do nothing, so that all the time is overhead. On the device they
are timed behind a kernel that sleeps until the host has enqueued them all.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gpu_steps import figures
from gpu_steps.figures import Recorder
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence
from tests.gpu.loopback import LoopSettings, open_job

COUNTS = (1, 10, 100, 1000)
_QUEUED = (10, 50)  # few enough for the device's queue
_SLEEP_CYCLES = 150_000_000  # some 80 ms
_ROUNDS = 9


@dataclass(frozen=True)
class Form:
    """A way in which collectives are issued.

    Attributes:
        name: in the figures.
        asynchronous: on the communicator's own stream; else on the issuing one.
        streams: issuing streams in turn; 0 for the compute stream itself.
    """

    name: str
    asynchronous: bool
    streams: int


FORMS = (
    Form("async, from the compute stream (DDP)", True, 0),
    Form("sync, on the compute stream (tensor parallelism)", False, 0),
    Form("async, from another stream", True, 1),
    Form("sync, on another stream (FSDP2)", False, 1),
    Form("sync, on 3 other streams in turn", False, 3),
)


def run(record: Recorder) -> None:
    device = "cpu" if record.on_cpu else "cuda"
    with open_job(LoopSettings(device, ctas=1, gb_s=math.inf)) as link:
        # No other thread communicates, and this one begins no step but those below.
        gate = Gate()
        gate.register()
        bench = Bench(gate, link.device)
        for form in FORMS[:2] if record.on_cpu else FORMS:
            check_form(record, bench, form)
        gate.close()


class Bench:
    """Issues collectives in and out of steps.

    Args:
        gate: registered.
        device: of the tensors.
    """

    def __init__(self, gate: Gate, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.tensor = torch.zeros(4, device=device)
        self._gate = gate
        self._others = [torch.cuda.Stream() for _ in range(3)] if self.on_cuda else []
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    @contextlib.contextmanager
    def step(self, mode: str) -> Iterator[None]:
        """A step that is ``recorded`` or ``serialised``; or none (``absent``: the gate is registered and off)."""
        if mode != "absent":
            self._gate.begin_step(
                sequential=mode == "serialised",
                expected=ExpectedSequence(single_group=self._group),
                compute_stream=torch.cuda.current_stream() if self.on_cuda else None,
            )
        try:
            yield
        finally:
            if mode != "absent":
                log = self._gate.end_step()
                assert log.divergence is None, log.divergence
                assert not log.not_serialised, log.not_serialised
                if mode == "serialised":
                    assert all(collective.start is not None for collective in log.collectives)

    def issue(self, form: Form, count: int) -> Any:
        """Issue ``count`` collectives; the last one's work."""
        work = None
        streams = self._others[: form.streams]
        for i in range(count):
            if streams:
                with torch.cuda.stream(streams[i % len(streams)]):
                    work = dist.all_reduce(self.tensor, async_op=form.asynchronous)
            else:
                work = dist.all_reduce(self.tensor, async_op=form.asynchronous)
        return work

    def host_us(self, form: Form, mode: str, count: int) -> float:
        """Host time of one collective."""
        if self.on_cuda:
            torch.cuda.synchronize()
        with self.step(mode):
            start = time.perf_counter_ns()
            self.issue(form, count)
            elapsed_ns = time.perf_counter_ns() - start
        return elapsed_ns / count / 1e3

    def device_us(self, form: Form, mode: str, count: int) -> float | None:
        """Time of ``count`` collectives on the device; None if the host was too slow to enqueue them in time."""
        torch.cuda.synchronize()
        compute = torch.cuda.current_stream()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.step(mode):
            torch.cuda._sleep(_SLEEP_CYCLES)
            start.record(compute)
            for stream in self._others:
                stream.wait_event(start)  # no collective begins before the sleep is over
            work = self.issue(form, count)
            if work is not None:
                work.wait()
            for stream in self._others:
                compute.wait_stream(stream)
            end.record(compute)
            in_time = not start.query()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end) if in_time else None


def check_form(record: Recorder, bench: Bench, form: Form) -> None:
    modes = ("absent", "recorded", "serialised")
    host: dict[str, dict[int, float]] = {mode: {} for mode in modes}
    for count in COUNTS[:2] if record.on_cpu else COUNTS:
        rounds: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(_ROUNDS):
            for mode in modes:
                rounds[mode].append(bench.host_us(form, mode, count))
        for mode in modes:
            host[mode][count] = statistics.median(rounds[mode])
    record.raw(f"{form.name}, host us a collective, by mode and number", host)
    most = max(host["absent"])
    for mode, limit in (("recorded", 15.0), ("serialised", 60.0)):
        record.figure(
            f"{form.name}: host, {mode}, added to a collective", host[mode][most] - host["absent"][most], "us",
            proves="what a measured step costs the host", expect=None if record.on_cpu else figures.below(limit),
        )  # fmt: skip
    if not record.on_cpu:
        check_device(record, bench, form, modes)


def check_device(record: Recorder, bench: Bench, form: Form, modes: tuple[str, ...]) -> None:
    by_mode: dict[str, float | None] = {}
    for mode in modes:
        few, many = (_median(partial(bench.device_us, form, mode, count)) for count in _QUEUED)
        by_mode[mode] = None if few is None or many is None else (many - few) / (_QUEUED[1] - _QUEUED[0])
    record.raw(f"{form.name}, device us a collective, by mode", by_mode)
    alone, serialised = by_mode["absent"], by_mode["serialised"]
    record.figure(
        f"{form.name}: device, serialised, added to a collective",
        None if alone is None or serialised is None else serialised - alone, "us",
        proves="how much longer sequential steps are made by the waits themselves", expect=figures.below(20.0),
    )  # fmt: skip


def _median(measure: Callable[[], float | None]) -> float | None:
    found = [value for value in (measure() for _ in range(_ROUNDS)) if value is not None]
    return statistics.median(found) if found else None
