"""Power in a job of two processes: the real bindings, on a fake driver whose power follows the mode of each step.

Steps, the driver and the sampler have a simulated time, so each reading comes when it is due however busy the machine
is. Only what is held against the profiler, whose clock is the machine's, takes real time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode, OverlapMonitor, OverlapReport, Schedule
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.power.discovery import NVIDIA, DeviceIdentity
from overlap_callbacks.instruments.power.nvml import NvmlSource
from overlap_callbacks.instruments.power.sampler import Sampler
from overlap_callbacks.monitor import session
from tests.distributed import captured_log, run_ranks
from tests.instruments.power.conftest import Driver
from tests.instruments.power.fakes import build
from tests.instruments.power.test_nvml import UUIDS
from tests.margins import near
from tests.monitor.jobs import KeptReports, Training, wait_until

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with")

WATTS = {Mode.OVERLAPPED: 400.0, Mode.SEQUENTIAL: 300.0}
CLOCK_MHZ = {Mode.OVERLAPPED: 1400, Mode.SEQUENTIAL: 1700}
SW_POWER_CAP = 4
BLOCK_S, STEP_S = 0.3, 0.03


class _Time:
    """The time of a rank and of its fake driver, and the sleep of its sampler. It passes in ``passes`` alone.

    The sampler's own thread reads: at each tick that is due, time waits until it sleeps again.

    Args:
        driver: has the same time.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._changed = threading.Condition()
        self._now_ns = 10**9
        self._due_ns: int | None = None  # when the sampler, which sleeps, has to wake; None while it is awake
        self._woken = False

    def now(self) -> int:
        return self._now_ns

    def passes(self, seconds: float) -> None:
        end_ns = self._now_ns + round(1e9 * seconds)
        while self._now_ns < end_ns:
            with self._changed:
                while self._due_ns is None and _sampler_runs():
                    self._changed.wait(0.05)
                self._now_ns = max(self._now_ns, min(end_ns, self._due_ns or end_ns))
                self._driver.at(self._now_ns / 1e9)
                if self._due_ns is not None and self._due_ns <= self._now_ns:
                    self._due_ns = None
                    self._changed.notify_all()

    def acquire(self, blocking: bool = True, timeout: float = 0.0) -> bool:
        with self._changed:
            due_ns = self._now_ns + round(1e9 * timeout)
            while not self._woken and self._now_ns < due_ns:
                self._due_ns = due_ns
                self._changed.notify_all()
                self._changed.wait()
            self._due_ns = None
            woken, self._woken = self._woken, False
            return woken

    def release(self) -> None:
        with self._changed:
            self._woken, self._due_ns = True, None
            self._changed.notify_all()


def _sampler_runs() -> bool:
    return any(thread.name == "overlap-callbacks-power" for thread in threading.enumerate())


class _Device:
    """The fake driver, turned by hand between steps.

    Args:
        read: the devices that this rank reads.
        simulated: whether time is.
    """

    def __init__(self, read: list[int], *, simulated: bool = True) -> None:
        self.driver = Driver(build.nvml())
        self._mode: Mode | None = None
        self.driver.set(manual=simulated, base_w=WATTS[Mode.OVERLAPPED])
        # torch knows no GPU here
        session.devices_to_read = lambda per_node: [DeviceIdentity(NVIDIA, uuid=UUIDS[n], name="fake") for n in read]
        if simulated:
            self.time = _Time(self.driver)
            self.driver.at(self.time.now() / 1e9)
            self._simulate()

    def _simulate(self) -> None:
        time, init = self.time, Sampler.__init__

        def sampler(self: Sampler, *args: Any, **options: Any) -> None:
            init(self, *args, **{**options, "clock_ns": time.now})
            self._sleep = time  # type: ignore[assignment]

        clocks.now = time.now
        Sampler.__init__ = sampler  # type: ignore[method-assign]
        NvmlSource.__init__.__kwdefaults__["clock_ns"] = time.now

    def follow(self, mode: Mode) -> None:
        for device in range(2) if mode is not self._mode else ():  # the driver keeps so many changes and no more
            self.driver.power((self.time.now() / 1e9, WATTS[mode]), device=device)
        self._mode = mode
        self.driver.set(sm_mhz=CLOCK_MHZ[mode], reasons=SW_POWER_CAP if mode is Mode.OVERLAPPED else 0)


def _schedule(**options: Any) -> Schedule:
    # 12 steps take 0.36 s, and a reading is of the last 0.225 s.
    usual = {"blocks": "OS", "repeats": 2, "warmup_steps": 1, "steps_per_block": 12, "profiled_steps": 0}
    return Schedule(**{"every_n_steps": 70, "first_step": 2, **usual, **options})


def _length_s(step: int) -> float:
    """Of a step. Equal steps of a third of the sensor's 0.1 s would show it three places of a step only."""
    return STEP_S * (0.7 + 0.6 * (step * 0.618 % 1))


def _train(
    rank: int, devices: list[list[int]], schedule: Schedule, lose: bool = False, windows: int = 1
) -> dict[str, Any]:
    device, opened = _Device(devices[rank]), False
    training, sink = Training(rank), KeptReports()
    with captured_log() as lines:
        monitor = OverlapMonitor(
            schedule, [sink], max_overhead=None, power_interval_s=0.01, tokens_per_step=1000, strict=True
        )
        for step in range(2 + windows * schedule.every_n_steps):
            if step == 1 + schedule.every_n_steps:  # what comes next goes by the report of the window before
                wait_until(lambda: rank != 0 or bool(sink.reports))
                dist.barrier()
            with monitor.step(step):
                device.follow(monitor.mode)
                training.step()
                if devices[rank] and monitor.in_window and not opened:
                    wait_until(_sampler_runs)  # opening the driver takes real time
                    opened = True
                device.time.passes(_length_s(step))
            if lose and monitor.in_window:
                device.driver.set(lost=1)
        active = monitor.active
        monitor.close()
    return {"reports": sink.reports, "lines": lines, "active": active, "open": device.driver.open}


def _report(found: list[dict[str, Any]]) -> OverlapReport:
    (report,) = found[0]["reports"]
    assert report.valid
    assert report.complete
    return report


@pytest.mark.parametrize(("devices", "total"), [([[0], [1]], 2), ([[0], [0]], 1), ([[0, 1], []], 2)])
def test_each_mode_has_its_own_watts_joules_and_clocks_and_a_shared_device_counts_once(devices, total) -> None:
    # Long enough for the sensor, which looks for 25 ms in 100, to see each place of a step.
    found = run_ranks(_train, 2, devices, _schedule(steps_per_block=40, every_n_steps=180), timeout_s=60)
    report = _report(found)
    power = report.power
    assert power is not None
    assert power.num_devices == total
    assert power.ranks + power.without == (0, 1)
    metrics = report.metrics()
    for mode in Mode:
        of_mode = power.of(mode)
        assert of_mode is not None
        # Exactly: no reading that reaches into another mode counts.
        for watts in (of_mode.mean_avg_w, of_mode.peak_w, of_mode.p99_w, metrics[f"power/{mode.value}_avg_w"]):
            assert watts == pytest.approx(WATTS[mode], rel=1e-9)
        assert of_mode.total_avg_w == pytest.approx(total * WATTS[mode], rel=1e-9)
        assert of_mode.avg_tdp_fraction == pytest.approx(WATTS[mode] / 700)
        assert of_mode.sm_clock_mhz == pytest.approx(CLOCK_MHZ[mode], rel=0.01)
        joules = metrics[f"power/{mode.value}_energy_per_step_j"]
        step_s = metrics[f"overlap/e2e_{mode.value}_ms"] / 1e3
        assert joules > 0.98 * total * WATTS[mode] * step_s  # and what lies between the steps
        for device in [device for rank in report.samples for device in rank.power]:
            own = device.of(mode)
            assert own is not None
            assert own.energy_per_step_j is not None
            assert own.energy_per_step_j * own.energy_steps == pytest.approx(WATTS[mode] * own.measured_s, rel=0.05)
        assert metrics[f"power/{mode.value}_energy_per_token_j"] == joules / 1000
    assert metrics["gpu/overlapped_power_cap_fraction"] > 0.95
    assert metrics["gpu/sequential_power_cap_fraction"] < 0.05
    assert metrics["gpu/overlapped_throttle_fraction"] == metrics["gpu/overlapped_power_cap_fraction"]
    assert report.power_trace is not None
    assert {segment.mode for segment in report.power_trace.segments} == set(Mode)
    assert [rank["open"] for rank in found] == [0, 0]
    assert [rank["lines"] for rank in found] == [[], []]


def test_blocks_have_the_requested_length_on_every_rank() -> None:
    schedule = _schedule(steps_per_block=1, min_block_seconds=BLOCK_S)
    report = _report(run_ranks(_train, 2, [[0], [1]], schedule, timeout_s=60))
    lengths = {rank.rank: [len(block.step_ms) for block in rank.timed] for rank in report.samples}
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) == 1
    # Rank 0 went by steps before the blocks, which take from 0.7 to 1.3 of STEP_S.
    assert BLOCK_S / (1.3 * STEP_S) <= lengths[0][0] <= BLOCK_S / (0.7 * STEP_S) + 1
    assert report.num_steps >= 1 + 4 * (1 + lengths[0][0])


def test_blocks_that_are_too_short_give_no_power_and_say_how_many_steps_would_do() -> None:
    report = _report(run_ranks(_train, 2, [[0], [1]], _schedule(steps_per_block=1), timeout_s=60))
    assert not any(key.startswith("power/") for key in report.metrics())
    assert any("steps per block" in problem for problem in report.problems)
    assert report.metrics()["gpu/sequential_sm_clock_mhz"] == pytest.approx(CLOCK_MHZ[Mode.SEQUENTIAL], rel=0.01)


def test_blocks_that_are_too_short_are_followed_by_long_ones_in_the_next_window() -> None:
    schedule = _schedule(steps_per_block=1, every_n_steps=600)
    found = run_ranks(_train, 2, [[0], [1]], schedule, False, 2, timeout_s=120)
    before, after = found[0]["reports"]
    assert not any(key.startswith("power/") for key in before.metrics())
    assert before.complete
    assert after.complete
    assert after.num_steps > 2 * 6.0 / STEP_S > before.num_steps
    # The step times of both windows are of as many blocks.
    assert [len(sample.timed) for sample in (*before.samples, *after.samples)] == [4] * 4
    for mode in Mode:
        assert after.power.of(mode).mean_avg_w == pytest.approx(WATTS[mode], rel=1e-6)
        assert after.power.of(mode).energy_per_step_j == pytest.approx(2 * WATTS[mode] * STEP_S, rel=0.05)
    # The long blocks are part of the steps by which the settled difference is told.
    assert after.samples[0].series.modes.lower().endswith("s" * 201 + "o" * schedule.steps_around(1))


def test_a_device_that_is_lost_costs_its_figures_and_one_line() -> None:
    found = run_ranks(_train, 2, [[0], [1]], _schedule(), True, timeout_s=60)
    for rank in found:
        assert rank["active"]
        (line,) = rank["lines"]
        assert "power is no longer measured" in line
    report = _report(found)
    assert report.e2e_sequential_ms is not None


def _train_without_power(rank: int) -> tuple[list[str], dict[str, float]]:
    import logging

    training, sink = Training(rank), KeptReports()
    schedule = _schedule(steps_per_block=1, every_n_steps=12)
    with captured_log(logging.INFO) as lines:
        monitor = OverlapMonitor(schedule, [sink], max_overhead=None, strict=True)
        for step in range(schedule.first_step + schedule.every_n_steps):
            with monitor.step(step):
                training.step()
        monitor.close()
    (metrics,) = [report.metrics() for report in sink.reports] or [{}]
    return [line for line in lines if "power" in line], metrics


def test_without_a_source_all_goes_on_and_one_line_says_so() -> None:
    for rank, (lines, metrics) in enumerate(run_ranks(_train_without_power, 2)):
        if any(key.startswith("power/") for key in metrics):
            pytest.skip("this CPU tells its energy")
        assert len(lines) == (rank == 0)
        if rank == 0:
            assert "overlap/e2e_sequential_ms" in metrics


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"power": 1}, TypeError, "power must be True or False, got 1"),
        ({"power_interval_s": 0.0001}, ValueError, "power_interval_s must be at least 0.001 s, got 0.0001"),
        ({"power_interval_s": "1"}, TypeError, "power_interval_s must be"),
        (
            {"power_interval_s": 0.1, "power_idle_interval_s": 0.05},
            ValueError,
            r"power_idle_interval_s must be at least power_interval_s \(0.1\), got 0.05",
        ),
        ({"tokens_per_step": 0}, ValueError, "tokens_per_step must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused_by_name(options, error, message) -> None:
    with pytest.raises(error, match=message):
        OverlapMonitor(sinks=[], **options)


def _compute(rank: int, schedule: Schedule) -> dict[str, Any]:
    """Steps that compute for most of their time, and then wait while the clock rises."""
    device = _Device([rank], simulated=False)
    training, sink = Training(rank), KeptReports()
    factor = torch.ones(600, 600)
    monitor = OverlapMonitor(schedule, [sink], max_overhead=None, power_interval_s=0.005, strict=True)
    for step in range(schedule.first_step + schedule.every_n_steps):
        with monitor.step(step):
            training.step()
            device.driver.set(sm_mhz=CLOCK_MHZ[monitor.mode])
            until_s = time.monotonic() + 0.04
            while time.monotonic() < until_s:
                torch.mm(factor, factor)
            device.driver.set(sm_mhz=1980)
            time.sleep(0.04)
    monitor.close()
    return {"reports": sink.reports}


@pytest.mark.alone  # the one that measures real time
def test_the_clock_in_compute_is_that_of_compute_not_of_the_time_between() -> None:
    schedule = _schedule(blocks="OS", repeats=1, steps_per_block=8, profiled_steps=4, every_n_steps=42)
    (report,) = run_ranks(_compute, 2, schedule, timeout_s=90)[0]["reports"]
    assert report.power is not None
    for mode in Mode:
        of_mode = report.power.of(mode)
        assert of_mode is not None
        assert of_mode.compute_clock_readings >= 5
        # A reading that a busy machine holds up between the driver and its time may be of the other. So the clock in
        # compute may be higher than the known one; that of whole steps, half of which wait, is higher still.
        assert of_mode.compute_clock_mhz >= 0.99 * CLOCK_MHZ[mode]
        assert near(of_mode.compute_clock_mhz - CLOCK_MHZ[mode], of_mode.sm_clock_mhz - CLOCK_MHZ[mode])
        assert of_mode.compute_clock_mhz < of_mode.sm_clock_mhz
    trace = report.power_trace
    assert trace is not None
    assert all(start < end for start, end in trace.both)
