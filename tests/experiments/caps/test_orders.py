"""Every order in which a driver can fail: the device ends as it was, or a person is told what to type.

On the fake NVML, in a process of its own, because a process loads one library of a name.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from pathlib import Path

import pytest

from overlap_callbacks.experiments.caps import settings
from overlap_callbacks.experiments.caps.journal import Journal
from overlap_callbacks.experiments.caps.keeper import Keeper
from overlap_callbacks.experiments.caps.nvml import NvmlDriver
from overlap_callbacks.experiments.caps.settings import RESTORE_TRIES, CapError, Caps
from tests.distributed import run_alone
from tests.instruments.power.fakes import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with")

BEFORE_W = 650.0
CAPS = {
    "power": Caps(power_w=300.0),
    "clocks": Caps(clock_mhz=1200),
    "both": Caps(power_w=300.0, clock_mhz=1200),
}


class _Fake:
    """The fake driver, with a keeper before it."""

    def __init__(self, library: str, folder: Path) -> None:
        self._fake = ctypes.CDLL(library)
        self._fake.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._fake.fake_locked_mhz.restype = ctypes.c_double
        self._fake.fake_set(b"gpus", 2.0)
        self.driver = NvmlDriver()
        self.journal = Journal(folder)
        self.said: list[str] = []
        self.uuids = self.driver.uuids()

    def keeper(self, plan: str) -> Keeper:
        """A keeper of devices that stand as ``BEFORE_W`` says, and then fail by plan."""
        self._fake.fake_plan(b"")
        for uuid in self.uuids:
            self.driver.set_power_limit(uuid, BEFORE_W)
            self.driver.unlock_clocks(uuid)
        self.journal.clear()
        self.said.clear()
        self._fake.fake_plan(plan.encode())
        return Keeper(self.driver, self.journal, self.said.append)

    def mend(self) -> None:
        self._fake.fake_plan(b"")

    def state(self) -> list[tuple[float, float]]:
        return [(self.driver.power_limit_w(u), self._fake.fake_locked_mhz(g)) for g, u in enumerate(self.uuids)]


def every_order(library: str, folder: str) -> tuple[int, int, list[str]]:
    settings._RETRY_S = 0.0
    fake = _Fake(library, Path(folder))
    as_before = [(BEFORE_W, 0.0)] * 2
    tried = loud = 0
    wrong: list[str] = []
    plans = ["".join(plan) for plan in itertools.product("ofld", repeat=4)]
    plans += [start + tail * 60 for start in ("", "o", "oo", "ooo", "oooo", "of") for tail in "fl"]
    for (kind, caps), plan in itertools.product(CAPS.items(), plans):
        keeper = fake.keeper(plan)
        tried += 1
        try:
            keeper.cap([], caps)
            told = keeper.restore()
        except CapError as error:
            told = str(error)
        if fake.state() == as_before:
            continue
        loud += 1
        # A driver that says it has unlocked the clocks and has not cannot be caught at it: it does not tell.
        if kind != "power" and "l" in plan and all(power_w == BEFORE_W for power_w, _ in fake.state()):
            continue
        if "NOT AS BEFORE" not in told or "nvidia-smi -i" not in told or not fake.said:
            wrong.append(f"{kind} {plan}: {fake.state()}, and said {told!r}")
            continue
        # What the driver refuses now is in the journal, and the next keeper does it.
        fake.mend()
        Keeper(fake.driver, fake.journal, fake.said.append).recover()
        if fake.state() != as_before:
            wrong.append(f"{kind} {plan}: not put back by the next keeper")
    return tried, loud, wrong


def test_in_every_order_of_failures_the_value_is_as_before_or_it_is_said_loudly(tmp_path: Path) -> None:
    tried, loud, wrong = run_alone(every_order, str(build.nvml()), str(tmp_path))
    assert wrong == []
    assert tried == 3 * (4**4 + 12)
    assert loud  # the orders in which the driver refuses for good are among them


def refusals(library: str, folder: str) -> dict[str, str]:
    fake = _Fake(library, Path(folder))
    found = {}
    for name, caps in (("high", Caps(power_w=900.0)), ("low", Caps(clock_mhz=10))):
        keeper = fake.keeper("")
        try:
            keeper.cap([], caps)
        except CapError as error:
            found[name] = str(error)
    try:
        Journal(Path(folder))
    except CapError as error:
        found["second"] = str(error)
    begun_s = time.monotonic()
    assert RESTORE_TRIES > 1
    keeper = fake.keeper("off")  # putting back fails twice, and then works
    keeper.cap(fake.uuids[:1], CAPS["power"])
    assert keeper.restore() == ""
    assert fake.state() == [(BEFORE_W, 0.0)] * 2
    assert time.monotonic() > begun_s
    return found


def test_what_a_device_does_not_take_is_refused_with_its_range(tmp_path: Path) -> None:
    found = run_alone(refusals, str(build.nvml()), str(tmp_path))
    assert "must be from 200 to 700 W, got 900" in found["high"]
    assert "must be from 210 to 1980 MHz, got 10" in found["low"]
    assert "another experiment has capped devices" in found["second"]
