"""Caps of power and clocks around the jobs of a study; the driver is a fake one, all else is real."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.analysis.study import Configuration
from overlap_callbacks.cli._options import caps
from overlap_callbacks.experiments import sweep
from overlap_callbacks.experiments.capping import capped_part, caps_of, check_may_cap
from overlap_callbacks.experiments.study.plan import make_start
from overlap_callbacks.experiments.study.sweep import Study
from overlap_callbacks.experiments.sweep import CannotGoOnError
from overlap_callbacks.instruments.caps.settings import CapError, Caps, Driver
from tests.commands import invoke
from tests.experiments.fake_gpus import BEFORE_W, Device, device_in, needs_driver
from tests.experiments.study.machines import CPU, H100S
from tests.margins import PATIENCE_S


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    return device_in(tmp_path, monkeypatch)


def study(folder: Path, *power_caps_w: float) -> Study:
    """Small jobs on the CPU, which a user could not cap."""
    start = make_start({"strategies": ["ddp"], "batches": [1], "scale": 0.01, "steps": 5}, CPU)
    (one,) = start.configurations
    capped_ones = tuple([msgspec.structs.replace(one, power_cap_w=power_w) for power_w in power_caps_w])
    return Study(folder, msgspec.structs.replace(start, configurations=capped_ones))


class TestWithADriver:
    pytestmark = needs_driver

    def test_a_job_runs_under_its_cap_and_its_row_is_kept_whatever_comes_after(self, device: Device) -> None:
        made = study(device.folder / "study", 300.0)
        file = made.open()
        with pytest.raises(CannotGoOnError, match=f"NOT AS BEFORE. What was measured is in {made.folder}"):
            sweep.run(made, made.trainer(CPU, device.cap_and_fail), file, timeout_s=PATIENCE_S)
        file.close()
        assert (device.seen, device.power_limit_w) == ([300.0], BEFORE_W)
        (row,) = Study.read(made.folder).lines
        assert row.failure is None, row.failure
        assert row.figures is not None

    def test_a_cap_that_the_device_does_not_take_is_a_row_with_its_reason(self, device: Device) -> None:
        made = study(device.folder / "study", 5000.0)
        file = made.open()
        assert sweep.run(made, made.trainer(CPU, device.cap), file, timeout_s=PATIENCE_S)
        file.close()
        (row,) = made.lines
        assert "must be from" in (row.failure or "")
        assert (device.seen, device.power_limit_w) == ([], BEFORE_W)


def test_interrupted_caps_are_restored_and_failures_reported() -> None:
    @contextlib.contextmanager
    def cap(wanted: Caps) -> Iterator[None]:
        try:
            yield
        finally:
            raise CapError("type this")

    one = Configuration(model="gpt3-xl", strategy="ddp", batch=1, precision="fp32", clock_cap_mhz=1200.0)
    with pytest.raises(CannotGoOnError, match="type this"), capped_part(caps_of(one), cap):
        raise KeyboardInterrupt


def test_caps_are_combined_with_everything_else() -> None:
    asked = {
        "strategies": ["ddp"],
        "batches": [4],
        "power_caps_w": caps("none, 500,300.5", "--power-cap"),
        "clock_caps_mhz": (1200.0,),
    }
    found = make_start(asked, H100S).configurations
    assert [(one.power_cap_w, one.clock_cap_mhz) for one in found] == [(None, 1200.0), (500.0, 1200.0), (300.5, 1200.0)]


@pytest.mark.parametrize("given", ["a lot", "0", "-3", "nan", "inf"])
def test_a_cap_that_is_not_a_number_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"--power-cap must be numbers above 0, or none, with commas between them"):
        caps(given, "--power-cap")


def test_the_command_refuses_caps_on_a_cpu_and_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke("study", "--clock-cap", "1200", "-o", str(tmp_path / "study"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.exit_code == 2
    assert "--clock-cap caps GPUs, and the ranks are on the CPU here: leave it out" in done.stderr
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="--power-cap and --clock-cap need root"):
        check_may_cap(study(tmp_path, 300.0).settings)


def test_caps_without_a_driver_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_driver() -> Driver:
        raise CapError("no caps: NVML is missing")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ValueError, match="need the driver's library: no caps: NVML is missing"):
        check_may_cap(study(tmp_path, 300.0).settings, find_driver)
