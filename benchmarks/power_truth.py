"""Are watts and joules true? Sensors that follow a script, whose integral over each mode's counted steps is the truth.

    python benchmarks/power_truth.py [--windows 200] [--only WORD] [--json benchmarks/results/power-truth.json]

Time is simulated. The sampler's own loop, on a clock that leaps from tick to tick, reads a scripted source; the
library's analysis makes figures of the readings. Steps are of random lengths. The script gives power at each
millisecond; the sensor averages over a time, is renewed at times of its own, and is late; the counter is renewed at
times of its own, wraps or steps back. What the library is told of the sensor is what its table says of the device.

A window is right if its watts and joules of each mode are within 2 % of the truth, and their 95 % intervals hold it; or
if there is no figure, and a reason. The goal is 95 % of windows within 2 %, and 94 % of intervals.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import overlap_callbacks
from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.readings import Reading, Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, SourceInfo
from overlap_callbacks.instruments.power.sampler import Sampler
from overlap_callbacks.instruments.power.sensors import (
    AMD_AVERAGE,
    AMD_CURRENT,
    FULL_TIME,
    ONE_SECOND,
    PART_TIME,
    Sensor,
)
from overlap_callbacks.instruments.power.source import EnergyCounter, PowerError, PowerSource

WITHIN, GOAL_WITHIN, GOAL_HELD = 0.02, 0.95, 0.94
DT_S = 0.001
START_S = 3.0
SLOWER = 1.2  # a sequential step, of an overlapped one
# What sensors really do.
FRESH, AVERAGE_25, AVERAGE_100 = Sensor(0.0, 0.0, 0.0), Sensor(0.025, 0.1, 0.0), Sensor(0.1, 0.1, 0.0)
AVERAGE_1, LATE = Sensor(1.0, 0.1, 0.0), Sensor(0.025, 0.1, 0.1)


@dataclass(frozen=True)
class Device:
    """What the library is told of a device.

    Attributes:
        sensor: by its table; None for power from the counter.
        interval_s: between readings.
        counter_s: how old the counter's value may be; None without a counter.
    """

    sensor: Sensor | None
    interval_s: float
    counter_s: float | None

    def info(self) -> SourceInfo:
        sensor = self.sensor
        return SourceInfo(
            "scripted", "Scripted", "scripted-0", "scripted",
            averaging_s=None if sensor is None else sensor.clear_s,
            energy_lag_s=self.counter_s,
            default_interval_s=self.interval_s,
            window_s=None if sensor is None else sensor.window_s,
            renewed_s=0.0 if sensor is None else sensor.renewed_s,
        )  # fmt: skip


# Of a package, as Intel's servers tell it in ``max_energy_range_uj``.
_RAPL_RANGE_MJ = 262_143_328

DEVICES = {
    "NVML, A100 and H100": Device(PART_TIME, 0.1, 0.1),
    "NVML, other chips": Device(FULL_TIME, 0.1, 0.1),
    "NVML, 1 s average": Device(ONE_SECOND, 0.1, 0.1),
    "AMD, current": Device(AMD_CURRENT, 0.02, 0.02),
    "AMD, average": Device(AMD_AVERAGE, 0.02, 0.02),
    "RAPL": Device(None, 0.1, 0.001),
}


@dataclass(frozen=True)
class Row:
    """One script.

    Attributes:
        device: key of ``DEVICES``.
        shape: of power in time.
        sensor: what the sensor really does.
        counter: what the counter does: ``none``, ``good``, ``wraps``, ``back``, ``frozen``, ``30 % high``.
        step_s: mean time of an overlapped step.
        noise: standard deviation of a step's time, as a fraction.
        block_s: blocks are made so long; 0 for two counted steps.
        warmup: uncounted steps of a block.
        fails_s: the sensor fails from the beginning of a random block, for so long.
        fails_share, unread_share: of the reads, at random: those that fail, and those that have a counter but no power.
        long_s: after the blocks comes a long one of each mode, of so many seconds of overlapped steps.
    """

    device: str
    shape: str
    sensor: Sensor = FRESH
    counter: str = "good"
    step_s: float = 0.31
    noise: float = 0.15
    block_s: float = 0.0
    warmup: int = 1
    fails_s: float = 0.0
    fails_share: float = 0.0
    unread_share: float = 0.0
    long_s: float = 0.0

    @property
    def name(self) -> str:
        sensor = self.sensor
        words = [f"{self.shape}, steps of {self.step_s * 1e3:.0f} ms +-{self.noise:.0%}"]
        words.append(f"blocks of {self.block_s:g} s" if self.block_s else "2 steps a block")
        if self.long_s:
            words.append(f"long blocks of {self.long_s:g} s")
        if self.warmup != 1:
            words.append(f"{self.warmup} warm-up steps")
        if self.device != "RAPL":
            words.append(
                f"sensor {sensor.window_s * 1e3:.0f} ms every {sensor.renewed_s * 1e3:.0f} ms, "
                f"{sensor.late_s * 1e3:.0f} ms late"
            )
        words.append(f"counter {self.counter}")
        if self.fails_s:
            words.append(f"fails for {self.fails_s:g} s")
        if self.fails_share:
            words.append(f"{self.fails_share:.0%} of reads fail")
        if self.unread_share:
            words.append(f"{self.unread_share:.0%} without power")
        return f"{self.device}: {', '.join(words)}"


def rows() -> Iterator[Row]:  # noqa: PLR0912
    """The rows of the table."""
    a100, other, average, amd, amd_average, rapl = DEVICES
    for noise in (0.0, 0.05, 0.15, 0.3):  # the square wave of the modes, by the default schedule and in longer blocks
        for block_s in (0.0, 0.5, 2.0):
            for counter in ("none", "good"):
                yield Row(a100, "modes", FRESH, counter, noise=noise, block_s=block_s)
    for sensor in (AVERAGE_25, AVERAGE_100, LATE):
        for counter in ("none", "good"):
            for block_s in (0.0, 2.0):
                yield Row(a100 if sensor is not AVERAGE_100 else other, "modes", sensor, counter, block_s=block_s)
    for block_s in (0.0, 0.5, 2.0):
        for counter in ("none", "good"):
            yield Row(average, "modes", AVERAGE_1, counter, block_s=block_s)
            yield Row(average, "modes", AVERAGE_1, counter, block_s=block_s, warmup=0)
    for step_s in (0.05, 0.1, 0.2, 0.31):  # power that swings with the step
        for noise in (0.0, 0.15):
            for shape in ("sawtooth", "burst"):
                for counter in ("none", "good"):
                    yield Row(a100, shape, AVERAGE_25, counter, step_s, noise, block_s=2.0)
    for sensor, device in ((FRESH, a100), (AVERAGE_100, other), (LATE, a100), (AVERAGE_1, average)):
        for counter in ("none", "good"):
            for block_s in (0.0, 2.0):
                yield Row(device, "sawtooth", sensor, counter, block_s=block_s)
    for shape in ("wave 1.7 s", "wave 0.31 s"):  # out of phase with modes and steps
        for counter in ("none", "good"):
            yield Row(a100, shape, AVERAGE_25, counter, block_s=2.0)
    for warmup in (0, 1):
        for step_s in (0.05, 1.0, 3.0):
            yield Row(a100, "burst", LATE, "good", step_s, warmup=warmup)
            yield Row(a100, "modes", LATE, "none", step_s, warmup=warmup)
    for counter in ("none", "good", "wraps"):
        for block_s in (0.0, 2.0):
            yield Row(a100, "modes", AVERAGE_25, counter, block_s=block_s, fails_s=1.0)
    for counter in ("wraps", "back", "frozen", "30 % high"):
        for block_s in (0.0, 2.0):
            yield Row(a100, "modes", AVERAGE_25, counter, block_s=block_s)
    for shape in ("modes", "sawtooth", "burst"):
        for counter in ("none", "good"):
            for block_s in (0.0, 0.5):
                yield Row(amd, shape, Sensor(0.02, 0.001, 0.05), counter, block_s=block_s)
        yield Row(amd_average, shape, AVERAGE_1, "good", block_s=0.5)
        for noise in (0.0, 0.3):
            for step_s in (0.05, 0.31):
                yield Row(rapl, shape, FRESH, "good", step_s, noise)
    for counter in ("wraps", "back"):
        for block_s in (0.0, 0.5):
            yield Row(rapl, "modes", FRESH, counter, block_s=block_s)
            yield Row(amd, "modes", Sensor(0.02, 0.001, 0.05), counter, block_s=block_s)
    for device in (a100, other):  # a sensor that averages over more than its table says
        for counter in ("none", "good"):
            for block_s in (0.0, 2.0):
                yield Row(device, "modes", AVERAGE_1, counter, block_s=block_s)
            yield Row(device, "modes", AVERAGE_1, counter, 1.0)
            yield Row(device, "sawtooth", AVERAGE_1, counter, block_s=2.0)
    for counter in ("none", "good"):  # reads that fail at random
        yield Row(a100, "modes", AVERAGE_25, counter, block_s=2.0, fails_share=0.3)
        yield Row(a100, "modes", AVERAGE_25, counter, block_s=2.0, unread_share=0.3)
        yield Row(amd, "modes", Sensor(0.02, 0.001, 0.05), counter, fails_share=0.3)
        yield Row(amd, "modes", Sensor(0.02, 0.001, 0.05), counter, unread_share=0.3)
    for counter, shape in (("good", "sawtooth"), ("good", "burst"), ("30 % high", "modes"), ("frozen", "modes")):
        yield Row(a100, shape, AVERAGE_25, counter, block_s=2.0, fails_share=0.3)
        yield Row(amd, shape, Sensor(0.02, 0.001, 0.05), counter, fails_share=0.3)
    yield Row(other, "modes", AVERAGE_100, "good", block_s=2.0, fails_share=0.3)
    yield Row(rapl, "modes", FRESH, "good", fails_share=0.3)
    # The default schedule in the windows that have long blocks; of 20 ms, 161 steps have room.
    sensors = ((a100, AVERAGE_25), (other, AVERAGE_100), (average, AVERAGE_1), (amd, Sensor(0.02, 0.001, 0.05)))
    for step_s, long_s in ((0.02, 161 * 0.02), (0.05, 6.0), (0.2, 6.0), (1.0, 6.0)):
        for device, sensor in (*sensors, (amd_average, AVERAGE_1), (rapl, FRESH)):
            for counter in ("good",) if device in (amd_average, rapl) else ("good", "none"):
                for shape in ("modes", "sawtooth"):
                    yield Row(device, shape, sensor, counter, step_s, 0.05, long_s=long_s)


@dataclass
class Script:
    """Power of one window, and the steps that it belongs to.

    Attributes:
        energy_j: from the start, at each millisecond.
        segments: the counted steps of each block; where there are long ones, of those alone.
        stretches: these, and the warm-up steps of each block.
        end_s: of the window.
    """

    energy_j: list[float]
    segments: list[Segment]
    stretches: list[Segment]
    end_s: float

    def at(self, time_s: float) -> float:
        """Joules until a time."""
        place = max(0.0, time_s / DT_S)
        index = min(int(place), len(self.energy_j) - 2)
        low = self.energy_j[index]
        return low + (self.energy_j[index + 1] - low) * (place - index)

    def mean_w(self, start_s: float, end_s: float) -> float:
        """Mean power between two times; of the moment, if they are the same."""
        start_s = min(start_s, end_s - DT_S)
        return (self.at(end_s) - self.at(start_s)) / (end_s - start_s)


def script_of(row: Row, chance: np.random.Generator) -> Script:
    """A window by the default schedule, of blocks that are as long as the row says."""
    counted = max(2, int(np.ceil(row.block_s / row.step_s - 1e-9))) if row.block_s else 2
    modes: list[tuple[Mode, bool, int]] = [(Mode.OVERLAPPED, False, -1)]
    for block, letter in enumerate("OSSO" * 4):
        mode = Mode.OVERLAPPED if letter == "O" else Mode.SEQUENTIAL
        modes += [(mode, False, block)] * row.warmup + [(mode, True, block)] * counted
    for block, mode in ((16, Mode.OVERLAPPED), (17, Mode.SEQUENTIAL)) if row.long_s else ():
        modes += [(mode, False, block)] * row.warmup + [(mode, True, block)] * math.ceil(row.long_s / row.step_s)
    spread = np.sqrt(np.log1p(row.noise**2))
    lengths = row.step_s * np.exp(chance.normal(-spread * spread / 2, spread, len(modes)))
    lengths *= [SLOWER if mode is Mode.SEQUENTIAL else 1.0 for mode, _, _ in modes]
    starts = START_S + chance.uniform(0, 1) + np.concatenate(([0.0], np.cumsum(lengths)))
    times = np.arange(0.0, starts[-1] + START_S, DT_S)
    step = np.clip(np.searchsorted(starts, times, side="right") - 1, 0, len(modes) - 1)
    of_mode = np.array([400.0 if mode is Mode.OVERLAPPED else 300.0 for mode, _, _ in modes])[step]
    phase = np.clip((times - starts[step]) / lengths[step], 0.0, 1.0)
    if row.shape == "modes":
        power = of_mode
    elif row.shape == "sawtooth":
        power = of_mode * (0.6 + 0.8 * phase)
    elif row.shape == "burst":  # computes, then communicates
        power = of_mode * np.where(phase < 0.7, 1.1, 0.6)
    else:
        period_s = float(row.shape.split()[1])
        power = of_mode * np.where((times + chance.uniform(0, 10)) % period_s < period_s / 2, 1.2, 0.8)
    energy = np.concatenate(([0.0], np.cumsum(power) * DT_S))
    stretches = []
    for block in range(18 if row.long_s else 16):
        for counted in (False, True):
            own = [index for index, (_, counts, number) in enumerate(modes) if (counts, number) == (counted, block)]
            if own:
                begins = tuple(round(starts[index] * 1e9) for index in own)
                end_ns = round(starts[own[-1] + 1] * 1e9)
                stretches.append(Segment(begins[0], end_ns, modes[own[0]][0], len(own), begins, counted=counted))
    counting = [s for s in stretches if s.counted][-2 if row.long_s else 0 :]
    return Script(energy.tolist(), counting, stretches, float(starts[-1]))


class Clock:
    """Time that leaps: waiting takes no time."""

    def __init__(self, chance: np.random.Generator) -> None:
        self.now = 0
        self._late = iter(np.minimum(chance.exponential(0.3e6, 20_000), 3e6).astype(int).tolist())

    def __call__(self) -> int:
        return self.now

    def acquire(self, _blocking: bool = True, timeout: float = 0.0) -> bool:
        self.now += round(max(0.0, timeout) * 1e9) + next(self._late)
        return False


@dataclass
class Scripted(PowerSource):
    """A device that follows a script."""

    row: Row
    script: Script
    clock: Clock
    chance: np.random.Generator
    info: SourceInfo = field(init=False)

    def __post_init__(self) -> None:
        device = DEVICES[self.row.device]
        self.info = (replace(device, counter_s=None) if self.row.counter == "none" else device).info()
        self._phase_s = self.chance.uniform(0, 1, 2).tolist()
        begin = self.script.segments[int(self.chance.integers(len(self.script.segments)))].start_ns / 1e9
        self._fails = (begin, begin + self.row.fails_s)
        self._failing = int(self.chance.integers(2**31)) if self.row.fails_share or self.row.unread_share else 0
        self._period_s = min(device.counter_s or 0.001, 0.1)
        # RAPL's counters tell how far they count, which is less than 2**32 mJ.
        told_mj = _RAPL_RANGE_MJ if self.row.device == "RAPL" else None
        self._wrap_mj = told_mj or 2**32
        # So that the counter wraps in the middle of the window.
        self._offset_mj = self._wrap_mj - round(1e3 * self.script.at(self.script.end_s) / 2)
        self._counter = EnergyCounter(1e-3, told_mj)
        self._last: tuple[int, float] | None = None
        self._middle_s = self.script.end_s / 2 + START_S / 2
        self._stop: Any = None

    def sample(self) -> Reading:
        time_ns = self.clock.now
        self.clock.now += 30_000
        now_s = time_ns / 1e9
        if now_s > self.script.end_s:
            self._stop.requested = True
        if self._fails[0] <= now_s < self._fails[1] or self._is_among(self.row.fails_share, time_ns):
            raise PowerError("scripted")
        energy_j = self._counted_j(now_s)
        sensor, device = self.row.sensor, DEVICES[self.row.device]
        if device.sensor is None:
            last, self._last = self._last, (time_ns, energy_j or 0.0)
            if last is None:
                return Reading(time_ns, energy_j=energy_j)
            elapsed_s = (time_ns - last[0]) / 1e9
            return Reading(time_ns, elapsed_s, ((energy_j or 0.0) - last[1]) / elapsed_s, energy_j)
        taken_s = now_s - sensor.late_s
        if sensor.renewed_s:
            taken_s -= (taken_s + self._phase_s[0]) % sensor.renewed_s
        power_w = round(self.script.mean_w(taken_s - sensor.window_s, taken_s), 3)
        unread = self._is_among(self.row.unread_share, time_ns)
        return Reading(time_ns, device.sensor.clear_s, None if unread else power_w, energy_j)

    def _is_among(self, share: float, time_ns: int) -> bool:
        """Whether a read is one of the share that fails."""
        return bool(share) and np.random.default_rng([self._failing, time_ns]).uniform() < share

    def _counted_j(self, now_s: float) -> float | None:
        kind = self.row.counter
        if kind == "none":
            return None
        renewed_s = now_s - (now_s + self._phase_s[1]) % self._period_s
        value = round(1e3 * self.script.at(renewed_s))
        if kind == "frozen":
            value = 1000
        elif kind == "30 % high":
            value = round(1.3 * value)
        elif kind == "wraps":
            value = (value + self._offset_mj) % self._wrap_mj
        elif kind == "back" and now_s > self._middle_s:
            value -= 500_000
        return self._counter.read(value)

    def close(self) -> None:
        """There is nothing to release."""


def measured(row: Row, seed: int) -> tuple[Script, DevicePower, list[dict[str, Any]]]:
    """One window: its script, what the library makes of the sensor, and that beside the truth."""
    chance = np.random.default_rng(seed)
    script, clock = script_of(row, chance), Clock(chance)
    source = Scripted(row, script, clock, chance)
    sampler = Sampler(source, clock_ns=clock, jitter=chance.random)
    sampler._sleep = clock  # type: ignore[assignment]
    source._stop = sampler._stop
    sampler._read_at_every_tick(sampler._stop)
    readings = sampler.readings()
    found = power_figures(
        source.info, readings, script.segments, interval_s=sampler.interval_s, late=sampler.late, failed=sampler.failed,
        stretches=script.stretches,
    )  # fmt: skip
    results = []
    for mode in Mode:
        segments = [s for s in script.segments if s.mode is mode]
        joules = sum(script.at(s.end_ns / 1e9) - script.at(s.start_ns / 1e9) for s in segments)
        seconds, steps = sum(s.duration_s for s in segments), sum(s.num_steps for s in segments)
        figures = found.of(mode)
        assert figures is not None
        if (row.fails_s or row.unread_share) and not any("failed" in problem for problem in found.problems):
            raise AssertionError("failures are not told")
        for what, truth, value, low, high in (
            ("W", joules / seconds, figures.avg_w, figures.avg_w_ci_low, figures.avg_w_ci_high),
            ("J", joules / steps, figures.energy_per_step_j, figures.energy_per_step_j_ci_low,
             figures.energy_per_step_j_ci_high),
        ):  # fmt: skip
            results.append(
                {
                    "what": f"{mode.value} {what}",
                    "error": None if value is None else value / truth - 1,
                    "held": None if low is None or high is None else low <= truth <= high,
                    "width": None if low is None or high is None else (high - low) / 2 / truth,
                    "reason": figures.missing,
                    "method": figures.energy_method,
                    "peak": None if figures.peak_w is None else figures.peak_w,
                }
            )
    return script, found, results


def run(row: Row, windows: int) -> dict[str, Any]:
    """One row of the table: the worst of watts and joules of both modes."""
    by_what: dict[str, list[dict[str, Any]]] = {}
    for seed in range(windows):
        for result in measured(row, seed)[2]:
            by_what.setdefault(result["what"], []).append(result)
    found: dict[str, Any] = {"row": row.name, "windows": windows}
    within, held, figures, worst, within_of, held_of = [], [], [], [], [], []
    for results in by_what.values():
        errors = [abs(result["error"]) for result in results if result["error"] is not None]
        intervals = [result["held"] for result in results if result["held"] is not None]
        silent = sum(result["error"] is None and not result["reason"] for result in results)
        wrong = sum(error > WITHIN for error in errors) + silent
        missed = intervals.count(False)
        figures.append(len(errors) / windows)
        within.append(1 - wrong / windows)
        held.append(1 - missed / windows)
        within_of.append(1 - wrong / len(errors) if errors else 1.0)
        held_of.append(1 - missed / len(intervals) if intervals else 1.0)
        worst.append(max(errors, default=0.0))
    every = [result for results in by_what.values() for result in results]
    methods = sorted({result["method"] for result in every if result["method"]})
    reasons = [result["reason"] for result in every if result["reason"]]
    widths = [result["width"] for result in every if result["width"] is not None]
    found |= {
        "figures": min(figures), "within": min(within), "held": min(held), "within_of_figures": min(within_of),
        "held_of_figures": min(held_of), "largest_error": max(worst), "methods": methods,
        "half_width": float(np.median(widths)) if widths else None, "reason": reasons[0] if reasons else "",
        "ok": min(within) >= GOAL_WITHIN and min(held) >= GOAL_HELD,
    }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--part", default="1/1", help="of the rows, say 1/4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    every = list(rows())
    table = windows_table([row for row in every[part - 1 :: parts] if options.only in row.name], options.windows)
    print(f"{sum(row['ok'] for row in table)} of {len(table)} rows hold")
    if options.json:  # its rows that do not run now stay
        before = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        names, found_now = [row.name for row in every], {row["row"] for row in table}
        table += [row for row in before if row["row"] in names and row["row"] not in found_now]
        table.sort(key=lambda row: names.index(row["row"]))
        write(options.json, table, within=WITHIN, windows_within=GOAL_WITHIN, intervals=GOAL_HELD)


def write(file: Path, rows: list[dict[str, Any]], **goal: float) -> None:
    """The rows of a table, with what it was made by and with."""
    content = {
        "date": datetime.date.today().isoformat(), "command": f"python {' '.join(sys.argv)}",
        "python": platform.python_version(), "numpy": np.__version__,
        "overlap_callbacks": overlap_callbacks.__version__, "goal": goal, "rows": rows,
    }  # fmt: skip
    file.write_text(json.dumps(content, indent=1) + "\n")


def windows_table(chosen: list[Row], windows: int) -> list[dict[str, Any]]:
    table = []
    print("figures  within 2 %  (of figures)  held  (of figures)  largest error  half-width  method")
    for row in chosen:
        table.append(found := run(row, windows))
        width, held = "" if found["half_width"] is None else f"{found['half_width']:.1%}", f"{found['held']:4.0%}"
        print(
            f"{found['figures']:7.0%}  {found['within']:10.1%}  {found['within_of_figures']:12.1%}  {held}"
            f"  {found['held_of_figures']:12.1%}  {found['largest_error']:13.2%}  {width:>10}  "
            f"{'' if found['ok'] else 'NOT OK '}{'/'.join(found['methods']):8} {found['row']} | {found['reason']}",
            flush=True,
        )
    return table


if __name__ == "__main__":
    main()
