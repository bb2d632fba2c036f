from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from overlap_callbacks.analysis.power.sums import PowerSums, add_power, pooled_power, power_of
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, JobPower, ModePower, SourceInfo


def figures(device: str, watts: float | None, problems: tuple[str, ...] = (), **more) -> tuple[DevicePower, ...]:
    source = SourceInfo("fake", "Fake", device, "instantaneous", 0.1, None, 0.1)
    mode = ModePower(Mode.OVERLAPPED, avg_w=watts, peak_w=watts, energy_per_step_j=watts and watts / 2, **more)
    return (DevicePower(source, 0.1, 0.3, (mode,), problems=problems),)


def pool(by_rank: Mapping[int, Sequence[DevicePower]], *, whole: bool = True) -> JobPower:
    """Power over all ranks, of the power of each rank's devices."""
    parts = [power_of(rank, power) for rank, power in sorted(by_rank.items())]
    return pooled_power(add_power(parts) if parts else PowerSums(), whole=whole)


def overlapped(pooled: JobPower):
    found = pooled.of(Mode.OVERLAPPED)
    assert found is not None
    return found


def test_devices_add_up() -> None:
    pooled = pool(
        {
            0: figures("a", 300.0, sm_clock_mhz=1500.0, throttle_fraction=0.5, energy_method="counter"),
            1: figures("b", 500.0, sm_clock_mhz=1700.0, throttle_fraction=0.0, energy_method="counter"),
        }
    )
    found = overlapped(pooled)
    assert (pooled.num_devices, pooled.ranks, pooled.without) == (2, (0, 1), ())
    assert (found.total_avg_w, found.mean_avg_w, found.peak_w, found.energy_per_step_j) == (800, 400, 500, 400)
    assert (found.sm_clock_mhz, found.min_sm_clock_mhz) == (1600, 1500)
    assert (found.throttle_fraction, found.max_throttle_fraction) == (0.25, 0.5)
    assert found.energy_method == "counter"
    assert pooled.of(Mode.SEQUENTIAL) is None


def test_a_gpu_that_two_ranks_share_counts_once() -> None:
    pooled = pool({0: figures("a", 300.0), 1: figures("a", 302.0), 2: figures("b", 500.0)})
    assert pooled.num_devices == 2
    assert pooled.ranks == (0, 1, 2)
    assert overlapped(pooled).total_avg_w == 800  # the lowest rank speaks for it
    assert overlapped(pooled).num_devices == 2


def test_a_rank_without_figures_does_not_speak_for_a_device_that_another_measured() -> None:
    pooled = pool({0: figures("a", None), 1: figures("a", 302.0)})
    assert overlapped(pooled).total_avg_w == 302


def test_a_sum_over_some_devices_does_not_pass_for_one_over_all() -> None:
    pooled = pool({0: figures("a", 300.0), 1: figures("b", None)})
    found = overlapped(pooled)
    assert (found.total_avg_w, found.energy_per_step_j) == (None, None)
    assert (found.mean_avg_w, found.num_devices) == (300, 1)


def test_ranks_without_a_source_are_named() -> None:
    pooled = pool({3: (), 0: figures("a", 300.0), 1: ()})
    assert (pooled.ranks, pooled.without, pooled.num_devices) == ((0,), (1, 3), 1)
    assert pool({0: ()}) == JobPower(0, (), (0,))


def test_different_methods_are_mixed_and_problems_are_said_once() -> None:
    pooled = pool(
        {
            0: figures("a", 1.0, ("late",), energy_method="counter"),
            1: figures("b", 1.0, ("late", "reset"), energy_method="held samples"),
        }
    )
    assert overlapped(pooled).energy_method == "mixed"
    assert pooled.problems == ("late", "reset")


def test_reasons_for_lower_clocks_that_this_version_does_not_know_are_said() -> None:
    pooled = pool({0: figures("a", 300.0, reasons={"sw_power_cap": 0.5, "too_old": 0.1, "moonlight": 0.2})})
    assert overlapped(pooled).reasons is not None
    assert overlapped(pooled).reasons["sw_power_cap"] == 0.5
    assert pooled.problems == ("the job's power leaves out reasons that are not known: moonlight, too_old [OC414]",)


@pytest.mark.parametrize("by_rank", [{0: figures("a", 300.0), 1: ()}, {}])
def test_it_can_be_written_down_and_read_back(by_rank) -> None:
    pooled = pool(by_rank)
    assert msgspec.json.decode(msgspec.json.encode(pooled), type=JobPower) == pooled


def with_clocks(device: str, *clocks: tuple[Mode, float, int]) -> tuple[DevicePower, ...]:
    source = SourceInfo("fake", "Fake", device, "instantaneous", 0.1, None, 0.1)
    modes = (ModePower(mode, compute_clock_mhz=mhz, compute_clock_readings=count) for mode, mhz, count in clocks)
    return (DevicePower(source, 0.1, 0.3, tuple(modes)),)


def test_clocks_in_compute_are_compared_on_the_devices_that_have_them_in_both_modes() -> None:
    ov, seq = Mode.OVERLAPPED, Mode.SEQUENTIAL
    pooled = pool(
        {
            0: with_clocks("a", (ov, 1500.0, 3), (seq, 1600.0, 4)),
            1: with_clocks("b", (ov, 1700.0, 9), (seq, 1800.0, 2)),
            2: with_clocks("c", (ov, 900.0, 5)),
        }
    )
    found = [(m.compute_clock_mhz, m.compute_clock_readings) for m in pooled.modes]
    assert found == [(1600, 12), (1700, 6)]


def test_of_many_ranks_without_a_source_the_lowest_are_listed_and_all_are_counted() -> None:
    few = pool({0: figures("a", 300.0), 1: ()})
    assert b"num_without" not in msgspec.json.encode(few)
    many = pool({0: figures("a", 300.0), **{rank: () for rank in range(1, 200)}})
    assert (many.without, many.num_without) == (tuple(range(1, 65)), 199)


def test_of_many_devices_sums_and_extremes_are_those_of_all() -> None:
    watts = {rank: 300.0 + rank for rank in range(200)}
    by_rank = {rank: figures(f"device {rank}", value, sm_clock_mhz=1000.0 + rank) for rank, value in watts.items()}
    found = overlapped(pool(by_rank))
    assert found.total_avg_w == pytest.approx(sum(watts.values()))
    assert (found.num_devices, found.peak_w, found.min_sm_clock_mhz) == (200, 499.0, 1000.0)


def test_single_devices_and_sums_of_many_add_up() -> None:
    """As rank 0 of a large job hears them: itself, some ranks alone, and leaders of hundreds."""
    watts = {rank: 300.0 + rank for rank in range(200)}
    parts = [power_of(rank, figures(f"device {rank}", value)) for rank, value in watts.items()]
    heard = [*parts[:3], add_power(parts[3:100]), add_power(parts[100:])]
    found = overlapped(pooled_power(add_power(heard), whole=True))
    assert found.total_avg_w == pytest.approx(sum(watts.values()))
    assert (found.num_devices, found.peak_w) == (200, 499.0)
