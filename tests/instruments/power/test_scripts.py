"""From a driver that follows a script to the figures: each must be the script's exact answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import overlap_callbacks.instruments.power
from overlap_callbacks.analysis.power.cause import attribute
from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.readings import Readings, Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower
from overlap_callbacks.instruments.power.amd import AmdSource
from overlap_callbacks.instruments.power.nvml import NvmlSource
from overlap_callbacks.instruments.power.source import PowerSource
from tests.instruments.power.conftest import Driver
from tests.instruments.power.test_nvml import NOT_SUPPORTED, UUIDS

S = 1_000_000_000
OVERLAPPED, SEQUENTIAL = Mode.OVERLAPPED, Mode.SEQUENTIAL
# O S S O in blocks of 4 s and 5 steps, a second of warm-up before each.
BLOCKS = ((1, 5, OVERLAPPED), (6, 10, SEQUENTIAL), (11, 15, SEQUENTIAL), (16, 20, OVERLAPPED))
SEGMENTS = [Segment(start * S, end * S, arm, 5) for start, end, arm in BLOCKS]
# 300 W overlapped, 100 W sequential; it changes in the warm-up, just after a block's end.
STEPS = ((0, 300), (5.05, 100), (15.05, 300))


def run(driver: Driver, source: PowerSource, interval_s: float = 0.1, changes: dict | None = None) -> DevicePower:
    """Read all through the script and make the figures.

    Args:
        changes: numbers to set, by the time in seconds.
    """
    readings = []
    due = sorted((changes or {}).items())
    for tick in range(round(20 / interval_s) + 1):
        time_s = tick * interval_s
        driver.at(time_s)
        while due and due[0][0] <= time_s:
            driver.set(**due.pop(0)[1])
        readings.append(source.sample())
    return power_figures(source.info, Readings.of(readings), SEGMENTS, interval_s=interval_s)


def both(figures: DevicePower):
    overlapped, sequential = figures.of(OVERLAPPED), figures.of(SEQUENTIAL)
    assert overlapped is not None
    assert sequential is not None
    return overlapped, sequential


def check_step(figures: DevicePower, method: str) -> None:
    overlapped, sequential = both(figures)
    assert (overlapped.avg_w, sequential.avg_w) == pytest.approx((300, 100))
    assert (overlapped.peak_w, sequential.peak_w) == pytest.approx((300, 100))
    assert (overlapped.p99_w, sequential.p99_w) == pytest.approx((300, 100))
    assert (overlapped.energy_per_step_j, sequential.energy_per_step_j) == pytest.approx((240, 80), rel=1e-6)
    assert (overlapped.energy_method, sequential.energy_method) == (method, method)
    assert (overlapped.num_steps, overlapped.measured_s) == (10, pytest.approx(8))
    assert (overlapped.missing, sequential.missing) == ("", "")


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"instant_rc": NOT_SUPPORTED},  # the 1 s average
        {"fields_rc": NOT_SUPPORTED, "architecture": 5},  # the old call
        {"sensor_s": 0.1},
        {"counter_width": 2**32, "counter_offset_mj": 2**32 - 1_800_000},  # wraps within the first sequential block
        {"counter_width": 2**32, "counter_offset_mj": 2**32 - 1_000_000},  # within the first overlapped one
    ],
)
def test_nvidia_a_step_between_modes_is_exact(nvml: Driver, numbers) -> None:
    nvml.power(*STEPS)
    nvml.set(**numbers)
    check_step(run(nvml, NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)), "counter")


def test_nvidia_without_a_counter_the_readings_are_as_exact(nvml: Driver) -> None:
    nvml.power(*STEPS)
    nvml.set(field_energy_rc=NOT_SUPPORTED, energy_rc=NOT_SUPPORTED)
    check_step(run(nvml, NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)), "samples")


def test_nvidia_a_counter_that_is_reset_in_a_block_is_left_out_of_it(nvml: Driver) -> None:
    nvml.power(*STEPS)
    nvml.set(counter_offset_mj=9_000_000)
    source = NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)
    figures = run(nvml, source, changes={12.05: {"counter_offset_mj": -2_000_000}})
    # The other sequential block alone has too few reads of a counter that may be 0.1 s old: the readings tell.
    check_step(figures, "samples")
    assert [mode.counted_w for mode in both(figures)] == pytest.approx([300, 100])


def test_amd_a_step_between_modes_is_exact(amdsmi: Driver) -> None:
    amdsmi.power(*STEPS)
    check_step(run(amdsmi, AmdSource("0000:20:00.0", clock_ns=amdsmi.clock_ns), interval_s=0.02), "counter")


def test_amd_with_its_average_the_readings_of_two_modes_are_left_out(amdsmi: Driver) -> None:
    amdsmi.power(*STEPS)
    amdsmi.set(current_w=0xFFFF, socket_w=0xFFFF)
    figures = run(amdsmi, AmdSource("0000:20:00.0", clock_ns=amdsmi.clock_ns), interval_s=0.02)
    check_step(figures, "counter")
    # Of each block of 4 s the last 2.4 s: three whole steps, which 1.1 s lie before.
    assert both(figures)[0].num_readings == 2 * 120


def test_constant_power_behind_a_sensor_that_repeats_itself(nvml: Driver) -> None:
    # A trapezoid over values that changed gives 0 J here.
    nvml.power((0, 250))
    nvml.set(sensor_s=0.5, counter_s=0.1)
    overlapped, sequential = both(run(nvml, NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)))
    for mode in (overlapped, sequential):
        assert (mode.avg_w, mode.peak_w) == (pytest.approx(250), 250)
        assert mode.energy_per_step_j == pytest.approx(200)
        assert mode.sampled_energy_per_step_j == pytest.approx(200)
        assert (mode.avg_tdp_fraction, mode.peak_tdp_fraction) == (pytest.approx(250 / 700), 250 / 700)


def test_readings_that_come_late_cost_no_joule_of_constant_power(nvml: Driver) -> None:
    nvml.power(*STEPS)
    nvml.set(field_energy_rc=NOT_SUPPORTED, energy_rc=NOT_SUPPORTED)
    source = NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)
    readings = []
    for tick in range(201):
        if tick % 10 in (3, 7):  # left out, as the sampler leaves out what came late
            continue
        nvml.at(tick / 10)
        readings.append(source.sample())
    figures = power_figures(source.info, Readings.of(readings), SEGMENTS, interval_s=0.1, late=40)
    check_step(figures, "samples")
    assert figures.late == 40


def test_clocks_reasons_and_use_of_each_mode_make_the_verdict(nvml: Driver) -> None:
    nvml.power(*STEPS)
    nvml.set(sm_mhz=1500, reasons=0x4, gpm_dram=30)
    slow = {"sm_mhz": 1500, "reasons": 0x4, "gpm_dram": 30}
    fast = {"sm_mhz": 1980, "reasons": 0, "gpm_dram": 20}
    source = NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)
    figures = run(nvml, source, changes={5.05: fast, 15.05: slow})
    overlapped, sequential = both(figures)
    assert (overlapped.sm_clock_mhz, sequential.sm_clock_mhz) == pytest.approx((1500, 1980))
    assert (overlapped.throttle_fraction, sequential.throttle_fraction) == (pytest.approx(1), 0)
    assert overlapped.reasons == pytest.approx({"sw_power_cap": 1.0})
    assert overlapped.parts is not None
    assert sequential.parts is not None
    assert (overlapped.parts.dram, sequential.parts.dram) == pytest.approx((0.3, 0.2))
    verdict = attribute(0.4, overlapped, sequential)
    assert verdict is not None
    assert verdict.verdict == "clock throttled by power cap"
    assert verdict.from_clock == pytest.approx(0.32)
    assert figures.max_temperature_c == 55


def test_blocks_shorter_than_the_average_have_no_figure_and_say_what_would_do(nvml: Driver) -> None:
    nvml.power(*STEPS)
    nvml.set(instant_rc=NOT_SUPPORTED, field_energy_rc=NOT_SUPPORTED, energy_rc=NOT_SUPPORTED)
    source = NvmlSource(UUIDS[0], clock_ns=nvml.clock_ns)
    readings = []
    for tick in range(101):
        nvml.at(tick / 10)
        readings.append(source.sample())
    blocks = [Segment(2 * S, round(2.6 * S), OVERLAPPED, 3), Segment(6 * S, round(6.6 * S), SEQUENTIAL, 3)]
    overlapped, sequential = both(power_figures(source.info, Readings.of(readings), blocks, interval_s=0.1))
    for mode in (overlapped, sequential):
        assert (mode.avg_w, mode.energy_per_step_j) == (None, None)
        assert mode.missing.endswith("needs 1.4 s in one mode, which takes 7 steps per block")


def test_no_source_calls_what_would_change_a_device_or_list_its_processes() -> None:
    # Beside the count of such calls that every test with a fake driver checks: calls that no test reaches.
    called = set()
    for file in Path(overlap_callbacks.instruments.power.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else ""
            )
            if isinstance(name, str) and name.startswith(("nvml", "amdsmi_")) and " " not in name:
                called.add(name)
    assert {"nvmlDeviceGetFieldValues", "nvmlGpmSampleGet", "amdsmi_get_power_info"} <= called
    allowed = ("nvmlDeviceGet", "nvmlGpm", "nvmlInit", "nvmlShutdown", "amdsmi_get_", "amdsmi_init", "amdsmi_shut_down")
    no_calls = {"nvml", "nvmlLib", "nvmlReturn", "amdsmi_interface", "amdsmi_wrapper"}
    functions = {name for name in called - no_calls if not name.endswith("_t")}  # structures are no functions
    assert not {name for name in functions if not name.startswith(allowed)}
    assert not {name for name in called if "Set" in name or "Process" in name or "Clear" in name}
    assert "amdsmi_get_violation_status" not in called
