"""A device that runs nothing: it keeps what is enqueued on its streams, and which of it must come before which.

The stand-ins have the calls of ``torch.Stream`` and ``torch.Event`` that the gate uses. Work is a number, and
an edge leads from each piece of work to those that cannot start before it is done.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from overlap_callbacks.instruments import device

DEVICE = torch.device("cuda", 0)


class Device:
    """Keeps the order of all work of its streams, and a log of their calls.

    Attributes:
        log: the calls, in words.
        current: the stream that is current.
        capturing: whether it captures a graph.
        events: events recorded so far.
        asked: what the library asks of it.
    """

    def __init__(self, *names: str) -> None:
        self.log: list[str] = []
        self.streams = {name: Stream(self, name) for name in names}
        self.current = next(iter(self.streams.values()))
        self.capturing = False
        self.events = 0
        self._numbers = itertools.count()
        self._before: dict[int, set[int]] = defaultdict(set)

    def install(self, monkeypatch: Any) -> None:
        """Have the library use this device."""
        self.asked = SimpleNamespace(
            kind=DEVICE.type,
            is_initialized=lambda: True,
            is_capturing=lambda: self.capturing,
            current_stream=lambda of: self.current,
            mark=lambda stream: stream.record_event("mark"),
        )
        monkeypatch.setattr(device, "accelerator", lambda: self.asked)

    def add(self, before: set[int]) -> int:
        """New work that comes after ``before``."""
        number = next(self._numbers)
        self._before[number] = set(before)
        return number

    @property
    def all_work(self) -> dict[int, set[int]]:
        """All work, and what each piece of it comes directly after."""
        return dict(self._before)

    def is_before(self, first: int, second: int) -> bool:
        """Whether ``first`` must be done before ``second`` starts."""
        todo, seen = [second], set()
        while todo:
            for number in self._before[todo.pop()] - seen:
                if number == first:
                    return True
                seen.add(number)
                todo.append(number)
        return False


class Stream:
    """Stands for ``torch.Stream``."""

    def __init__(self, device: Device, name: str, of: torch.device = DEVICE) -> None:
        self.name, self.device = name, of
        self._device = device
        self._after: set[int] = set()  # what the next work on the stream comes after

    def enqueue(self) -> int:
        """A kernel."""
        number = self._device.add(self._after)
        self._after = {number}
        return number

    def record_event(self, kind: str = "event") -> Event:
        self._device.events += 1
        self._device.log.append(f"{kind} on {self.name}")
        return Event(self, frozenset(self._after))

    def wait_event(self, event: Event) -> None:
        self._device.log.append(f"{self.name} waits for {event.stream.name}")
        self._after |= event.work

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass(frozen=True, eq=False)
class Event:
    """Stands for ``torch.Event``."""

    stream: Stream
    work: frozenset[int]


class Work:
    """Stands for a ``Work`` of NCCL: its kernel is on a stream of the communicator, after the issuing stream."""

    def __init__(self, device: Device, communicator: Stream) -> None:
        self._device = device
        communicator._after |= device.current._after
        self.number = communicator.enqueue()

    def wait(self) -> None:
        self._device.log.append("current stream waits for the work")
        self._device.current._after |= {self.number}
