from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from overlap_callbacks.instruments.power.discovery import DeviceIdentity, NoPower, find_source, from_properties
from overlap_callbacks.instruments.power.nvml import NvmlSource
from overlap_callbacks.instruments.power.nvml_fast import NvmlTick
from overlap_callbacks.instruments.power.source import DeviceLostError, PowerError, PowerUnavailableError
from tests.instruments.power.conftest import Driver

UUIDS = [f"fa0e000{g}-0000-4000-8000-00000000000{g}" for g in range(8)]
NOT_SUPPORTED, FUNCTION_NOT_FOUND, LOST, TIMEOUT = 3, 13, 15, 10
NO_PERMISSION, VERSION_MISMATCH, UNKNOWN = 4, 25, 999


def source_of(driver: Driver, device: int = 0, **options) -> NvmlSource:
    return NvmlSource(UUIDS[device], clock_ns=driver.clock_ns, **options)


def test_a_reading_says_what_the_script_says(nvml: Driver) -> None:
    nvml.power((0, 100), (10, 300))
    nvml.set(reasons=0x4 | 0x40, sm_mhz=1755, limit_w=650)
    source = source_of(nvml)
    source.sample()  # the counter starts here, at 0 s
    nvml.at(12.0)
    reading = source.sample()
    assert reading.time_ns == 12_000_000_000
    assert reading.power_w == 300
    assert reading.energy_j == 100 * 10 + 300 * 2
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz) == (1755, 3201)
    assert (reading.temperature_c, reading.limit_w) == (55, 650)
    assert reading.reasons == {"sw_power_cap", "hw_thermal_slowdown"}
    assert (source.info.name, source.info.device_name, source.info.device_id) == (
        "nvml",
        "NVIDIA Fake 0",
        f"GPU-{UUIDS[0]}",
    )
    assert (source.info.power_kind, source.info.has_energy) == ("instantaneous", True)
    assert (source.info.tdp_w, source.info.limit_w, source.info.default_interval_s) == (700, 650, 0.1)
    source.close()
    assert nvml.open == 0


def test_the_read_lies_in_the_middle_of_its_time(nvml: Driver) -> None:
    times = iter(range(1_000, 10_000, 500))
    source = NvmlSource(UUIDS[0], clock_ns=lambda: next(times))
    assert source.sample().time_ns == 1_250


@pytest.mark.parametrize(
    ("numbers", "kind", "averaging_s", "power_w"),
    [
        ({}, "instantaneous", 0.225, 300),  # H100: 25 ms of every 100 ms, up to 100 ms late
        ({"architecture": 8}, "instantaneous", 0.3, 300),
        ({"architecture": 7, "pci_device_id": 0x20B0}, "instantaneous", 0.225, 300),
        ({"architecture": 7, "pci_device_id": 0x2235}, "instantaneous", 0.3, 300),
        ({"instant_rc": NOT_SUPPORTED}, "1 s average", 1.2, 150),
        ({"instant_rc": NOT_SUPPORTED, "average_rc": NOT_SUPPORTED}, "1 s average", 1.2, 150),
        # Before Ampere, and on GA100, the old call is not averaged (nvml.h).
        ({"fields_rc": FUNCTION_NOT_FOUND, "architecture": 5}, "instantaneous", 0.3, 300),
        ({"fields_rc": FUNCTION_NOT_FOUND, "architecture": 7, "pci_device_id": 0x20B0}, "instantaneous", 0.225, 300),
        ({"fields_rc": FUNCTION_NOT_FOUND, "architecture": 7, "pci_device_id": 0x2235}, "1 s average", 1.2, 150),
    ],
)
def test_which_power_it_is_is_named(nvml: Driver, numbers, kind, averaging_s, power_w) -> None:
    nvml.power((0, 100), (10, 300))
    nvml.set(**numbers)
    source = source_of(nvml)
    assert (source.info.power_kind, source.info.averaging_s) == (kind, pytest.approx(averaging_s))
    nvml.at(10.25)  # a quarter of the last second at 300 W
    reading = source.sample()
    assert (reading.power_w, reading.averaging_s) == (power_w, pytest.approx(averaging_s))
    assert reading.energy_j is not None


def test_a_driver_without_the_newer_functions_still_gives_all_there_is(old_nvml: Driver) -> None:
    old_nvml.power((0, 100), (10, 300))
    old_nvml.set(reasons=0x4)
    source = source_of(old_nvml)
    source.sample()
    old_nvml.at(11.5)
    reading = source.sample()
    assert source.info.power_kind == "1 s average"
    assert reading.power_w == 300
    assert reading.energy_j == 100 * 10 + 300 * 1.5
    assert reading.reasons == {"sw_power_cap"}
    assert reading.temperature_c == 55
    assert reading.utilisation is None


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"field_energy_rc": NOT_SUPPORTED, "energy_rc": NOT_SUPPORTED}, "energy_j"),
        ({"clock_rc": NOT_SUPPORTED}, "sm_clock_mhz"),
        ({"reasons_rc": NOT_SUPPORTED}, "reasons"),
        ({"limit_rc": NOT_SUPPORTED}, "limit_w"),
        ({"temperature_rc": NOT_SUPPORTED}, "temperature_c"),
        ({"gpm": 0}, "utilisation"),
    ],
)
def test_what_a_device_does_not_support_is_absent_and_the_rest_is_there(nvml: Driver, numbers, field) -> None:
    nvml.set(**numbers)
    source = source_of(nvml)
    source.sample()
    nvml.at(1.0)
    reading = source.sample()
    assert getattr(reading, field) is None
    assert reading.power_w == 100
    others = {"energy_j", "sm_clock_mhz", "reasons", "limit_w", "temperature_c", "utilisation"} - {field}
    assert all(getattr(reading, other) is not None for other in others)
    if field == "energy_j":
        assert not source.info.has_energy


@pytest.mark.parametrize("code", [NO_PERMISSION, VERSION_MISMATCH, UNKNOWN])
@pytest.mark.parametrize(
    ("number", "field"),
    [
        ("clock_rc", "sm_clock_mhz"),
        ("reasons_rc", "reasons"),
        ("limit_rc", "limit_w"),  # of the limit by default too, which is asked for once, at the beginning
        ("temperature_rc", "temperature_c"),
    ],
)
@pytest.mark.parametrize("from_the_start", [True, False])
def test_an_optional_call_that_fails_costs_its_figure_and_not_the_power(
    nvml: Driver, number, field, code, from_the_start
) -> None:
    if from_the_start:
        nvml.set(**{number: code})
    source = source_of(nvml)
    source.sample()
    nvml.set(**{number: code})
    nvml.at(2.0)
    reading = source.sample()
    assert getattr(reading, field) is None
    assert (reading.power_w, reading.energy_j) == (100, 200)
    nvml.set(**{number: 0})
    nvml.at(4.0)
    # What the driver cannot do it cannot do later either; the rest may pass.
    assert (getattr(source.sample(), field) is None) is (code == VERSION_MISMATCH)


@pytest.mark.parametrize("code", [NO_PERMISSION, VERSION_MISMATCH, UNKNOWN])
def test_power_and_energy_have_calls_of_their_own_where_the_fields_fail(nvml: Driver, code) -> None:
    nvml.set(fields_rc=code)
    source = source_of(nvml)
    source.sample()
    nvml.at(2.0)
    reading = source.sample()
    assert (reading.power_w, reading.energy_j) == (100, 200)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, VERSION_MISMATCH, UNKNOWN])
def test_the_temperature_comes_from_the_older_call_where_the_newer_one_fails(nvml: Driver, code) -> None:
    nvml.set(temperature_v_rc=code)
    assert source_of(nvml).sample().temperature_c == 55


def test_energy_comes_from_its_own_call_where_only_its_field_is_missing(nvml: Driver) -> None:
    nvml.set(field_energy_rc=NOT_SUPPORTED)
    source = source_of(nvml)
    source.sample()
    nvml.at(2.0)
    assert source.sample().energy_j == 200
    assert source.info.has_energy


def test_a_device_without_a_power_sensor_is_refused(nvml: Driver) -> None:
    nvml.set(fields_rc=NOT_SUPPORTED, usage_rc=NOT_SUPPORTED)
    with pytest.raises(PowerUnavailableError, match="NVIDIA Fake 0 has no power sensor"):
        source_of(nvml)
    assert nvml.open == 0


@pytest.mark.parametrize("numbers", [{"lost": 1}, {"instant_rc": LOST}])
def test_a_lost_gpu_raises_and_says_so(nvml: Driver, numbers) -> None:
    source = source_of(nvml)
    source.sample()
    nvml.set(**numbers)
    with pytest.raises(DeviceLostError, match="the GPU is lost"):
        source.sample()
    source.close()
    assert nvml.open == 0


def test_a_passing_fault_raises_an_error_that_is_not_the_end(nvml: Driver) -> None:
    source = source_of(nvml)
    nvml.set(instant_rc=TIMEOUT)
    reading = source.sample()  # the counter is still read
    assert reading.power_w is None
    assert reading.energy_j is not None
    nvml.set(instant_rc=0, fields_rc=TIMEOUT)
    with pytest.raises(PowerError, match="nvmlDeviceGetFieldValues") as caught:
        source.sample()
    assert not isinstance(caught.value, DeviceLostError)
    nvml.set(fields_rc=0)
    assert source.sample().power_w == 100


def test_an_implausible_power_is_none(nvml: Driver) -> None:
    source = source_of(nvml)
    nvml.set(base_w=20_000)
    assert source.sample().power_w is None


def test_the_counters_wrap_is_taken_out(nvml: Driver) -> None:
    nvml.set(counter_width=2**32, counter_offset_mj=2**32 - 50_000, base_w=250)
    source = source_of(nvml)
    energies = []
    for tenth in range(11):
        nvml.at(tenth / 10)
        energies.append(source.sample().energy_j)
    assert energies == [25.0 * tenth for tenth in range(11)]  # it wraps at 0.2 s


def test_a_counter_that_was_reset_leaves_a_gap_and_goes_on(nvml: Driver) -> None:
    nvml.set(counter_offset_mj=5_000_000)
    source = source_of(nvml)
    energies = []
    for second in range(5):
        nvml.at(second)
        if second == 2:  # the driver was loaded again: it counts from zero
            nvml.set(counter_offset_mj=-200_000)
        energies.append(source.sample().energy_j)
    assert energies == [0, 100, None, 200, 300]


def test_what_changes_slowly_is_read_once_a_second(nvml: Driver) -> None:
    source = source_of(nvml, utilisation=False)
    source.sample()
    nvml.set(temperature_c=80, limit_w=400, memory_mhz=1000)
    nvml.at(0.5)
    early, calls = source.sample(), nvml.calls
    nvml.at(0.6)
    source.sample()
    assert (early.temperature_c, early.limit_w, early.memory_clock_mhz) == (55, 700, 3201)
    assert nvml.calls - calls == 3  # power with energy, the clock, its reasons
    nvml.at(1.0)
    late = source.sample()
    assert (late.temperature_c, late.limit_w, late.memory_clock_mhz) == (80, 400, 1000)


# -- the short way of a tick, and the long one


@pytest.fixture
def by_the_long_way(monkeypatch) -> Callable[..., NvmlSource]:
    def make(**options) -> NvmlSource:
        with monkeypatch.context() as patch:
            patch.setattr(NvmlTick, "of", classmethod(lambda cls, *_: None))
            return NvmlSource(UUIDS[0], utilisation=False, **options)

    return make


def test_both_ways_read_the_same(nvml: Driver, by_the_long_way) -> None:
    nvml.power((0, 100), (1, 333), (2, 250))
    short, long = source_of(nvml, utilisation=False), by_the_long_way(clock_ns=nvml.clock_ns)
    assert short.tick is not None
    assert long.tick is None
    for tenth in range(30):
        nvml.at(tenth / 10)
        nvml.set(reasons=(0, 0x1, 0x4 | 0x40)[tenth % 3], sm_mhz=1500 + tenth)
        assert short.sample() == long.sample()


@pytest.mark.parametrize("value_type", [0, 1, 2, 3, 4, 9])
def test_both_ways_read_the_type_that_the_driver_names(nvml: Driver, by_the_long_way, value_type) -> None:
    short, long = source_of(nvml), by_the_long_way()
    nvml.set(instant_type=value_type)
    outcomes = []
    for source in (short, long):
        try:
            outcomes.append(source.sample().power_w)
        except PowerError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0] == 100) is (value_type in (1, 2, 3, 4))


def test_a_package_that_has_it_otherwise_is_read_the_long_way(nvml: Driver) -> None:
    source = source_of(nvml)
    assert NvmlTick.of(SimpleNamespace(), source.device, 186) is None
    assert NvmlTick.of(SimpleNamespace(nvmlLib=object()), source.device, 186) is None
    assert NvmlTick.of(SimpleNamespace(nvmlLib=ctypes.CDLL(None)), source.device, 186) is None


def test_a_value_that_cannot_be_true_at_first_does_not_cost_the_fast_way(nvml: Driver) -> None:
    source = source_of(nvml)
    nvml.power((0, 20_000))
    assert NvmlTick.of(source._nvml, source.device, 186) is not None
    assert source.sample().power_w is None
    assert source.tick is not None


def test_a_temporary_fault_falls_back_to_the_slow_reading_and_the_fast_one_goes_on(nvml: Driver) -> None:
    source = source_of(nvml)
    nvml.set(reasons_rc=UNKNOWN)
    assert source.sample().reasons is None
    nvml.set(reasons_rc=0)
    calls = nvml.calls
    assert source.sample().reasons is not None
    assert nvml.calls - calls == 3


# -- utilisation


def test_gpm_gives_fractions_of_the_time_since_the_sample_before(nvml: Driver) -> None:
    source = source_of(nvml)
    nvml.at(1.0)
    assert source.sample().utilisation is None  # two samples make a figure
    nvml.at(1.05)
    assert source.sample().utilisation is None  # too soon after the first
    nvml.at(1.1)
    use = source.sample().utilisation
    assert use is not None
    assert use.since_ns == 1_000_000_000
    found = (use.sm, use.sm_occupancy, use.tensor, use.dram)
    assert found == pytest.approx((0.885, 0.4225, 0.615, 0.3325))
    assert use.nvlink_rx_gb_s == pytest.approx(20_000 * 2**20 / 1e9)
    assert use.nvlink_tx_gb_s == pytest.approx(10_000 * 2**20 / 1e9)
    nvml.at(1.2)
    use = source.sample().utilisation
    assert use is not None
    assert use.since_ns == 1_100_000_000


def test_a_metric_that_gpm_lacks_is_absent(nvml: Driver) -> None:
    nvml.set(gpm_tensor_rc=NOT_SUPPORTED)
    source = source_of(nvml)
    source.sample()
    nvml.at(0.1)
    use = source.sample().utilisation
    assert use is not None
    assert (use.tensor, use.sm) == (None, pytest.approx(0.885))


def test_a_fault_of_gpm_costs_its_figures_only(nvml: Driver) -> None:
    source = source_of(nvml)
    source.sample()
    nvml.set(gpm_rc=999)
    nvml.at(0.1)
    reading = source.sample()
    assert (reading.utilisation, reading.power_w) == (None, 100)
    nvml.set(gpm_rc=0)
    for tenth, since_ns in ((2, None), (3, 200_000_000)):  # begins afresh
        nvml.at(tenth / 10)
        use = source.sample().utilisation
        assert (use.since_ns if use is not None else None) == since_ns


def test_gpms_buffers_are_two_and_freed(nvml: Driver) -> None:
    samples = nvml.library.fake_gpm_samples
    samples.restype = ctypes.c_long
    source = source_of(nvml)
    for tenth in range(5):
        nvml.at(tenth / 10)
        source.sample()
    assert samples() == 2
    source.close()
    assert samples() == 0
    source.close()
    assert nvml.open == 0


# -- which device


def properties_of(device: int, **more):
    """What torch says of the fake's device: a UUID without its prefix, and a PCI address in parts."""

    class Properties:
        name = f"NVIDIA Fake {device}"
        uuid = UUIDS[device]
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x10 + device, 0

    for name, value in more.items():
        setattr(Properties, name, value)
    return Properties()


def visible_devices(value: str | None) -> list[int]:
    """NVML's indices of the devices that CUDA shows for a value of CUDA_VISIBLE_DEVICES, in torch's order.

    CUDA counts the fastest first, unlike NVML, which counts by PCI address: here the last is the fastest.
    """
    by_speed = [3, 2, 1, 0]
    if value is None:
        return by_speed
    chosen = []
    for item in value.split(","):
        if item.startswith("GPU-"):
            chosen.append(next(g for g in by_speed if f"GPU-{UUIDS[g]}".startswith(item)))
        else:
            chosen.append(by_speed[int(item)])
    return chosen


@pytest.mark.parametrize("value", [None, "2", "1,3", "3,0,2", f"GPU-{UUIDS[2]}", f"GPU-{UUIDS[3]},GPU-{UUIDS[1][:8]}"])
def test_torchs_device_is_found_whatever_the_order_and_whatever_is_visible(nvml: Driver, value) -> None:
    nvml.set(gpus=4)
    for device in range(4):
        nvml.power((0, 100 + device), device=device)
    shown = visible_devices(value)
    for device in shown:
        source = find_source(from_properties(properties_of(device), hip=False))
        assert not isinstance(source, NoPower)
        assert source.info.device_id == f"GPU-{UUIDS[device]}"
        assert source.sample().power_w == 100 + device
        source.close()
    # By torch's number it would have been another device, for at least one of them: the case is worth testing.
    assert any(number != device for number, device in enumerate(shown))


@pytest.mark.parametrize("uuid", [UUIDS[1], f"GPU-{UUIDS[1]}"])
def test_a_uuid_with_or_without_its_prefix(nvml: Driver, uuid) -> None:
    assert NvmlSource(uuid).info.device_id == f"GPU-{UUIDS[1]}"


def test_the_pci_address_serves_where_the_uuid_does_not(nvml: Driver) -> None:
    identity = from_properties(properties_of(1, uuid="00000000-0000-0000-0000-000000000000"), hip=False)
    source = find_source(identity)
    assert not isinstance(source, NoPower)
    assert source.info.device_id == f"GPU-{UUIDS[1]}"


def test_a_device_that_nvml_does_not_know_is_refused_with_those_it_knows(nvml: Driver) -> None:
    found = find_source(DeviceIdentity("nvidia", uuid=UUIDS[7], pci_bus_id="0000:99:00.0"))
    assert isinstance(found, NoPower)
    assert UUIDS[7] in found.reason
    assert all(f"GPU-{uuid}" in found.reason for uuid in UUIDS[:2])
    assert nvml.open == 0


@pytest.mark.parametrize("uuid", [UUIDS[0], f"GPU-{UUIDS[0]}", f"MIG-{UUIDS[0]}"])
def test_mig_is_refused_with_its_reason(nvml: Driver, uuid) -> None:
    nvml.set(mig=1)
    found = find_source(DeviceIdentity("nvidia", uuid=uuid))
    assert isinstance(found, NoPower)
    assert "MIG mode, where power, energy and clocks exist for the whole GPU only" in found.reason
    assert nvml.open == 0


def test_two_ranks_on_one_gpu_have_one_device_id(nvml: Driver) -> None:
    first, second = (find_source(from_properties(properties_of(1), hip=False)) for _ in range(2))
    other = find_source(from_properties(properties_of(0), hip=False))
    assert not isinstance(first, NoPower)
    assert not isinstance(second, NoPower)
    assert not isinstance(other, NoPower)
    assert first.info.device_id == second.info.device_id != other.info.device_id
    first.close()
    assert second.sample().power_w == 100  # closing one leaves the other
    second.close()
    other.close()
    assert nvml.open == 0


@pytest.mark.parametrize("code", [9, 12, 18])
def test_a_driver_that_does_not_start_means_no_power_and_one_line(nvml: Driver, code) -> None:
    nvml.set(init_rc=code)
    found = find_source(DeviceIdentity("nvidia", uuid=UUIDS[0]))
    assert isinstance(found, NoPower)
    assert "NVML does not start" in found.reason
    assert "\n" not in found.reason


def test_without_a_driver_there_is_no_power(fork) -> None:
    import pynvml

    pynvml.CDLL = lambda name: ctypes.CDLL(f"/nowhere/{name}")  # a machine with NVML runs this test too
    found = find_source(DeviceIdentity("nvidia", uuid=UUIDS[0]))
    assert isinstance(found, NoPower)
    assert "NVML does not start" in found.reason


def test_a_missing_package_is_named_with_what_to_install(fork, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = find_source(DeviceIdentity("nvidia", uuid=UUIDS[0]))
    assert isinstance(found, NoPower)
    assert "nvidia-ml-py is missing; pip install 'overlap-callbacks[nvidia]'" in found.reason


def test_what_a_source_is_can_be_written_down(nvml: Driver) -> None:
    import msgspec

    info = source_of(nvml).info
    assert msgspec.json.decode(msgspec.json.encode(info), type=type(info)) == info
    assert json.loads(msgspec.json.encode(info))["power_kind"] == "instantaneous"
