from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from overlap_callbacks.analysis.power.readings import Reading
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.instruments.power.sampler import Sampler
from overlap_callbacks.instruments.power.source import DeviceLostError, PowerError, PowerSource
from tests.instruments.power.conftest import Driver
from tests.instruments.power.test_nvml import UUIDS
from tests.margins import PATIENCE_S, near


class ScriptedSource(PowerSource):
    """Gives 100 W, or what the test sets for a read.

    Args:
        script: called with the number of the read, before it.
    """

    def __init__(self, script: Callable[[int], None] = lambda number: None) -> None:
        self.info = SourceInfo("scripted", "Scripted", "scripted-0", "instantaneous", 0.0, None, 0.001)
        self.script = script
        self.reads = 0
        self.threads: set[int] = set()
        self.closed = 0

    def sample(self) -> Reading:
        self.reads += 1
        self.threads.add(threading.get_ident())
        self.script(self.reads)
        return Reading(time.perf_counter_ns(), power_w=100.0)

    def close(self) -> None:
        self.closed += 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


class SimulatedTime:
    """The clock and the sleep of a sampler: its time passes while it sleeps, and in ``passes``, but takes none."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._woken = threading.Event()

    def clock_ns(self) -> int:
        return self._now_ns

    def passes(self, ms: float) -> None:
        self._now_ns += round(1e6 * ms)

    def acquire(self, blocking: bool = True, timeout: float = 0.0) -> bool:
        if self._woken.is_set():
            self._woken.clear()
            return True
        self._now_ns += round(1e9 * timeout)
        return False

    def release(self) -> None:
        self._woken.set()


def in_simulated_time(time: SimulatedTime, read: Callable[[], None], **options: Any) -> None:
    """Have a sampler read forty times and more."""
    source = ScriptedSource(lambda number: read())
    sampler = Sampler(source, clock_ns=time.clock_ns, **options)
    sampler._sleep = time  # type: ignore[assignment]
    sampler.start()
    wait_for(lambda: source.reads >= 40)
    sampler.stop(PATIENCE_S)


def test_it_reads_on_one_daemon_thread_between_start_and_stop() -> None:
    source = ScriptedSource()
    sampler = Sampler(source)
    assert not sampler.running
    assert sampler.start()
    assert sampler.start()  # running already: harmless
    wait_for(lambda: source.reads >= 20)
    thread = next(t for t in threading.enumerate() if t.name == "overlap-callbacks-power")
    assert thread.daemon
    assert sampler.stop(PATIENCE_S)
    after = source.reads
    assert not sampler.running
    time.sleep(0.02)
    assert source.reads == after
    assert len(source.threads) == 1
    readings = sampler.readings()
    assert after - len(readings) in (0, 1)  # one that was under way when it was stopped is dropped
    assert (np.diff(readings.time_ns) > 0).all()
    assert sampler.cpu_s > 0
    assert sampler.stop()


def test_it_starts_again_and_keeps_what_it_read() -> None:
    source = ScriptedSource()
    sampler = Sampler(source)
    for _ in range(2):
        before = source.reads
        assert sampler.start()
        wait_for(lambda before=before: source.reads >= before + 5)
        assert sampler.stop(PATIENCE_S)
    assert 0 <= source.reads - len(sampler.readings()) <= 2  # of each stop, one that was under way is dropped


def test_the_ring_keeps_the_latest() -> None:
    source = ScriptedSource()
    sampler = Sampler(source, capacity=10)
    sampler.start()
    wait_for(lambda: source.reads >= 30)
    sampler.stop(PATIENCE_S)
    readings = sampler.readings()
    assert len(readings) == 10
    assert len(sampler.readings(since_ns=int(readings.time_ns[7]))) == 3


def test_ticks_lie_on_a_grid_and_do_not_drift() -> None:
    simulated, reads_ms = SimulatedTime(), []

    def read() -> None:
        reads_ms.append(simulated.clock_ns() / 1e6)
        simulated.passes(4)  # were intervals counted from the end of a read, they would be 14 ms long

    in_simulated_time(simulated, read, interval_s=0.01, jitter=lambda: 0.0)
    assert reads_ms[:40] == pytest.approx([10 * number for number in range(40)])


def test_ticks_come_at_random_times_one_in_each_interval() -> None:
    def reads_ms(jitter: Callable[[], float] | None) -> list[float]:
        simulated, times_ms = SimulatedTime(), []
        in_simulated_time(
            simulated, lambda: times_ms.append(simulated.clock_ns() / 1e6), interval_s=0.02, jitter=jitter
        )
        return times_ms[:40]

    assert reads_ms(lambda: 0.5) == pytest.approx([20 * number + 10 for number in range(40)])
    state = random.getstate()
    # Power that swings every 20 ms would be read at one place of its swing without this.
    times_ms = reads_ms(None)
    assert [time_ms // 20 for time_ms in times_ms] == list(range(40))
    assert np.std(np.mod(times_ms, 20)) > 2  # 5.8 of an even spread
    assert random.getstate() == state  # training's random numbers are its own


def test_failed_reads_are_counted(soon) -> None:
    def script(number: int) -> None:
        if number in (3, 4):
            raise PowerError("busy")

    source = ScriptedSource(script)
    sampler = Sampler(source)
    sampler.start()
    wait_for(lambda: source.reads >= 8)
    sampler.stop(PATIENCE_S)
    assert sampler.failed == 2


def test_a_slow_read_costs_ticks_that_are_counted_and_do_not_pile_up() -> None:
    starts: list[float] = []

    def script(number: int) -> None:
        starts.append(time.perf_counter())
        if number == 3:
            time.sleep(0.2)

    sampler = Sampler(ScriptedSource(script), interval_s=0.02)
    sampler.start()
    wait_for(lambda: len(starts) >= 10)
    sampler.stop(PATIENCE_S)
    assert sampler.late >= 9  # ten intervals and the tick after them
    # What was left out is not made up for: after the slow read, too, at most one read a tick.
    span_s = starts[9] - starts[3]
    assert span_s >= 5 * 0.02


def test_a_slow_driver_makes_late_readings_and_holds_their_values(nvml: Driver) -> None:
    from overlap_callbacks.instruments.power.nvml import NvmlSource

    nvml.set(manual=0, delay_us=30_000)
    sampler = Sampler(NvmlSource(UUIDS[0], utilisation=False), interval_s=0.01)
    sampler.start()
    wait_for(lambda: len(sampler.readings()) >= 5)
    assert sampler.close(PATIENCE_S)
    assert sampler.late >= len(sampler.readings())  # three driver calls a read, three ticks each
    assert set(sampler.readings().power_w) == {100.0}
    assert nvml.open == 0


def test_at_rest_it_reads_at_the_idle_rate_and_at_the_full_one_again() -> None:
    source = ScriptedSource()
    sampler = Sampler(source, interval_s=0.001, idle_interval_s=30)
    sampler.start()
    wait_for(lambda: source.reads >= 10)
    began_s = time.monotonic()
    sampler.rest()
    resting = source.reads
    time.sleep(0.2)
    # One that was under way, and one in each interval of the new grid that has begun. The time is taken last.
    assert source.reads - resting <= 2 + (time.monotonic() - began_s) / 30
    resting = source.reads
    assert sampler.running
    sampler.start()
    wait_for(lambda: source.reads >= resting + 10)
    sampler.stop(PATIENCE_S)


def test_at_rest_without_an_idle_rate_it_stops() -> None:
    source = ScriptedSource()
    sampler = Sampler(source)
    sampler.start()
    wait_for(lambda: source.reads >= 3)
    sampler.rest(PATIENCE_S)
    assert not sampler.running


# -- faults


@pytest.fixture
def soon(monkeypatch) -> None:
    monkeypatch.setattr("overlap_callbacks.instruments.power.sampler.BACK_OFF_S", (0.01, 0.02, 0.03))


def test_a_passing_fault_is_retried(soon) -> None:
    def script(number: int) -> None:
        if number in (3, 4, 5, 8, 9, 10):  # thrice in a row, twice
            raise PowerError("busy")

    said: list[str] = []
    source = ScriptedSource(script)
    sampler = Sampler(source, on_give_up=said.append)
    sampler.start()
    wait_for(lambda: source.reads >= 15)
    sampler.stop(PATIENCE_S)
    assert (said, sampler.given_up) == ([], "")
    assert source.reads - 6 - len(sampler.readings()) in (0, 1)  # one may have been under way when it was stopped


@pytest.mark.parametrize("error", [PowerError("busy"), ValueError("out of a vendor's package")])
def test_a_source_that_goes_on_failing_is_given_up_with_one_message(soon, error) -> None:
    def script(number: int) -> None:
        if number > 2:
            raise error

    said: list[str] = []
    source = ScriptedSource(script)
    sampler = Sampler(source, on_give_up=said.append)
    sampler.start()
    wait_for(lambda: not sampler.running)
    assert said == [f"power is no longer measured: {error}"]
    assert sampler.given_up == said[0]
    assert source.reads == 2 + 4  # once, and thrice again
    assert len(sampler.readings()) == 2  # what was read is still there
    assert not sampler.start()
    assert source.reads == 6
    assert sampler.close(PATIENCE_S)
    assert source.closed == 1


def test_a_listener_that_raises_does_no_harm(soon) -> None:
    def script(number: int) -> None:
        raise PowerError("busy")

    told: list[str] = []

    def tell(message: str) -> None:
        told.append(message)
        raise RuntimeError("the logger is gone")

    sampler = Sampler(ScriptedSource(script), on_give_up=tell)
    sampler.start()
    wait_for(lambda: not sampler.running)
    assert told == ["power is no longer measured: busy"]


def test_six_reads_that_fail_in_a_row_are_retried_at_the_next_ticks() -> None:
    clock = SimulatedTime()

    def script(number: int) -> None:
        times_s.append(clock.clock_ns() / 1e9)
        if number > 20:
            sampler._stop.requested = True
        if number % 10 < 6:
            raise PowerError("busy")

    times_s: list[float] = []
    sampler = Sampler(ScriptedSource(script), clock_ns=clock.clock_ns, interval_s=0.02, jitter=lambda: 0.5)
    sampler._sleep = clock  # type: ignore[assignment]
    sampler._read_at_every_tick(sampler._stop)
    assert np.diff(times_s).max() <= 0.02 + 1e-6


def test_retries_wait_longer_and_longer(monkeypatch) -> None:
    monkeypatch.setattr("overlap_callbacks.instruments.power.sampler.BACK_OFF_S", (0.05, 0.1, 0.2))
    times: list[float] = []

    def script(number: int) -> None:
        times.append(time.monotonic())
        raise PowerError("busy")

    sampler = Sampler(ScriptedSource(script))
    sampler.start()
    wait_for(lambda: not sampler.running)
    assert (np.diff(times) >= (0.05, 0.1, 0.2)).all()


def test_windows_that_come_and_go_do_not_hurry_a_retry(monkeypatch) -> None:
    monkeypatch.setattr("overlap_callbacks.instruments.power.sampler.BACK_OFF_S", (0.2, 0.2, 0.2))
    times: list[float] = []

    def script(number: int) -> None:
        times.append(time.monotonic())
        raise PowerError("busy")

    sampler = Sampler(ScriptedSource(script), idle_interval_s=1.0)
    sampler.start()
    while sampler.running:
        sampler.rest(PATIENCE_S)
        sampler.start()
        time.sleep(0.005)
    assert len(times) == 4
    assert (np.diff(times) >= 0.2).all()


def test_stop_does_not_wait_for_a_retry(monkeypatch) -> None:
    monkeypatch.setattr("overlap_callbacks.instruments.power.sampler.BACK_OFF_S", (0.01, 0.01, 60.0))

    def script(number: int) -> None:
        raise PowerError("busy")

    source = ScriptedSource(script)
    sampler = Sampler(source)
    sampler.start()
    wait_for(lambda: source.reads >= 3)  # a minute to the next
    start = time.monotonic()
    assert sampler.stop(PATIENCE_S)
    assert near(time.monotonic() - start, 60.0)


def test_a_lost_gpu_is_given_up_at_once(nvml: Driver) -> None:
    from overlap_callbacks.instruments.power.nvml import NvmlSource

    said: list[str] = []
    failures: list[PowerError] = []

    class CountingSource(NvmlSource):
        def sample(self) -> Reading:
            try:
                return super().sample()
            except PowerError as error:
                failures.append(error)
                raise

    nvml.set(manual=0)
    sampler = Sampler(CountingSource(UUIDS[0]), interval_s=0.001, on_give_up=said.append)
    sampler.start()
    wait_for(lambda: len(sampler.readings()) >= 5)
    nvml.set(lost=1)
    wait_for(lambda: not sampler.running)
    assert said == ["power is no longer measured: the GPU is lost: it fell off the bus, or its driver gave it up"]
    assert len(failures) == 1
    assert sampler.close(PATIENCE_S)
    assert nvml.open == 0


def test_a_hanging_read_blocks_no_other_thread() -> None:
    release = threading.Event()

    def script(number: int) -> None:
        if number == 2:
            assert release.wait(PATIENCE_S)

    source = ScriptedSource(script)
    sampler = Sampler(source)
    sampler.start()
    wait_for(lambda: source.reads == 2)
    assert not sampler.stop(0.05)
    assert not sampler.start()  # two threads must not share a source
    assert not sampler.close(0.05)
    assert source.closed == 0  # it is in use
    assert len(sampler.readings()) == 1
    release.set()
    wait_for(lambda: not sampler.running)
    assert len(sampler.readings()) == 1  # what came after the stop is not kept
    assert sampler.start()
    wait_for(lambda: source.reads >= 5)
    assert sampler.close(PATIENCE_S)
    assert source.closed == 1


def test_a_lost_device_error_ends_at_once_whatever_raised_it() -> None:
    def script(number: int) -> None:
        raise DeviceLostError("gone")

    source = ScriptedSource(script)
    sampler = Sampler(source)
    sampler.start()
    wait_for(lambda: not sampler.running)
    assert source.reads == 1


def test_snapshots_may_be_taken_while_it_reads() -> None:
    source = ScriptedSource()
    sampler = Sampler(source, capacity=50)
    sampler.start()
    wait_for(lambda: source.reads >= 50)
    for _ in range(300):
        readings = sampler.readings()
        assert len(readings) == 50
        assert (np.diff(readings.time_ns) > 0).all()
    sampler.stop(PATIENCE_S)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"interval_s": 0.0005}, ValueError, r"interval_s must be at least 0\.001 s, got 0\.0005"),
        ({"interval_s": 0}, ValueError, "interval_s must be a positive, finite number of seconds, got 0"),
        ({"interval_s": "1"}, TypeError, "interval_s must be a positive number of seconds, got '1'"),
        ({"interval_s": 1, "idle_interval_s": 0.5}, ValueError, r"idle_interval_s must be at least interval_s \(1\)"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, error, words) -> None:
    with pytest.raises(error, match=words):
        Sampler(ScriptedSource(), **options)


def test_the_sources_own_interval_is_the_default() -> None:
    assert Sampler(ScriptedSource()).interval_s == 0.001
    assert Sampler(ScriptedSource(), interval_s=0.25).interval_s == 0.25
