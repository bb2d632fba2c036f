"""A power limit as an arm: each rank's own GPU, restored however the job ends. On the fake NVML; all else is real."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from overlap_callbacks import arms
from overlap_callbacks.gate.switches import RefusedError
from overlap_callbacks.instruments.caps import own_device
from overlap_callbacks.instruments.caps.capped import capped
from overlap_callbacks.instruments.caps.keeper import Journal
from overlap_callbacks.instruments.caps.own_device import OwnDevice, device_for
from overlap_callbacks.instruments.caps.settings import CapError, Caps
from overlap_callbacks.instruments.power.discovery import NVIDIA, DeviceIdentity
from tests.distributed import captured_log, die, run_alone, run_mortal_ranks, run_ranks
from tests.experiments.fake_gpus import BEFORE_W, Device, needs_driver
from tests.instruments.power.fakes import build
from tests.instruments.power.test_nvml import UUIDS
from tests.integrations import parallel_jobs as jobs
from tests.integrations.parallel_jobs import Training
from tests.margins import PATIENCE_S
from tests.monitor.jobs import tiny_schedule

pytestmark = needs_driver

STEPS = 24
OPTIONS: dict[str, Any] = {
    "schedule": tiny_schedule(6),
    "sinks": [],
    "max_overhead": None,
    "power": False,
    "strict": False,
}


@contextlib.contextmanager
def gpu(folder: str, index: int = 0, plan: str = "") -> Iterator[Device]:
    """A GPU of the fake driver as this process's own, whose calls fail by plan. Other processes see the same state."""
    os.environ["LD_LIBRARY_PATH"] = str(build.nvml().parent)  # of the keeper
    os.environ["FAKE_STATE"] = str(Path(folder, "state"))
    fake = ctypes.CDLL(str(build.nvml()))
    fake.fake_plan(plan.encode())
    device = Device(Path(folder))
    with (
        mock.patch("overlap_callbacks.gate.arms._expect_cuda"),
        mock.patch.object(own_device, "identify", return_value=DeviceIdentity(NVIDIA, uuid=UUIDS[index])),
        mock.patch.object(own_device, "default_folder", return_value=Path(folder, "journal")),
    ):
        yield device


def until_before(device: Device) -> bool:
    end = time.monotonic() + PATIENCE_S
    while set(device.limits_w[:2]) != {BEFORE_W} and time.monotonic() < end:
        time.sleep(0.05)
    return set(device.limits_w[:2]) == {BEFORE_W}


def train(rank: int, folder: str, caps_w: tuple[float, ...], how: str = "") -> dict[str, Any]:
    """Train on one GPU of the fake driver; which limits its steps had, with an arm and without."""
    with gpu(folder, rank) as device, captured_log() as lines:
        training = Training(rank, jobs.ddp)
        monitor = training.attach(arms=[arms.PowerCap(power_w) for power_w in caps_w], **OPTIONS) if caps_w else None
        found: dict[str | None, set[float]] = {}
        for _ in range(STEPS):
            training.step()
            if monitor is not None:
                limit_w = device.limits_w[rank]
                found.setdefault(monitor.arm, set()).add(limit_w)  # of the step that has begun
                if how == "killed" and limit_w != BEFORE_W:
                    die()
        if monitor is not None:
            monitor.close()
        return {"digest": training.digest(), "limits": found, "after": device.limits_w[:2], "log": "\n".join(lines)}


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def test_a_power_cap_leaves_weights_as_they_are_and_each_rank_caps_its_own_gpu(device: Device) -> None:
    plain = run_ranks(train, 2, str(device.folder), ())
    for rank, with_caps in enumerate(run_ranks(train, 2, str(device.folder), (300.0, 400.0))):
        assert with_caps["digest"] == plain[rank]["digest"]
        assert with_caps["limits"] == {None: {BEFORE_W}, "power_cap_300": {300.0}, "power_cap_400": {400.0}}
    assert device.limits_w[:2] == (BEFORE_W, BEFORE_W)


def test_the_cap_of_a_job_that_is_killed_is_put_back(device: Device) -> None:
    for rank in run_mortal_ranks(train, 2, str(device.folder), (300.0,), "killed"):
        assert not rank.returned
        assert not rank.error
    assert until_before(device)


def test_a_cap_that_the_gpu_cannot_have_is_left_out_with_one_warning(device: Device) -> None:
    ranks = run_ranks(train, 2, str(device.folder), (5000.0, 400.0))
    for rank in ranks:
        assert rank["limits"] == {None: {BEFORE_W}, "power_cap_400": {400.0}}
    (warned,) = [line for line in ranks[0]["log"].splitlines() if "is left out" in line]
    assert "the arm power_cap_5000 is left out: the power cap of GPU-" in warned


def refusals(folder: str) -> dict[str, str]:
    """Why a process cannot have a cap."""
    found = {}
    for name, plan, index, power_w in (
        ("not permitted", "f", 0, 300.0), ("already", "", 0, BEFORE_W), ("unknown", "", 7, 300.0),
    ):  # fmt: skip
        with gpu(folder, index, plan) as device, pytest.raises(CapError) as error:
            device_for(Caps(power_w=power_w))
        assert set(device.limits_w[:2]) == {BEFORE_W}
        found[name] = str(error.value)
    with gpu(folder):
        other = Journal(Path(folder, "journal"))  # an experiment on this machine
        with pytest.raises(CapError) as error:
            device_for(Caps(power_w=300.0))
        found["machine in use"] = str(error.value)
        other.close()
    return found


def test_what_cannot_be_capped_is_refused_before_anything_changes(device: Device) -> None:
    found = run_alone(refusals, str(device.folder))
    for name, words in {
        "not permitted": "nvmlDeviceSetPowerManagementLimit",
        "already": "650 W already: nothing would change",
        "unknown": "the driver knows no GPU with the UUID",
        "machine in use": "another experiment or job has capped",
    }.items():
        assert words in found[name]


def fail_in_a_step(folder: str, what: str) -> tuple[str, list[float]]:
    """What the arm's switch says if a call fails while the cap is on, and the limits afterwards."""
    with gpu(folder) as device:
        switch = arms.PowerCap(300.0).switch({})
        assert switch is not None
        if what == "not set":
            ctypes.CDLL(str(build.nvml())).fake_plan(b"l")  # said to be set, and is not
            with pytest.raises(RefusedError) as error:
                switch.apply()
            switch.restore()
            return str(error.value), list(device.limits_w[:2])
        switch.apply()
        assert device.limits_w[:2] == (300.0, BEFORE_W)
        keeper = device_for(Caps(power_w=400.0))._keeper._process
        keeper.kill()
        keeper.wait()
        with pytest.raises(RefusedError) as error:
            switch.restore()
        switch.restore()
        return str(error.value), list(device.limits_w[:2])


@pytest.mark.parametrize(
    ("what", "words"), [("not set", "was set to 300 W, and reads 650 W"), ("keeper killed", "has ended")]
)
def test_a_limit_is_put_back_where_a_call_fails(device: Device, what: str, words: str) -> None:
    said, limits_w = run_alone(fail_in_a_step, str(device.folder), what)
    assert words in said
    assert "[OC144]" in said
    assert limits_w == [BEFORE_W, BEFORE_W]


def two_owners(rank: int, folder: str) -> None:
    """Journals of several devices stand beside each other; the machine's is for one keeper alone."""
    with gpu(folder):
        first = OwnDevice(f"GPU-{UUIDS[0]}")
        second = OwnDevice(f"GPU-{UUIDS[1]}")
        with pytest.raises(CapError, match="another experiment or job"):
            OwnDevice(f"GPU-{UUIDS[1]}")
        with pytest.raises(CapError, match="another experiment or job"):
            Journal(Path(folder, "journal"))
        first.cap(Caps(power_w=300.0))
        second.cap(Caps(power_w=400.0))
        os.kill(first._keeper._process.pid, signal.SIGKILL)
        os.kill(second._keeper._process.pid, signal.SIGKILL)
        die()  # nobody is left to put anything back


def test_what_killed_keepers_left_is_put_back_by_the_next_experiment(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (killed,) = run_mortal_ranks(two_owners, 1, str(device.folder))
    assert killed.exit_code == -signal.SIGKILL, killed.error
    assert device.limits_w[:2] == (300.0, 400.0)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build.nvml().parent))
    monkeypatch.setenv("FAKE_STATE", str(device.state))
    with capped(Caps(power_w=500.0), folder=device.folder / "journal"):
        assert device.limits_w[:2] == (500.0, 500.0)
    assert device.limits_w[:2] == (BEFORE_W, BEFORE_W)
    assert not list((device.folder / "journal").glob("*.json"))
