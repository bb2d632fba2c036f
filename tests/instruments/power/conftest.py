"""Fake drivers, each test in a process of its own.

A process loads one library of a name, once: the fake one must not reach tests that use a real driver, and each test
wants a driver that was not initialised before. So a test that asks for a fake driver runs in a fork of this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.instruments.power.fakes import build

FAKES = {"nvml": "libnvidia-ml", "old_nvml": "libnvidia-ml", "amdsmi": "libamd_smi"}
FORKED = {*FAKES, "fork"}


class Driver:
    """A fake driver, loaded: the script that it follows.

    Args:
        library: its path.
    """

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self.library.fake_power.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
        for name in ("fake_calls", "fake_writes", "fake_open"):
            getattr(self.library, name).restype = ctypes.c_long
        self.time_s = 0.0
        self.set(manual=1)

    def set(self, **numbers: float) -> None:
        """Set numbers of the script by name."""
        for name, value in numbers.items():
            assert self.library.fake_set(name.encode(), float(value)) == 0, f"no number {name}"

    def power(self, *steps: tuple[float, float], device: int = 0) -> None:
        """Power from a time on, in seconds and watts, ascending."""
        for at_s, watts in steps:
            assert self.library.fake_power(device, at_s, watts) == 0

    def at(self, time_s: float) -> None:
        """Set the time, of the driver and of ``clock_ns``."""
        self.time_s = time_s
        self.set(now_s=time_s)

    def clock_ns(self) -> int:
        return round(self.time_s * 1e9)

    @property
    def calls(self) -> int:
        """Calls on devices so far."""
        return int(self.library.fake_calls())

    @property
    def writes(self) -> int:
        """Calls that would change a device, or that must not be made for their cost."""
        return int(self.library.fake_writes())

    @property
    def open(self) -> int:
        """How often it was initialised and not shut down."""
        return int(self.library.fake_open())


def _load(library: Path) -> Iterator[Driver]:
    driver = Driver(library)
    yield driver
    assert driver.writes == 0  # whatever a test did, it changed nothing


@pytest.fixture
def nvml() -> Iterator[Driver]:
    yield from _load(build.nvml())


@pytest.fixture
def old_nvml() -> Iterator[Driver]:
    yield from _load(build.nvml(old_driver=True))


@pytest.fixture
def amdsmi() -> Iterator[Driver]:
    yield from _load(build.amdsmi())


@pytest.fixture
def fork() -> None:
    """Run this test in a process of its own."""


def _why_not(item: pytest.Item) -> str:
    """Why a test with a fake driver cannot run here; empty where it can."""
    wanted = FORKED.intersection(getattr(item, "fixturenames", ()))
    if wanted & set(FAKES):
        if build.compiler() is None:
            return "no C compiler to build the fake driver with"
        mapped = Path("/proc/self/maps").read_text()
        for name in wanted & set(FAKES):
            if FAKES[name] in mapped:
                return f"a real {FAKES[name]} is loaded in this process: run tests/power on its own"
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not FORKED.intersection(getattr(item, "fixturenames", ())):
        return None
    why_not = _why_not(item)
    if why_not:
        item.add_marker(pytest.mark.skip(reason=why_not))
        return None
    if {"nvml", "old_nvml"} & set(item.fixturenames):  # type: ignore[attr-defined]
        build.nvml()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_in_fork(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # fixtures of a module that ends here, set up in this process
    return True


def _run_in_fork(item: pytest.Item) -> list[pytest.TestReport]:
    hook = item.config.hook
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: the child uses none of the parent's
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            # As if its module went on: what other tests have set up (a browser, say) is the parent's to take down.
            reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]
            data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
            with os.fdopen(writer, "w") as pipe:
                json.dump(data, pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
    except BaseException:  # a time-out, say
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return [hook.pytest_report_from_serializable(config=item.config, data=data) for data in json.loads(text)]
    died: Any = f"the test's process ended with {status}"
    return [pytest.TestReport(item.nodeid, item.location, {}, "failed", died, "call")]
