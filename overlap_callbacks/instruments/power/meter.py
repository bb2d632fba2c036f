"""Measures the power of devices while a window is open, for the monitor.

Finding a source loads a vendor's library, and stopping a sampler waits for a read. Both happen on the meter's own
thread, so that nothing blocks the training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.readings import Segment
from overlap_callbacks.analysis.power.trace import power_trace
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, PowerTrace
from overlap_callbacks.instruments.power.discovery import CPU, DeviceIdentity, NoPower, find_source
from overlap_callbacks.instruments.power.sampler import Sampler, check_intervals
from overlap_callbacks.instruments.power.source import INSTANTANEOUS, PowerSource

Find = Callable[[DeviceIdentity], "PowerSource | NoPower"]


@dataclass(frozen=True)
class PowerOptions:
    """The user's power options, validated: a TypeError or ValueError names the option.

    Attributes:
        interval_s: time between readings; None for the source's own default.
        idle_interval_s: time between readings outside windows; None for no readings there.
        per_node: whether one process of each node reads all of its devices, on one thread. Else each reads its own.
    """

    enabled: bool = True
    interval_s: float | None = None
    idle_interval_s: float | None = None
    per_node: bool = False

    def __post_init__(self) -> None:
        check_intervals(self.interval_s, self.idle_interval_s, "power_")


@dataclass(frozen=True)
class MeasuredPower:
    """Power of one window on one rank: figures by device, and the first device's trace; empty without a source."""

    figures: tuple[DevicePower, ...] = ()
    trace: PowerTrace | None = None


class PowerMeter:
    """Reads the power of devices during windows.

    Args:
        identities: the devices; empty if another process reads them.
        options: the user's options.
        tell: called on the meter's thread with one line that says why there is no power, or no more of it, and with
            whether the user would expect power on this device.
        find: makes a source; None for ``find_source``.
    """

    def __init__(
        self,
        identities: Sequence[DeviceIdentity],
        options: PowerOptions,
        tell: Callable[[str, bool], None],
        find: Find | None = None,
    ) -> None:
        self._identities = identities
        self._options = options
        self._tell = tell
        self._find = find or find_source
        self._worker = Worker("overlap-callbacks-power-control", self._fail)
        self._sampler: Sampler | None = None
        self._given_up = not options.enabled or not identities
        self._counted = (0, 0)  # ticks skipped and reads failed until the last window
        self._on_tick: Callable[[], None] = lambda: None

    @property
    def elsewhere(self) -> bool:
        """Whether another process reads this process's device."""
        return not self._identities

    def begin(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Start reading for a window; ``on_tick`` is called on the sampler's thread at each tick."""
        if not self._given_up:
            self._on_tick = on_tick
            self._worker.submit(self._begin)

    def end(self) -> None:
        self._on_tick = lambda: None  # must not keep the window alive
        if not self._given_up:
            self._worker.submit(self._end)

    def measure(
        self,
        segments: Sequence[Segment],
        *,
        since_ns: int,
        long: Sequence[Segment] = (),
        shown: Sequence[Segment] = (),
        phases: Sequence[StepPhases] = (),
    ) -> MeasuredPower:
        """The power of a closed window.

        Args:
            segments: the counted blocks.
            since_ns: when the window opened, as of ``time.perf_counter_ns``.
            long: long blocks. They alone give the power if the others do not give the watts of both modes, which would
                then only add noise.
            shown: all intervals of time in one mode, for the trace; empty for ``segments``.
            phases: when the first device computed and communicated, in its profiled steps.
        """
        sampler = self._sampler
        if sampler is None or not segments:
            return MeasuredPower()
        # Ticks skipped and reads failed since the last window.
        before, self._counted = self._counted, (sampler.late, sampler.failed)
        late, failed = self._counted[0] - before[0], self._counted[1] - before[1]

        def figures_of(number: int, blocks: Sequence[Segment]) -> DevicePower:
            return power_figures(
                sampler.sources[number].info,
                sampler.readings(since_ns, number),
                blocks,
                interval_s=sampler.interval_s,
                late=late,
                failed=failed,
                phases=() if number else phases,
                stretches=shown,
            )

        figures = []
        for number in range(len(sampler.sources)):
            found = figures_of(number, segments)
            if {block.mode for block in long} == set(Mode) and not _has_both_watts(found):
                of_long = figures_of(number, long)
                found = of_long if _has_both_watts(of_long) else found
            figures.append(found)
        first = sampler.sources[0].info
        trace = power_trace(
            sampler.readings(since_ns),
            shown or segments,
            averaging_s=None if first.power_kind == INSTANTANEOUS else first.window_s,
            tdp_w=first.tdp_w,
            phases=phases,
        )
        return MeasuredPower(tuple(figures), trace)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop reading and release the devices; waits at most ``timeout_s``."""
        self._given_up = True
        if self._worker.started:
            self._worker.submit(self._close)
            self._worker.close(timeout_s)

    # -- on the meter's thread

    def _begin(self) -> None:
        if self._sampler is None:
            sources: list[PowerSource] = []
            for identity in self._identities:
                source = self._find(identity)
                if isinstance(source, NoPower):
                    self._given_up = True
                    self._tell(f"{source.reason} [OC401]", identity.vendor != CPU)
                    for opened in sources:
                        opened.close()
                    return
                sources.append(source)
            self._sampler = Sampler(
                sources,
                interval_s=self._options.interval_s,
                idle_interval_s=self._options.idle_interval_s,
                on_give_up=lambda why: self._tell(f"{why} [OC402]", True),
                on_tick=self._tick,
            )
        self._sampler.start()

    def _tick(self) -> None:  # on the sampler's thread
        with contextlib.suppress(Exception):  # of a device that fails; the thread that reads its marks says so
            self._on_tick()

    def _end(self) -> None:
        if self._sampler is not None:
            self._sampler.rest()

    def _close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def _fail(self, error: Exception) -> None:
        self._given_up = True
        self._tell(f"power is not measured: {type(error).__name__}: {error} [OC403]", True)


def _has_both_watts(power: DevicePower) -> bool:
    return len(power.modes) == len(Mode) and all(mode.avg_w is not None for mode in power.modes)
