"""Caps of power and clocks around the jobs of a study; the driver is a fake one, all else is real."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.analysis.results.outside import SWITCH
from overlap_callbacks.analysis.results.study import Configuration
from overlap_callbacks.cli._options import caps
from overlap_callbacks.experiments.caps.capped import capped
from overlap_callbacks.experiments.caps.settings import CapError, Caps
from overlap_callbacks.experiments.study.capping import capped_job, check_may_cap
from overlap_callbacks.experiments.study.plan import Asked, make_start
from overlap_callbacks.experiments.study.results import Results, open_results, read_results
from overlap_callbacks.experiments.study.runner import CannotGoOnError, Runner
from tests.commands import invoke
from tests.experiments.study.machines import CPU, H100S
from tests.instruments.power.fakes import build

needs_driver = [
    pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with"),
    pytest.mark.skipif(os.geteuid() != 0, reason="caps need root"),
]
BEFORE_W = 650.0
_STATE = struct.Struct("16d16dq64s")


class Device:
    """The fake driver's devices, and what sets their caps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.state.write_bytes(_STATE.pack(*[BEFORE_W] * 16, *[0.0] * 16, 0, b""))
        self.seen: list[float] = []

    @property
    def power_limit_w(self) -> float:
        return float(_STATE.unpack(self.state.read_bytes())[0])

    @contextlib.contextmanager
    def cap(self, wanted: Caps) -> Iterator[None]:
        with capped(wanted, folder=self.folder / "journal"):
            self.seen.append(self.power_limit_w)
            yield

    @contextlib.contextmanager
    def cap_and_fail(self, wanted: Caps) -> Iterator[None]:
        with self.cap(wanted):
            yield
        raise CapError("THE DEVICE GPU-0 IS NOT AS BEFORE")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build.nvml().parent))
    monkeypatch.setenv("FAKE_STATE", str(found.state))
    monkeypatch.delenv(SWITCH, raising=False)
    return found


def study(folder: Path, *power_caps_w: float) -> Results:
    """Small jobs on the CPU, which a user could not cap."""
    start = make_start(Asked(strategies=["ddp"], batches=[1], scale=0.01, steps=5), CPU)
    (one,) = start.configurations
    capped_ones = tuple([msgspec.structs.replace(one, power_cap_w=power_w) for power_w in power_caps_w])
    return Results(folder, msgspec.structs.replace(start, configurations=capped_ones))


class TestWithADriver:
    pytestmark = needs_driver

    def test_a_job_runs_under_its_cap_and_its_row_is_kept_whatever_comes_after(self, device: Device) -> None:
        results = study(device.folder / "study", 300.0)
        file = open_results(results.folder)
        file.write(results.start)
        runner = Runner(results, file, CPU, 120.0, around_job=lambda one: capped_job(one, device.cap_and_fail))
        with pytest.raises(CannotGoOnError, match="NOT AS BEFORE"):
            runner.run()
        file.close()
        assert (device.seen, device.power_limit_w) == ([300.0], BEFORE_W)
        (row,) = read_results(results.folder).rows
        assert row.failure is None, row.failure
        assert row.figures is not None

    def test_a_cap_that_the_device_does_not_take_is_a_row_with_its_reason(self, device: Device) -> None:
        results = study(device.folder / "study", 5000.0)
        file = open_results(results.folder)
        assert Runner(results, file, CPU, 120.0, around_job=lambda one: capped_job(one, device.cap)).run()
        file.close()
        (row,) = results.rows
        assert "must be from" in (row.failure or "")
        assert (device.seen, device.power_limit_w) == ([], BEFORE_W)


def test_what_is_interrupted_is_put_back_and_that_failing_is_said() -> None:
    @contextlib.contextmanager
    def cap(wanted: Caps) -> Iterator[None]:
        try:
            yield
        finally:
            raise CapError("type this")

    one = Configuration(model="gpt3-xl", strategy="ddp", batch=1, precision="fp32", clock_cap_mhz=1200.0)
    with pytest.raises(CannotGoOnError, match="type this"), capped_job(one, cap):
        raise KeyboardInterrupt


def test_caps_are_combined_with_everything_else() -> None:
    asked = Asked(
        strategies=["ddp"], batches=[4], power_caps_w=caps("none, 500,300.5", "--power-cap"), clock_caps_mhz=(1200.0,)
    )
    found = make_start(asked, H100S).configurations
    assert [(one.power_cap_w, one.clock_cap_mhz) for one in found] == [(None, 1200.0), (500.0, 1200.0), (300.5, 1200.0)]


@pytest.mark.parametrize("given", ["a lot", "0", "-3", "nan", "inf"])
def test_a_cap_that_is_no_number_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"--power-cap must be numbers above 0, or none, with commas between them"):
        caps(given, "--power-cap")


def test_the_command_refuses_caps_on_a_cpu_and_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke("study", "--clock-cap", "1200", "-o", str(tmp_path / "study"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.exit_code == 2
    assert "--clock-cap caps GPUs, and the ranks train on the CPU here: leave it out" in done.stderr
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="--power-cap and --clock-cap need root"):
        check_may_cap(study(tmp_path, 300.0).start.configurations)
