"""The profile of a device, written by hand for a loopback job on a CPU: what only such a profile can show, without one.

The job, its collectives, the gate with its log and the window are real. What takes the place of the hardware is the
list of Kineto's events: for each profiled step matrix products, and one communication kernel for each collective of
the gate's log. In overlapped steps they run beside each other, in sequential ones one after the other. A ``Fault``
then does to the events what the device would have done.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.experiments.loopback.collectives import KERNEL_NAMES
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background import measurement, profile_figures
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow

PRODUCT = "gemm"
_PRODUCTS = 40  # in each step
_COMPUTE_STREAM, _COMMUNICATION_STREAM, _OTHER_STREAM = 7, 20, 21
_CORRELATIONS = 1_000  # numbers of each step


@dataclass(frozen=True)
class Event:
    """One of Kineto's events; its methods are read by the library."""

    kind: str
    label: str
    begin_ns: int
    length_ns: int
    number: int
    stream: int = 0

    def activity_type(self) -> str:
        return self.kind

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.begin_ns

    def duration_ns(self) -> int:
        return self.length_ns

    def correlation_id(self) -> int:
        return self.number

    def device_resource_id(self) -> int:
        return self.stream

    def is_async(self) -> bool:
        return False

    def metadata_json(self) -> str:
        return ""


class StepEvents:
    """The events of one step; its kernels begin and end within it.

    Args:
        number: of the step in the profile.
        bounds_ns: its start and end on the host.

    Attributes:
        events: those so far.
    """

    def __init__(self, number: int, bounds_ns: tuple[int, int]) -> None:
        self.events: list[Event] = []
        self._start_ns, self._length_ns = bounds_ns[0], bounds_ns[1] - bounds_ns[0]
        self._correlation = _CORRELATIONS * (number + 1)

    def add(self, name: str, begin: float, end: float, stream: int, launched_by: str = "cudaLaunchKernel") -> None:
        """Add a kernel and its launch; ``begin`` and ``end`` are parts of the step's length."""
        self._correlation += 1
        at, until = (self._start_ns + int(part * self._length_ns) for part in (begin, end))
        self.events.append(Event("cuda_runtime", launched_by, self._start_ns + 1, 1, self._correlation))
        self.events.append(Event("kernel", name, at, until - at, self._correlation, stream))


Fault = Callable[[list[StepEvents]], list[Event]]


def whole(steps: list[StepEvents]) -> list[Event]:
    """All events: no fault."""
    return [event for step in steps for event in step.events]


def second_stream(name: str) -> Fault:
    """A kernel of this name runs on its own stream, during the communication of sequential steps."""

    def fault(steps: list[StepEvents]) -> list[Event]:
        for step in steps:
            step.add(name, 0.55, 0.9, _OTHER_STREAM)
        return whole(steps)

    return fault


def graph_replay(steps: list[StepEvents]) -> list[Event]:
    """The replay of a CUDA graph launches a communication kernel during the products of each step."""
    for step in steps:
        step.add(KERNEL_NAMES["all_reduce"], 0.0, 0.3, _OTHER_STREAM, "cudaGraphLaunch")
    return whole(steps)


def cut_off(steps: list[StepEvents]) -> list[Event]:
    """The profiler's buffers are full in the middle of the last step but one."""
    events = whole(steps)
    return events[: len(events) - len(steps[-1].events) - len(steps[-2].events) // 2]


def no_kernels(steps: list[StepEvents]) -> list[Event]:
    """Another tool holds CUPTI: the device's records go to nobody."""
    return [event for event in whole(steps) if event.kind != "kernel"]


@contextlib.contextmanager
def device_profile(fault: Fault) -> Iterator[None]:
    """Meanwhile, windows of a job on a CPU are read as if their profile were that of a device.

    Args:
        fault: turns the events of the profiled steps into what the profiler returns.
    """

    def read(
        window: MeasuredWindow, _: object, steps: Sequence[MeasuredStep], recorded: StepLog | None, own: RankWindow
    ) -> Any:
        assert window.profile is not None
        on_device = [replace(step, log=_on_device(step.log)) for step in steps]
        made = [_events(step, window.profile.bounds) for step in on_device if step.profile_index >= 0]
        profile = Profile(on_cuda=True)
        results: Any = SimpleNamespace(events=lambda: fault(made))
        profile.session = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))  # type: ignore[assignment]
        profile.bounds = window.profile.bounds
        clock = clocks.StepClock()
        clock.compute_stream = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
        seen = copy.copy(window)
        seen.profile, seen.clock = profile, clock
        kernels, problems = profile_figures.read_kernels(seen)
        if kernels is None:
            return profile_figures.ProfileFigures(own, problems)
        return profile_figures.profile_figures(seen, kernels, on_device, recorded, own)

    with (
        mock.patch.object(measurement, "profile_figures", read),
        mock.patch.object(profile_figures, "chip_of", return_value=None),
    ):
        yield


def _on_device(log: StepLog) -> StepLog:
    return replace(
        log, collectives=tuple(msgspec.structs.replace(collective, on_device=True) for collective in log.collectives)
    )


def _events(step: MeasuredStep, bounds: Sequence[tuple[int, int]]) -> StepEvents:
    made = StepEvents(step.profile_index, bounds[step.profile_index])
    for product in range(_PRODUCTS):
        made.add(PRODUCT, 0.5 * product / _PRODUCTS, 0.5 * (product + 0.9) / _PRODUCTS, _COMPUTE_STREAM)
    kernels = [KERNEL_NAMES[_KINDS[collective.operator]] for collective in step.log.collectives]
    first = 0.1 if step.plan.mode is Mode.OVERLAPPED else 0.51
    for place, name in enumerate(kernels):
        begin, end = (first + 0.4 * at / len(kernels) for at in (place, place + 0.9))
        made.add(name, begin, end, _COMMUNICATION_STREAM)
    return made


_KINDS = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}
