from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from overlap_callbacks.instruments.power.discovery import DeviceIdentity, NoPower, find_source
from overlap_callbacks.instruments.power.rapl import RaplSource
from overlap_callbacks.instruments.power.source import PowerError

RANGE_UJ = 65_532_610_987


class Machine:
    """A tree as Linux shows it: two packages with cores and memory, the platform, and the same package by MMIO."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.time_s = 0.0
        for zone, name in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),
            ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:1:0", "dram"),
            ("intel-rapl:2", "psys"),
            ("intel-rapl-mmio:0", "package-0"),
        ):
            folder = root / zone
            folder.mkdir(parents=True)
            (folder / "name").write_text(f"{name}\n")
            (folder / "energy_uj").write_text("1000000\n")
            (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            if name.startswith("package"):
                (folder / "constraint_0_power_limit_uw").write_text("205000000\n")
                (folder / "constraint_0_max_power_uw").write_text("270000000\n")

    def energy(self, zone: str, uj: int) -> None:
        (self.root / zone / "energy_uj").write_text(f"{uj}\n")

    def clock_ns(self) -> int:
        return round(self.time_s * 1e9)

    def source(self, **options) -> RaplSource:
        return RaplSource(self.root, clock_ns=self.clock_ns, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "powercap")


def test_packages_are_added_up_and_nothing_else_is(machine: Machine) -> None:
    source = machine.source()
    first = source.sample()
    assert (first.power_w, first.energy_j) == (None, 0)
    machine.energy("intel-rapl:0", 1_000_000 + 20_000_000)
    machine.energy("intel-rapl:1", 1_000_000 + 30_000_000)
    for other in ("intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:2", "intel-rapl-mmio:0"):
        machine.energy(other, 900_000_000)
    machine.time_s = 0.5
    reading = source.sample()
    assert reading.energy_j == 50
    assert reading.power_w == 100
    assert reading.averaging_s == 0.5  # it speaks of the time since the reading before
    assert reading.limit_w == 410
    assert (source.info.tdp_w, source.info.power_kind, source.info.averaging_s) == (540, "mean between reads", None)
    assert source.info.device_id == f"{socket.gethostname()}/cpu"
    assert source.info.device_name == "CPU: package-0, package-1"


def test_memory_is_counted_on_request(machine: Machine) -> None:
    source = machine.source(dram=True)
    source.sample()
    for zone, joules in (("intel-rapl:0", 20), ("intel-rapl:0:1", 3), ("intel-rapl:1:0", 4)):
        machine.energy(zone, 1_000_000 + joules * 1_000_000)
    machine.time_s = 1.0
    assert source.sample().energy_j == 27


def test_the_wrap_of_one_package_is_taken_out(machine: Machine) -> None:
    machine.energy("intel-rapl:0", RANGE_UJ - 40_000_000)
    source = machine.source()
    source.sample()
    machine.energy("intel-rapl:0", 60_000_000)
    machine.energy("intel-rapl:1", 1_000_000 + 50_000_000)
    machine.time_s = 1.0
    reading = source.sample()
    assert (reading.energy_j, reading.power_w) == (150, 150)


def test_a_counter_of_unknown_range_that_goes_back_is_a_gap(machine: Machine) -> None:
    for zone in ("intel-rapl:0", "intel-rapl:1"):
        (machine.root / zone / "max_energy_range_uj").unlink()
    machine.energy("intel-rapl:0", 90_000_000)
    source = machine.source()
    source.sample()
    readings = []
    for second, energy_uj in ((1, 10_000_000), (2, 30_000_000), (3, 70_000_000)):
        machine.time_s = second
        machine.energy("intel-rapl:0", energy_uj)
        readings.append(source.sample())
    assert [reading.energy_j for reading in readings] == [None, 20, 60]
    assert [reading.power_w for reading in readings] == [None, None, 40]  # a mean over the gap is not known


def test_a_machine_without_counters_has_no_power(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        found = find_source(DeviceIdentity("cpu"), powercap=root)
        assert isinstance(found, NoPower)
        assert f"{root} has no packages" in found.reason


def test_a_counter_that_goes_away_is_a_fault_and_not_the_end(machine: Machine) -> None:
    source = machine.source()
    energy = machine.root / "intel-rapl:1" / "energy_uj"
    energy.unlink()
    with pytest.raises(PowerError, match="energy counter of the CPU cannot be read"):
        source.sample()
    energy.write_text("garbage")
    with pytest.raises(PowerError, match="cannot be read"):
        source.sample()
    energy.write_text("1000000")
    assert source.sample().energy_j == 0


@pytest.mark.parametrize("denied", [("intel-rapl:0", "intel-rapl:1"), ("intel-rapl:1",)])
def test_without_permission_it_says_so_and_how_to_get_it(fork, denied) -> None:
    # One package of two that may be read would pass for the machine: so that is refused too.
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which only its owner may enter
        machine = Machine(Path(folder, "powercap"))
        Path(folder).chmod(0o755)
        root = os.geteuid() == 0  # root reads what it likes
        for zone in denied:
            (machine.root / zone / "energy_uj").chmod(0o400 if root else 0)
        if root:
            os.seteuid(65534)
        found = find_source(DeviceIdentity("cpu"), powercap=machine.root)
        if root:
            os.seteuid(0)
        assert isinstance(found, NoPower)
        assert f"{machine.root / denied[0] / 'energy_uj'} may be read by root only" in found.reason
        assert "chmod a+r" in found.reason


def test_figures_of_the_cpu_agree_with_its_counters(machine: Machine) -> None:
    from overlap_callbacks.analysis.power.device import power_figures
    from overlap_callbacks.analysis.power.readings import Readings, Segment
    from overlap_callbacks.analysis.results.mode import Mode

    source = machine.source()
    readings, energy_uj = [], 1_000_000
    for tenth in range(41):  # 100 W for 2 s, then 300 W for 2 s
        machine.time_s = tenth / 10
        if tenth:
            energy_uj += 10_000_000 if tenth <= 20 else 30_000_000
        machine.energy("intel-rapl:0", energy_uj)
        readings.append(source.sample())
    segments = [
        Segment(0, 2_000_000_000, Mode.SEQUENTIAL, 4),
        Segment(2_000_000_000, 4_000_000_000, Mode.OVERLAPPED, 5),
    ]
    figures = power_figures(source.info, Readings.of(readings), segments, interval_s=0.1)
    overlapped, sequential = (figures.of(mode) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    assert overlapped is not None
    assert sequential is not None
    assert (overlapped.avg_w, overlapped.peak_w) == pytest.approx((300, 300))
    assert (sequential.avg_w, sequential.peak_w) == pytest.approx((100, 100))
    assert (overlapped.energy_per_step_j, sequential.energy_per_step_j) == pytest.approx((120, 50))
    assert overlapped.energy_method == sequential.energy_method == "counter"
