from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.readings import Readings, Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.instruments.power.amd import AmdSource, AmdTick
from overlap_callbacks.instruments.power.discovery import DeviceIdentity, NoPower, find_source, from_properties
from overlap_callbacks.instruments.power.source import DeviceLostError, PowerError, PowerUnavailableError
from tests.instruments.power.conftest import Driver
from tests.instruments.power.fakes import build

NOT_SUPPORTED, BUSY, NOT_FOUND = 2, 30, 31
NA = 0xFFFF


def source_of(driver: Driver, device: int = 0) -> AmdSource:
    return AmdSource(f"0000:{0x20 + device:02x}:00.0", clock_ns=driver.clock_ns)


def test_a_reading_says_what_the_script_says(amdsmi: Driver) -> None:
    amdsmi.power((0, 200), (10, 500))
    source = source_of(amdsmi)
    amdsmi.at(12.0)
    reading = source.sample()
    assert (reading.power_w, reading.averaging_s) == (500, pytest.approx(0.121))
    assert reading.energy_j == pytest.approx(200 * 10 + 500 * 2, abs=3e-5)  # the counter counts 15.25 uJ
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz) == (2100, 1300)
    assert (reading.temperature_c, reading.limit_w) == (61, 750)
    assert (source.info.name, source.info.device_name, source.info.power_kind) == (
        "amdsmi",
        "AMD Instinct Fake",
        "instantaneous",
    )
    assert source.info.device_id == "000abcff-74a1-1000-80e5-000000000000"
    assert (source.info.tdp_w, source.info.has_energy, source.info.default_interval_s) == (750, True, 0.02)
    assert source.info.notes == ()
    source.close()
    source.close()
    assert amdsmi.open == 0


@pytest.mark.parametrize(
    ("numbers", "kind", "averaging_s"),
    [
        ({}, "instantaneous", 0.121),
        ({"current_w": NA}, "instantaneous", 0.121),  # 7.x: socket_power
        ({"current_w": NA, "socket_w": NA}, "average, over a time that AMD does not publish", 1.101),
        ({"current_w": 0, "socket_w": 0}, "average, over a time that AMD does not publish", 1.101),
        # All ones in 32 bits, which the package does not take for "N/A", and what a wrong layout yields.
        ({"current_w": 2**32 - 1, "socket_w": 123_456}, "average, over a time that AMD does not publish", 1.101),
    ],
)
def test_which_power_it_is_is_named_and_what_cannot_be_true_is_missing(amdsmi, numbers, kind, averaging_s) -> None:
    amdsmi.power((0, 321))
    amdsmi.set(**numbers)
    source = source_of(amdsmi)
    assert (source.info.power_kind, source.info.averaging_s) == (kind, pytest.approx(averaging_s))
    assert source.sample().power_w == 321


def test_a_device_without_any_power_that_can_be_true_is_refused(amdsmi: Driver) -> None:
    amdsmi.set(current_w=NA, socket_w=NA, average_w=NA)
    with pytest.raises(PowerUnavailableError, match="AMD Instinct Fake gives AMD SMI no power that can be true"):
        source_of(amdsmi)
    assert amdsmi.open == 0


def test_the_die_of_an_mi250_without_a_sensor_is_refused_and_the_other_is_marked(amdsmi: Driver) -> None:
    amdsmi.set(mi250=1)
    source = source_of(amdsmi)
    assert source.info.notes == (
        "power and energy are of both dies of the AMD Instinct MI250X: the other one has no sensor",
    )
    source.close()
    amdsmi.power((0, 0), device=1)
    with pytest.raises(PowerUnavailableError, match="second die of an AMD Instinct MI250X"):
        source_of(amdsmi, 1)


def test_partitions_of_a_socket_are_read_as_the_socket_and_count_once(amdsmi: Driver) -> None:
    amdsmi.set(partitions=1)
    for device in range(2):
        amdsmi.power((0, 600), device=device)  # each reports the power of the socket
    sources = [AmdSource(f"0000:20:00.{function}", clock_ns=amdsmi.clock_ns) for function in range(2)]
    assert len({source.info.device_id for source in sources}) == 1
    assert [source.sample().power_w for source in sources] == [600, 600]
    for source in sources:
        assert "of the whole AMD Instinct Fake, of which the device is a partition (CPX)" in source.info.notes[0]


def test_a_partition_without_a_sensor_has_the_power_of_the_first(amdsmi: Driver) -> None:
    amdsmi.set(partitions=1)
    amdsmi.power((0, 600))
    amdsmi.power((0, 0), device=1)
    assert AmdSource("0000:20:00.1", clock_ns=amdsmi.clock_ns).sample().power_w == 600


def test_a_socket_that_is_one_device_is_not_called_a_partition(amdsmi: Driver) -> None:
    sources = [source_of(amdsmi, device) for device in range(2)]
    assert len({source.info.device_id for source in sources}) == 2
    assert [source.info.notes for source in sources] == [(), ()]


def test_a_counter_at_zero_does_not_exist(amdsmi: Driver) -> None:
    amdsmi.set(counter_offset=-1)
    source = source_of(amdsmi)
    assert not source.info.has_energy
    assert source.sample().energy_j is None


def test_a_counter_that_runs_backwards_leaves_gaps_and_never_shrinks(amdsmi: Driver) -> None:
    source = source_of(amdsmi)
    energies = []
    for second in range(1, 6):
        amdsmi.at(second)
        amdsmi.set(counter_offset=-30e6 if second == 3 else 0)
        energies.append(source.sample().energy_j)
    known = [energy for energy in energies if energy is not None]
    assert energies[2] is None
    assert len(known) == 4
    assert known == sorted(known)


def test_a_narrow_counters_wrap_is_taken_out(amdsmi: Driver) -> None:
    amdsmi.set(counter_offset=2**32 - 1000 * 1e6 / 15.25)  # 1000 J, 5 s, below the end of 32 bits
    source = source_of(amdsmi)
    amdsmi.at(4.0)
    before = source.sample().energy_j
    amdsmi.set(counter_offset=-1000 * 1e6 / 15.25)
    amdsmi.at(6.0)
    after = source.sample().energy_j
    assert before == pytest.approx(800, abs=1e-3)
    assert after == pytest.approx(1200, abs=1e-3)


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"energy_rc": NOT_SUPPORTED}, "energy_j"),
        ({"clock_rc": NOT_SUPPORTED}, "sm_clock_mhz"),
        ({"cap_rc": NOT_SUPPORTED}, "limit_w"),
        ({"temperature": 0}, "temperature_c"),
        ({"metrics_rc": NOT_SUPPORTED}, "reasons"),
    ],
)
def test_what_a_device_does_not_support_is_absent_and_the_rest_is_there(amdsmi: Driver, numbers, field) -> None:
    amdsmi.set(counter=1, **numbers)
    source = source_of(amdsmi)
    source.sample()
    amdsmi.at(0.1)
    amdsmi.set(counter=2)
    reading = source.sample()
    assert getattr(reading, field) is None
    others = {"power_w", "energy_j", "sm_clock_mhz", "limit_w", "temperature_c", "reasons"} - {field}
    assert all(getattr(reading, other) is not None for other in others)


@pytest.mark.parametrize(("said", "temperature_c"), [(61, 61), (61_000, 61)])
def test_temperature_is_in_degrees_whatever_the_release_says(amdsmi: Driver, said, temperature_c) -> None:
    amdsmi.set(temperature=said)
    assert source_of(amdsmi).sample().temperature_c == temperature_c


def test_reasons_come_from_the_counts_of_throttled_time(amdsmi: Driver) -> None:
    amdsmi.set(counter=1000, ppt=500, hbm=300)
    source = source_of(amdsmi)
    assert source.sample().reasons is None  # a count tells nothing by itself
    amdsmi.at(0.1)
    amdsmi.set(counter=1100, ppt=590, hbm=340)  # 90 % and 40 % of the time
    assert source.sample().reasons == pytest.approx({"package_power_limit": 0.9, "memory_thermal": 0.4})
    amdsmi.at(0.2)
    amdsmi.set(counter=1200, hbm=400, socket_thermal=51)
    assert source.sample().reasons == pytest.approx({"memory_thermal": 0.6, "socket_thermal": 0.51})
    amdsmi.at(0.3)
    amdsmi.set(counter=1300)
    assert source.sample().reasons == {}
    amdsmi.at(60.0)
    amdsmi.set(counter=2300, ppt=1590)  # between two windows: it says so
    assert (source.sample().reasons, source.sample().reasons_since_ns) == ({"package_power_limit": 1.0}, None)
    amdsmi.at(60.1)
    amdsmi.set(counter=2400)
    reading = source.sample()
    assert (reading.reasons, reading.reasons_since_ns) == ({}, 59_900_000_000)  # a count is up to 100 ms old
    amdsmi.at(60.2)
    assert source.sample().reasons is None  # the same table: no time has been counted
    amdsmi.at(60.3)
    amdsmi.set(counter=2500, ppt=1690)
    reading = source.sample()
    assert (reading.reasons, reading.reasons_since_ns) == ({"package_power_limit": 1.0}, 60_000_000_000)
    amdsmi.at(60.4)
    amdsmi.set(counter=100, ppt=1)  # counted anew
    assert source.sample().reasons is None
    amdsmi.at(60.5)
    amdsmi.set(counter=200, ppt=2)
    assert source.sample().reasons == pytest.approx({"package_power_limit": 0.01})


def test_a_failing_read_next_to_the_counts_loses_none_of_them(amdsmi: Driver, monkeypatch) -> None:
    amdsmi.set(counter=1000, ppt=500)
    source = source_of(amdsmi)
    source.sample()
    amdsmi.at(0.1)
    amdsmi.set(counter=1100, ppt=600)
    with monkeypatch.context() as patch:
        patch.setattr(source._slow, "at", _fail)
        with pytest.raises(PowerError):
            source.sample()
    amdsmi.at(0.2)
    amdsmi.set(counter=1200)
    assert source.sample().reasons == pytest.approx({"package_power_limit": 0.5})


def _fail(*_: object) -> None:
    raise PowerError("busy")


@pytest.mark.parametrize(("status", "reasons"), [(0, frozenset()), (0x40, {"throttled"})])
def test_before_mi300_only_that_it_is_throttled_is_known(amdsmi: Driver, status, reasons) -> None:
    amdsmi.set(residencies=0, throttle_status=status)
    assert source_of(amdsmi).sample().reasons == reasons


def test_the_counts_are_read_ten_times_a_second_at_most(amdsmi: Driver) -> None:
    source = source_of(amdsmi)
    source.sample()
    calls = amdsmi.calls
    for fiftieth in range(1, 5):
        amdsmi.at(fiftieth / 50)
        assert source.sample().reasons is None  # not those of a time before
    assert amdsmi.calls - calls == 4 * 3  # power, energy, the clock
    amdsmi.at(0.099)  # a tick that is early by a hair does not miss its turn
    source.sample()
    assert amdsmi.calls - calls == 4 * 3 + 4


def throttled_at_first(amdsmi: Driver, **changes) -> tuple[AmdSource, Readings]:
    """Two seconds of readings; held back for the first 1.1 s of them."""
    amdsmi.set(counter=1)
    source, readings = source_of(amdsmi), []
    for fiftieth in range(101):
        amdsmi.at(fiftieth / 50)
        amdsmi.set(counter=1 + 20 * fiftieth, ppt=1 + 20 * min(fiftieth, 55), **changes)  # in milliseconds
        readings.append(source.sample())
    return source, Readings.of(readings)


def test_reasons_count_for_a_mode_that_contains_all_the_time_they_cover(amdsmi: Driver) -> None:
    source, readings = throttled_at_first(amdsmi)
    assert [reasons is not None for reasons in readings.reasons[:16:5]] == [False, True, True, True]
    assert readings.reasons_since_ns[10] == 0  # read at 0.1 s the time before, when it was up to 0.1 s old
    # What is said at 1.1 and at 1.2 s speaks of both.
    first = Segment(round(0.05e9), round(1.05e9), Mode.OVERLAPPED, 10)
    second = Segment(round(1.05e9), round(1.95e9), Mode.SEQUENTIAL, 10)
    figures = power_figures(source.info, readings, [first, second], interval_s=0.02)
    throttled = {mode.mode: mode.throttle_fraction for mode in figures.modes}
    assert throttled == {Mode.OVERLAPPED: 1, Mode.SEQUENTIAL: 0}
    assert figures.problems == ()


def test_blocks_too_short_for_reasons_have_a_clock_and_a_note(amdsmi: Driver) -> None:
    source, readings = throttled_at_first(amdsmi)
    segments = [
        Segment(
            round((0.1 + 0.15 * i) * 1e9), round((0.24 + 0.15 * i) * 1e9), (Mode.OVERLAPPED, Mode.SEQUENTIAL)[i % 2], 2
        )
        for i in range(8)
    ]
    figures = power_figures(source.info, readings, segments, interval_s=0.02)
    assert len(figures.modes) == 2
    for mode in figures.modes:
        assert mode.sm_clock_mhz == 2100
        assert (mode.reasons, mode.throttle_fraction) == (None, None)
    assert figures.problems == (
        "why the clock was held back in overlapped and sequential steps is not known: the device tells it of 0.2 s at "
        "a time, and a block needs 0.3 s for that (min_block_seconds) [OC416]",
    )


def test_a_package_without_the_structure_is_asked_for_its_dictionary(amdsmi: Driver) -> None:
    source = source_of(amdsmi)
    plain = source.read_counts(source.device)
    del source.smi.amdsmi_interface.amdsmi_wrapper.amdsmi_gpu_metrics_t  # its own function needs it too, so:
    source.smi = SimpleNamespace(amdsmi_get_gpu_metrics_info=lambda device: {**plain, "throttle_status": "N/A"})
    found = source.read_counts(source.device)
    assert found == {name: value for name, value in plain.items() if name != "throttle_status"}
    assert found


@pytest.fixture
def by_the_long_way(monkeypatch) -> Callable[[Driver], AmdSource]:
    def make(driver: Driver) -> AmdSource:
        with monkeypatch.context() as patch:
            patch.setattr(AmdTick, "of", classmethod(lambda cls, *_: None))
            return source_of(driver)

    return make


@pytest.mark.parametrize("numbers", [{}, {"current_w": NA}, {"current_w": NA, "socket_w": NA}])
def test_both_ways_of_a_tick_read_the_same(amdsmi: Driver, by_the_long_way, numbers) -> None:
    amdsmi.power((0, 200), (1, 500), (2, 350))
    amdsmi.set(counter=1, **numbers)
    short, long = source_of(amdsmi), by_the_long_way(amdsmi)
    assert short.tick is not None
    assert long.tick is None
    for fiftieth in range(150):
        amdsmi.at(fiftieth / 50)
        assert short.sample() == long.sample()


@pytest.mark.parametrize("numbers", [{"power_rc": BUSY}, {"energy_rc": BUSY}, {"clock_rc": BUSY}])
def test_both_paths_of_a_tick_fail_the_same_way_and_continue(amdsmi: Driver, by_the_long_way, numbers) -> None:
    sources = source_of(amdsmi), by_the_long_way(amdsmi)
    said = []
    amdsmi.set(**numbers)
    for source in sources:
        with pytest.raises(PowerError) as caught:
            source.sample()
        said.append(str(caught.value))
    assert said[0] == said[1]
    amdsmi.set(**{name: {"current_w": -1}.get(name, 0) for name in numbers})
    assert sources[0].sample().power_w == sources[1].sample().power_w


def test_a_package_that_has_it_otherwise_is_read_the_long_way(amdsmi: Driver) -> None:
    source = source_of(amdsmi)
    key, power_w = "current_socket_power", 200.0
    wrapper = source.smi.amdsmi_interface.amdsmi_wrapper
    assert AmdTick.of(source.smi, source.device, key, power_w) is not None
    assert AmdTick.of(source.smi, source.device, "another_power", power_w) is None
    assert AmdTick.of(source.smi, source.device, key, power_w * 1000) is None  # it makes other units of them
    assert AmdTick.of(SimpleNamespace(), source.device, key, power_w) is None
    assert AmdTick.of(source.smi, None, key, power_w) is None
    assert AmdTick.of(source.smi, "not a handle", key, power_w) is None
    wrapper.amdsmi_get_power_info.argtypes = [*wrapper.amdsmi_get_power_info.argtypes, ctypes.c_uint32]
    assert AmdTick.of(source.smi, source.device, key, power_w) is None


def test_columns_that_the_device_lacks_are_all_ones_and_are_left_out(amdsmi: Driver) -> None:
    amdsmi.set(residencies=0, throttle_status=2**32 - 1)
    source = source_of(amdsmi)
    amdsmi.at(0.1)
    assert source.sample().reasons is None


def test_a_lost_gpu_raises_and_a_passing_fault_is_not_the_end(amdsmi: Driver) -> None:
    source = source_of(amdsmi)
    amdsmi.set(power_rc=BUSY)
    with pytest.raises(PowerError, match="amdsmi_get_power_info") as caught:
        source.sample()
    assert not isinstance(caught.value, DeviceLostError)
    amdsmi.set(power_rc=0)
    assert source.sample().power_w == 200
    amdsmi.set(power_rc=NOT_FOUND)
    with pytest.raises(DeviceLostError, match="the GPU is gone"):
        source.sample()


@pytest.mark.parametrize("watts", [NA, 20_000])
def test_where_the_sensor_fails_the_counter_is_still_read(amdsmi: Driver, by_the_long_way, watts) -> None:
    sources = source_of(amdsmi), by_the_long_way(amdsmi)
    amdsmi.set(current_w=watts)
    for source in sources:
        reading = source.sample()
        assert reading.power_w is None
        assert reading.energy_j is not None
    amdsmi.set(energy_rc=BUSY)
    with pytest.raises(PowerError):
        source.sample()


# -- which device


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2,)])
def test_torchs_device_is_found_by_its_address_whatever_hip_shows(amdsmi: Driver, order) -> None:
    # HIP's order, after ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES, is torch's; AMD SMI's is that of the addresses.
    amdsmi.set(gpus=4)
    for device in range(4):
        amdsmi.power((0, 100 + device), device=device)
    for device in order:

        class Properties:
            name = "AMD Instinct Fake"
            uuid = "35633761-3734-6163"  # HIP's UUIDs are not those of AMD SMI
            pci_domain_id, pci_bus_id, pci_device_id = 0, 0x20 + device, 0

        source = find_source(from_properties(Properties(), hip=True))
        assert not isinstance(source, NoPower)
        assert source.sample().power_w == 100 + device
        source.close()


def test_a_device_that_amd_smi_does_not_know_is_refused(amdsmi: Driver) -> None:
    found = find_source(DeviceIdentity("amd", pci_bus_id="0000:99:00.0"))
    assert isinstance(found, NoPower)
    assert "AMD SMI knows no GPU with PCI address 0000:99:00.0" in found.reason
    assert "\n" not in found.reason
    assert amdsmi.open == 0


def test_without_a_uuid_the_address_is_made_unique_by_the_host(amdsmi: Driver) -> None:
    amdsmi.set(uuid_rc=NOT_SUPPORTED)
    assert source_of(amdsmi, 1).info.device_id == f"{os.uname().nodename}/0000:21:00.0"


# -- what goes wrong at the start


def test_a_driver_that_does_not_start_means_no_power_and_one_line(amdsmi: Driver) -> None:
    amdsmi.set(init_rc=34)
    found = find_source(DeviceIdentity("amd", pci_bus_id="0000:20:00.0"))
    assert isinstance(found, NoPower)
    assert "AMD SMI does not start" in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize(("library", "noted"), [(26, False), (7, False), (25, True), (6, True)])
def test_a_library_of_another_rocm_than_the_package_is_noted(amdsmi: Driver, monkeypatch, library, noted) -> None:
    import amdsmi as package

    monkeypatch.setattr(package, "__version__", "7.0.2")
    amdsmi.set(library_major=library)
    notes = source_of(amdsmi).info.notes
    assert bool(notes) == noted
    if noted:
        assert "version 7.0.2" in notes[0]
        assert f"{library}.1.0" in notes[0]


def find_in_child(environment: dict[str, str]) -> tuple[str, str]:
    """The reason why there is no power in a fresh process, and all that it wrote otherwise."""
    code = (
        "from overlap_callbacks.instruments.power.discovery import *\n"
        "found = find_source(DeviceIdentity('amd', pci_bus_id='0000:20:00.0'))\n"
        "print('reason:', getattr(found, 'reason', found))"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("ROCM_HOME", "ROCM_PATH")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**clean, **environment}
    )
    said, _, reason = done.stdout.partition("reason: ")
    return reason.strip(), said + done.stderr


def rocm_is_here() -> bool:
    try:
        ctypes.CDLL("libamd_smi.so")
    except OSError:
        return Path("/opt/rocm/lib/libamd_smi.so").exists()
    return True


@pytest.mark.skipif(rocm_is_here(), reason="this machine has AMD SMI")
def test_amdsmi_without_its_library_ends_in_one_message_and_no_output() -> None:
    reason, said = find_in_child({})
    assert "the library of amdsmi, libamd_smi.so, does not load" in reason
    assert "install ROCm's amd-smi-lib" in reason
    assert "overlap-callbacks[amd]" in reason
    assert "KeyError" not in reason
    assert said == ""


@pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with")
def test_a_library_that_is_older_than_the_package_is_named_as_such() -> None:
    library = build.amdsmi(missing="amdsmi_get_gpu_enumeration_info")
    reason, said = find_in_child({"LD_LIBRARY_PATH": str(library.parent)})
    assert "libamd_smi.so is older than the Python package amdsmi" in reason
    assert "amdsmi_get_gpu_enumeration_info" in reason
    assert said == ""


def test_a_missing_package_is_named_with_what_to_install(fork, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    found = find_source(DeviceIdentity("amd", pci_bus_id="0000:20:00.0"))
    assert isinstance(found, NoPower)
    assert "amdsmi is missing" in found.reason
    assert "overlap-callbacks[amd]" in found.reason
