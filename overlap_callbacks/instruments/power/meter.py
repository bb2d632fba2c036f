"""Power of the devices that this process reads while a window is open: what the monitor drives.

Finding a source loads a vendor's library, and stopping a sampler waits for a read to come back. Both happen on a thread
of the meter's own, so that nothing here makes the training thread wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_callbacks import _validation
from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.power.trace import power_trace
from overlap_callbacks.analysis.results.power import DevicePower, PowerTrace
from overlap_callbacks.instruments.power.discovery import CPU, DeviceIdentity, NoPower, find_source
from overlap_callbacks.instruments.power.sampler import MIN_INTERVAL_S, Sampler
from overlap_callbacks.instruments.power.source import PowerSource

Find = Callable[[DeviceIdentity], "PowerSource | NoPower"]


@dataclass(frozen=True)
class PowerOptions:
    """What a user may choose.

    Attributes:
        enabled: whether power is measured.
        interval_s: time between readings; None for the source's own.
        idle_interval_s: time between readings between windows; None for none there.
        per_node: one process of each node reads all of its devices, on one thread; else each reads its own.

    Raises:
        TypeError: an interval is no number.
        ValueError: an interval is too short, or the idle one is the shorter.
    """

    enabled: bool = True
    interval_s: float | None = None
    idle_interval_s: float | None = None
    per_node: bool = False

    def __post_init__(self) -> None:
        for name, value in (("power_interval_s", self.interval_s), ("power_idle_interval_s", self.idle_interval_s)):
            if value is not None and _validation.seconds(name, value) < MIN_INTERVAL_S:
                raise ValueError(f"{name} must be at least {MIN_INTERVAL_S:g} s, got {value!r}")
        if self.interval_s and self.idle_interval_s and self.idle_interval_s < self.interval_s:
            raise ValueError(
                f"power_idle_interval_s must be at least power_interval_s ({self.interval_s:g}), "
                f"got {self.idle_interval_s!r}"
            )


@dataclass(frozen=True)
class MeasuredPower:
    """Power of one window on one rank; empty where there is no source."""

    figures: tuple[DevicePower, ...] = ()
    trace: PowerTrace | None = None


class PowerMeter:
    """Reads the power of devices during windows.

    Args:
        identities: of the devices; none where another process reads them.
        options: the user's choice.
        tell: gets the one line that says why there is no power, or no more, and whether one would expect some; called
            on a thread of the meter's own.
        find: makes a source; by default ``find_source``.
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
        self._late = 0
        self._on_tick: Callable[[], None] = lambda: None

    @property
    def elsewhere(self) -> bool:
        """Whether another process reads the device of this one."""
        return not self._identities

    def begin(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """A window opens.

        Args:
            on_tick: called on the sampler's thread at each of its ticks.
        """
        if not self._given_up:
            self._on_tick = on_tick
            self._worker.submit(self._begin)

    def end(self) -> None:
        """It is closed."""
        self._on_tick = lambda: None  # keeps no window alive
        if not self._given_up:
            self._worker.submit(self._end)

    def measure(
        self,
        segments: Sequence[Segment],
        *,
        since_ns: int,
        shown: Sequence[Segment] = (),
        communication: Sequence[tuple[int, int]] = (),
    ) -> MeasuredPower:
        """The figures of a window that is closed.

        Args:
            segments: the blocks that count.
            since_ns: when the window opened.
            shown: all stretches in one mode, for the trace.
            communication: when communication was known to be in flight, for the trace.
        """
        sampler = self._sampler
        if sampler is None or not segments:
            return MeasuredPower()
        late = self._late_of(sampler)
        figures = tuple(
            power_figures(
                source.info, sampler.readings(since_ns, number), segments, interval_s=sampler.interval_s, late=late
            )
            for number, source in enumerate(sampler.sources)
        )
        first = sampler.sources[0].info
        trace = power_trace(
            sampler.readings(since_ns),
            shown or segments,
            averaging_s=first.averaging_s,
            tdp_w=first.tdp_w,
            communication=communication,
        )
        return MeasuredPower(figures, trace)

    def _late_of(self, sampler: Sampler) -> int:
        """Readings that came late since this was asked last."""
        before, self._late = self._late, sampler.late
        return self._late - before

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop reading and let go of the device."""
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
                    self._tell(source.reason, identity.vendor != CPU)
                    for found in sources:
                        found.close()
                    return
                sources.append(source)
            self._sampler = Sampler(
                sources,
                interval_s=self._options.interval_s,
                idle_interval_s=self._options.idle_interval_s,
                on_give_up=lambda why: self._tell(why, True),
                on_tick=self._tick,
            )
        self._sampler.start()

    def _tick(self) -> None:  # on the sampler's thread
        self._on_tick()

    def _end(self) -> None:
        if self._sampler is not None:
            self._sampler.rest()

    def _close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def _fail(self, error: Exception) -> None:
        self._given_up = True
        self._tell(f"power is not measured: {type(error).__name__}: {error}", True)
