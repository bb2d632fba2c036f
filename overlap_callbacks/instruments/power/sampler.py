"""Reads one or more power sources at regular times, on one thread, and keeps the latest readings."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from overlap_callbacks import _validation
from overlap_callbacks.analysis.power.readings import Reading, Readings
from overlap_callbacks.instruments.power.source import Clock, DeviceLostError, PowerSource, host_clock

# 20,000 readings are half an hour at 100 ms, and about 6 MB.
_CAPACITY = 20_000

MIN_INTERVAL_S = 0.001

# Waits after consecutive failed reads, in seconds; the first retries come at the next ticks. If the read after the last
# wait fails too, the sampler gives up. So many that a device which fails a third of its reads rarely waits.
BACK_OFF_S = (*[0.0] * 6, 0.1, 0.5, *[2.0] * 10)


class Sampler:
    """Reads a source between ``start`` and ``stop``.

    Each interval of a fixed grid has one tick, at a random time within it: otherwise ticks could stay in phase with the
    steps, and alias power that varies with them. If a read is slow or the thread gets no CPU, missed ticks are skipped
    and counted. A failed read is retried with growing waits, for twenty seconds; then the sampler gives up for good. It
    gives up on a lost device at once.

    Args:
        source: a source, or several to read at the same ticks. They belong to the sampler's thread from
            ``start`` to ``stop``, and are given up together.
        interval_s: time between readings, at least 1 ms; None for the source's own default.
        idle_interval_s: time between readings after ``rest``; None to pause there.
        capacity: number of readings kept per source; the oldest are dropped.
        on_give_up: called once, on the sampler's thread, with a message for the user.
        on_tick: called on the sampler's thread before each reading.
        clock_ns: the clock of the ticks.
        jitter: returns where in its interval a tick falls, from 0 to 1; None for random.

    Attributes:
        late: ticks that were skipped because a reading came more than one interval late.
        failed: reads that failed.
        given_up: why the source was given up; empty if it was not.
        cpu_s: CPU time of the sampler's thread in seconds, once it has stopped.

    Raises:
        TypeError, ValueError: an interval or ``capacity`` is not a number, or out of range.
    """

    def __init__(
        self,
        source: PowerSource | Sequence[PowerSource],
        *,
        interval_s: float | None = None,
        idle_interval_s: float | None = None,
        capacity: int = _CAPACITY,
        on_give_up: Callable[[str], None] | None = None,
        on_tick: Callable[[], None] | None = None,
        clock_ns: Clock = host_clock,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self.sources = (source,) if isinstance(source, PowerSource) else tuple(source)
        default_s = self.sources[0].info.default_interval_s
        check_intervals(default_s if interval_s is None else interval_s, idle_interval_s)
        self.interval_s = float(default_s if interval_s is None else interval_s)
        self.idle_interval_s = None if idle_interval_s is None else float(idle_interval_s)
        self.late = 0
        self.failed = 0
        self.given_up = ""
        self.cpu_s = 0.0
        self._on_give_up = on_give_up
        self._on_tick = on_tick
        self._clock_ns = clock_ns
        # Its own generator: the job's random numbers are untouched, and ranks tick independently.
        self._jitter = random.Random(os.urandom(16)).random if jitter is None else jitter
        capacity = _validation.count("capacity", capacity, minimum=1)
        self._kept: list[deque[Reading]] = [deque(maxlen=capacity) for _ in self.sources]
        self._thread: threading.Thread | None = None
        self._stop = _Stop()
        # Acquiring a lock with a timeout is one system call; a Condition's wait costs tens of microseconds per tick.
        self._sleep = threading.Lock()
        self._sleep.acquire()
        self._pace_s = self.interval_s

    @property
    def running(self) -> bool:
        """Whether the sampler's thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> bool:
        """Read at the full rate from now on. Returns False if the source was given up, or hangs in an earlier read."""
        if self.given_up:
            return False
        if self._thread is not None and self._thread.is_alive():
            if self._stop.requested:  # its read has not returned, and two threads must not share a source
                return False
            self._set_pace(self.interval_s)
            return True
        self._stop = _Stop()
        self._pace_s = self.interval_s
        thread = threading.Thread(target=self._run, args=(self._stop,), name="overlap-callbacks-power", daemon=True)
        thread.start()
        self._thread = thread  # only now: a thread that did not start cannot be joined
        return True

    def rest(self, timeout_s: float = 1.0) -> None:
        """Read at the idle rate from now on, or pause if there is none."""
        if self.idle_interval_s is None:
            self.stop(timeout_s)
        elif self.running:
            self._set_pace(self.idle_interval_s)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End the thread. Returns False if a read takes longer than ``timeout_s``. Readings are kept."""
        thread = self._thread
        if thread is None:
            return True
        self._stop.requested = True
        self._wake()
        if thread is not threading.current_thread():
            thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop, and close the sources. Returns False if a read hangs; the sources then stay open, still in use."""
        if not self.stop(timeout_s):
            return False
        for source in self.sources:
            source.close()
        return True

    def readings(self, since_ns: int | None = None, source: int = 0) -> Readings:
        """The readings of a source, oldest first, from ``since_ns`` on (as of ``time.perf_counter_ns``)."""
        kept = self._kept[source].copy()  # atomic, like the append on the sampler's thread: no lock needed
        return Readings.of([r for r in kept if since_ns is None or r.time_ns >= since_ns])

    # -- on the sampler's thread

    def _set_pace(self, interval_s: float) -> None:
        self._pace_s = interval_s
        self._wake()

    def _wake(self) -> None:
        """End the current wait, or the next one."""
        with contextlib.suppress(RuntimeError):  # already woken
            self._sleep.release()

    def _run(self, stop: _Stop) -> None:
        try:
            self._read_at_every_tick(stop)
        except Exception as error:  # a bug in the sampler itself
            self._give_up(f"power is no longer measured: {type(error).__name__}: {error}")
        finally:
            self.cpu_s += time.thread_time()

    def _read_at_every_tick(self, stop: _Stop) -> None:
        # CPU caches are cold at every tick: make few calls and bind attributes to locals.
        clock_ns, woken, on_tick, jitter = self._clock_ns, self._sleep.acquire, self._on_tick, self._jitter
        reads = [(source.sample, kept.append) for source, kept in zip(self.sources, self._kept, strict=True)]
        failed = 0
        while not stop.requested:
            pace_s = self._pace_s  # each rate has its own grid, which starts now
            pace_ns, due_ns = round(pace_s * 1e9), clock_ns()  # due: start of the next tick's interval
            while True:
                now_ns = clock_ns()
                # part of the interval already used by the last read
                begun_ns = now_ns - due_ns if now_ns > due_ns else 0
                left_ns = due_ns + begun_ns + int(jitter() * (pace_ns - begun_ns)) - now_ns
                if woken(True, left_ns * 1e-9 if left_ns > 0 else 0):
                    break  # woken to stop, or to read at another rate
                if on_tick is not None:
                    on_tick()
                try:
                    for sample, keep in reads:
                        reading = sample()
                        if stop.requested:  # during the read: the caller of ``stop`` already has the readings
                            return
                        keep(reading)
                except Exception as error:  # a vendor's package may raise anything
                    self.failed += 1
                    if isinstance(error, DeviceLostError) or failed == len(BACK_OFF_S):
                        self._give_up(f"power is no longer measured: {error}")
                        return
                    self._back_off(BACK_OFF_S[failed], stop)
                    failed += 1
                    if stop.requested or self._pace_s != pace_s:
                        break
                    due_ns += pace_ns * max((clock_ns() - due_ns) // pace_ns, 1)
                    continue
                failed = 0
                due_ns += pace_ns
                passed = (clock_ns() - due_ns) // pace_ns  # whole intervals without a tick
                if passed > 0:
                    self.late += passed
                    due_ns += passed * pace_ns

    def _back_off(self, wait_s: float, stop: _Stop) -> None:
        """Wait the full time, even if the rate changes meanwhile; a stop ends the wait."""
        end_ns = self._clock_ns() + round(wait_s * 1e9)
        while not stop.requested and (left_ns := end_ns - self._clock_ns()) > 0:
            self._sleep.acquire(timeout=left_ns / 1e9)

    def _give_up(self, message: str) -> None:
        self.given_up = message
        if self._on_give_up is not None:
            with contextlib.suppress(Exception):  # nobody could handle it
                self._on_give_up(message)


class _Stop:
    """Whether a thread was asked to stop. Reading an attribute at every tick is cheaper than checking an Event."""

    __slots__ = ("requested",)

    def __init__(self) -> None:
        self.requested = False


def check_intervals(interval_s: float | None, idle_interval_s: float | None, prefix: str = "") -> None:
    """Reject intervals that are not numbers, too short, or shorter when idle; None if not given.

    ``prefix``: prepended to parameter names in the message. Raises TypeError or ValueError.
    """
    for name, value in (("interval_s", interval_s), ("idle_interval_s", idle_interval_s)):
        if value is not None and _validation.seconds(f"{prefix}{name}", value) < MIN_INTERVAL_S:
            raise ValueError(f"{prefix}{name} must be at least {MIN_INTERVAL_S:g} s, got {value!r}")
    if interval_s is not None and idle_interval_s is not None and idle_interval_s < interval_s:
        raise ValueError(
            f"{prefix}idle_interval_s must be at least {prefix}interval_s ({interval_s:g}), got {idle_interval_s!r}"
        )
