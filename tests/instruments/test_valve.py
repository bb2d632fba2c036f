"""The valve's numbers and its patience, on a device that is a list. On a real or simulated one: ``tests/gpu``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.instruments import valve as valves
from overlap_callbacks.instruments.valve import Valve
from tests.margins import PATIENCE_S

OWN, COMPUTE, SIDE = (SimpleNamespace(cuda_stream=number) for number in (1, 2, 3))
PATIENT_S, SHORT_S = PATIENCE_S, 0.2


class Listed:
    """Keeps what the valve enqueues, and writes numbers when told.

    Attributes:
        log: what was enqueued, in words.
        released: what the valve's owner hears, once it does.
        fails: whether the driver refuses.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.memory = torch.zeros(1, dtype=torch.int32)
        self.released: list[tuple[Any, float]] = []
        self.heard = threading.Event()
        self.fails = False
        self.valve = Valve(OWN, self.memory, self._write, self._wait)

    def _write(self, stream: int, address: int, number: int, flags: int) -> int:
        assert (address, flags) == (self.memory.data_ptr(), 0)
        self.log.append(f"{stream} writes {number}")
        return int(self.fails)

    def _wait(self, stream: int, address: int, number: int, flags: int) -> int:
        assert (address, flags) == (self.memory.data_ptr(), 0)
        self.log.append(f"{stream} waits for {number}")
        return int(self.fails)

    def order(self, what: str, *later: Any) -> None:
        self.valve.order(lambda stream: self.log.append(f"{stream.cuda_stream} waits for {what}"), later, what)

    def begin(self, patience_s: float) -> None:
        self.valve.begin(patience_s, self._on_release)

    def _on_release(self, what: Any, patience_s: float) -> None:
        self.released.append((what, patience_s))
        self.heard.set()

    def is_over(self, number: int) -> bool:
        """Whether the device would pass a wait for this number."""
        return int(self.memory.item()) >= number


@pytest.fixture
def device() -> Iterator[Listed]:
    made = Listed()
    yield made
    made.valve.close()

    def ended() -> bool:
        made.memory[0] = made.valve._number - 2**32 * (made.valve._number >= 2**31)  # the device is through
        return made.valve._thread is None or not made.valve._thread.is_alive()

    _until(ended)


def test_a_stream_of_its_own_waits_and_writes_and_then_the_others_wait_for_the_number(device: Listed) -> None:
    device.order("a", COMPUTE)
    device.order("b", COMPUTE, SIDE)
    assert device.log == [
        "1 waits for a", "1 writes 1", "2 waits for 1",
        "1 waits for b", "1 writes 2", "2 waits for 2", "3 waits for 2",
    ]  # fmt: skip


def test_where_the_driver_refuses_streams_wait_as_without_a_valve(device: Listed) -> None:
    device.fails = True
    device.order("a", COMPUTE)
    assert device.log == ["1 waits for a", "1 writes 1", "2 waits for a"]


def test_what_does_not_get_on_is_released_and_its_owner_hears_of_the_first_that_is_open(device: Listed) -> None:
    device.begin(SHORT_S)
    device.memory[0] = 1  # the device is through with the first at once
    for what in ("a", "b", "c"):
        device.order(what, COMPUTE)
    assert device.heard.wait(PATIENCE_S)
    assert device.released == [("b", SHORT_S)]
    _until(lambda: device.is_over(3))
    device.memory[0] = 2  # the device is late with this one
    _until(lambda: device.is_over(3))


def test_after_a_release_another_valve_is_made(device: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = threading.Event()
    monkeypatch.setattr(valves, "_made", SimpleNamespace(cache_clear=cleared.set))
    device.begin(SHORT_S)
    device.order("a", COMPUTE)
    assert cleared.wait(PATIENCE_S)


def test_as_long_as_numbers_come_nothing_is_released_however_long_all_of_it_takes(device: Listed) -> None:
    device.begin(patience_s := 2.0)
    for _ in range(8):
        device.order("a", COMPUTE)
    began_s = time.monotonic()
    longest_s = 0.0
    for number in range(1, 9):
        before_s = time.monotonic()
        time.sleep(patience_s / 5)
        device.memory[0] = number
        longest_s = max(longest_s, time.monotonic() - before_s)
    if longest_s > patience_s / 2:
        pytest.skip("the machine is too busy: this thread slept too long")
    assert time.monotonic() - began_s > patience_s
    assert device.released == []


def test_its_thread_ends_once_it_is_closed_and_nothing_is_open(device: Listed) -> None:
    device.begin(PATIENT_S)
    device.order("a", COMPUTE)
    (thread,) = [one for one in threading.enumerate() if one.name == "overlap-callbacks-valve"]
    device.valve.close()
    thread.join(0.3)
    assert thread.is_alive()
    device.memory[0] = 1
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    device.begin(PATIENT_S)  # again
    assert any(one.name == "overlap-callbacks-valve" for one in threading.enumerate())


def test_numbers_go_on_beyond_the_word(device: Listed) -> None:
    device.valve._number = 2**32 - 1
    device.memory[0] = -1
    device.order("a", COMPUTE)
    assert device.log[1:] == ["1 writes 0", "2 waits for 0"]
    assert not device.valve._is_over(0)
    device.memory[0] = 0
    assert device.valve._is_over(0)


def _until(condition: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
