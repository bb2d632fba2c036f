"""Every order in which a driver can fail: the device ends as it was, or a person is told what to type.

On the fake NVML and the fake AMD SMI, in a process of its own, because a process loads one library of a name.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_callbacks.instruments.caps import settings
from overlap_callbacks.instruments.caps.drivers import find_driver
from overlap_callbacks.instruments.caps.keeper import Journal, Keeper
from overlap_callbacks.instruments.caps.settings import RESTORE_TRIES, CapError, Caps
from tests.distributed import run_alone
from tests.instruments.power.fakes import build
from tests.toggling import at_night

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with")

BEFORE_W = 650.0
_MEMORY = Path("/dev/shm")
CAPS = {
    "power": Caps(power_w=300.0),
    "clocks": Caps(clock_mhz=1200),
    "both": Caps(power_w=300.0, clock_mhz=1200),
}


class _Vendor(NamedTuple):
    """What differs between the vendors' drivers.

    Attributes:
        library: builds the fake.
        tells_clocks: whether it reports that clocks are capped.
        undo: how what a person types begins.
    """

    library: Callable[[], Path]
    tells_clocks: bool
    undo: str


VENDORS = {"nvml": _Vendor(build.nvml, False, "nvidia-smi -i"), "amdsmi": _Vendor(build.amdsmi, True, "amd-smi ")}
each_vendor = pytest.mark.parametrize("vendor", VENDORS)


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder that no disk has: some thousand journals are written there."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield folder


class _Fake:
    """The fake driver, with a keeper before it."""

    def __init__(self, library: str, folder: Path) -> None:
        self._fake = ctypes.CDLL(library)
        self._fake.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._fake.fake_locked_mhz.restype = self._fake.fake_limit_w.restype = ctypes.c_double
        self._fake.fake_set(b"gpus", 2.0)
        self.driver = find_driver()
        self.journal = Journal(folder)
        self.said: list[str] = []
        self.uuids = self.driver.uuids()

    def keeper(self, plan: str) -> Keeper:
        """A keeper of devices with caps of ``BEFORE_W``, which then fail by plan."""
        self._fake.fake_plan(b"")
        for uuid in self.uuids:
            self.driver.set_power_limit(uuid, BEFORE_W)
            self.driver.unlock_clocks(uuid)
        self.journal.clear()
        self.said.clear()
        self._fake.fake_plan(plan.encode())
        return Keeper(self.driver, self.journal, self.said.append)

    def level(self, level: int) -> None:
        """The performance level that somebody has set."""
        self._fake.fake_set(b"level", level)

    def mend(self) -> None:
        """From here on the driver does all that it is asked."""
        self._fake.fake_plan(b"")

    def state(self) -> list[tuple[float, float]]:
        """As it is, whether or not it can be read."""
        return [(self._fake.fake_limit_w(g), self._fake.fake_locked_mhz(g)) for g in range(len(self.uuids))]


def orders(kind: str) -> list[str]:
    """What becomes of each call: all orders of four calls in a row wherever they stand, and drivers that fail for good.

    A cap of both sets four values and puts four back; of one, two.
    """
    rows = ["".join(plan) for plan in itertools.product("ofldr", repeat=4)]
    starts = range(5 if kind == "both" else 1)
    found = {"o" * start + row for start in starts for row in rows}
    found |= {start + tail * 60 for start in ("", "o", "oo", "ooo", "oooo", "of") for tail in "flr"}
    return sorted({plan[:63] for plan in found})


def every_order(vendor: str, library: str, folder: str) -> tuple[int, int, list[str]]:
    settings._RETRY_S = 0.0
    fake = _Fake(library, Path(folder))
    as_before = [(BEFORE_W, 0.0)] * 2
    tried = loud = 0
    wrong: list[str] = []
    for kind, plan in [(cap, order) for cap in CAPS for order in orders(cap)]:
        keeper = fake.keeper(plan)
        tried += 1
        try:
            keeper.cap([], CAPS[kind])
            told = keeper.restore()
        except CapError as error:
            told = str(error)
        if fake.state() == as_before:
            continue
        loud += 1
        # NVML does not tell whether clocks are locked: that it says it has unlocked them and has not is not seen.
        is_unseen = kind != "power" and "l" in plan and not VENDORS[vendor].tells_clocks
        if is_unseen and all(power_w == BEFORE_W for power_w, _ in fake.state()):
            continue
        if len(plan) < RESTORE_TRIES * 2:
            wrong.append(
                f"{kind} {plan}: {fake.state()}, although the driver takes what it is asked in the end; {told!r}"
            )
            continue
        if "NOT AS BEFORE" not in told or VENDORS[vendor].undo not in told or not fake.said:
            wrong.append(f"{kind} {plan}: {fake.state()}, and said {told!r}")
            continue
        # What the driver refuses now is in the journal, and the next keeper does it.
        fake.mend()
        Keeper(fake.driver, fake.journal, fake.said.append).recover()
        if fake.state() != as_before:
            wrong.append(f"{kind} {plan}: not put back by the next keeper")
    return tried, loud, wrong


@each_vendor
def test_in_every_order_of_failures_the_value_is_as_before_or_it_is_said_loudly(vendor: str, memory: str) -> None:
    tried, loud, wrong = run_alone(every_order, vendor, str(VENDORS[vendor].library()), memory, timeout_s=200)
    assert wrong == []
    assert tried == sum(len(orders(kind)) for kind in CAPS)
    assert tried > 3700
    assert loud  # the orders in which the driver refuses for good are among them


def deaths(kind: str) -> list[str]:
    """A keeper that is killed in each of its calls, before or after it was done; also after one failure."""
    before = ["o" * calls for calls in range(8 if kind == "both" else 4)]
    if kind == "both":
        before += [s[:at] + what + s[at + 1 :] for s in tuple(before) for at in range(len(s)) for what in "fldr"]
    return [start + death for start in before for death in "kK"]


def every_death(library: str, folder: str) -> tuple[int, list[str]]:
    settings._RETRY_S = 0.0
    state = Path(folder, "state")
    state.write_bytes(bytes(4096))
    os.environ["FAKE_STATE"] = str(state)  # shared with the processes that die
    fake = _Fake(library, Path(folder))
    killed = 0
    wrong: list[str] = []
    for kind, plan in [(cap, order) for cap in CAPS for order in deaths(cap)]:
        keeper = fake.keeper(plan)
        child = os.fork()
        if child == 0:
            try:
                keeper.cap([], CAPS[kind])
                keeper.restore()
            except CapError:
                keeper.restore()
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        fake.mend()
        Keeper(fake.driver, fake.journal, fake.said.append).recover()
        # That NVML said it has unlocked clocks and has not is not seen.
        seen = [power_w for power_w, _ in fake.state()] if "l" in plan and kind != "power" else fake.state()
        if seen not in ([(BEFORE_W, 0.0)] * 2, [BEFORE_W] * 2):
            wrong.append(f"{kind} {plan}: {fake.state()}")
    return killed, wrong


# What puts back is the same for both vendors.
@pytest.mark.parametrize("vendor", at_night(VENDORS, ["amdsmi"]))
def test_a_keeper_may_be_killed_in_any_call_and_the_next_one_puts_back(vendor: str, memory: str) -> None:
    killed, wrong = run_alone(every_death, str(VENDORS[vendor].library()), memory, timeout_s=200)
    assert wrong == []
    assert killed > 150  # in some orders fewer calls are needed


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


@each_vendor
def test_what_a_device_does_not_take_is_refused_with_its_range(vendor: str, tmp_path: Path) -> None:
    found = run_alone(refusals, str(VENDORS[vendor].library()), str(tmp_path))
    watts, mhz = {"nvml": ("200 to 700", "210 to 1980"), "amdsmi": ("200 to 750", "132 to 2100")}[vendor]
    assert f"must be from {watts} W, got 900" in found["high"]
    assert f"must be from {mhz} MHz, got 10" in found["low"]
    assert "another experiment or job has capped devices" in found["second"]


def set_by_hand(library: str, folder: str) -> str:
    fake = _Fake(library, Path(folder))
    keeper = fake.keeper("")
    fake.level(3)
    try:
        keeper.cap([], CAPS["both"])
    except CapError as error:
        assert fake.state() == [(BEFORE_W, 0.0)] * 2
        return str(error)
    return "it was capped"


def test_clocks_that_somebody_has_set_are_left_alone(tmp_path: Path) -> None:
    told = run_alone(set_by_hand, str(build.amdsmi()), str(tmp_path))
    assert "are set by hand (performance level MANUAL): free them by amd-smi reset --gpu" in told


def no_driver() -> str:
    try:
        find_driver()
    except CapError as error:
        return str(error)
    return "there is one"


def test_without_a_driver_it_is_said_of_each_vendor_what_is_missing() -> None:
    told = run_alone(no_driver)
    assert "NVML" in told
    assert "libamd_smi.so" in told
