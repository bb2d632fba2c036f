"""Several sinks as one: the record comes first, and no sink delays it or fails another."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink, Sink
from overlap_callbacks.sinks.fan_out import FanOut
from tests.margins import PATIENCE_S, near
from tests.report.runs import run_info, window

BLOCK = TimedBlock(Mode.OVERLAPPED, 0, (1.0, 2.0))


class Noting(Sink):
    """Notes what it is told, and on which thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[threading.Thread] = set()

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    def use_record(self, path: Path) -> None:
        self.note(f"record {path.name}")

    def open(self, run: RunInfo) -> None:
        self.note("open")

    def log(self, report: OverlapReport) -> None:
        self.note(f"log {report.window}")

    def close(self) -> None:
        self.note("close")


class Stalling(Noting):
    """Hangs at its first report until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.release = threading.Event(), threading.Event()

    def log(self, report: OverlapReport) -> None:
        self.hangs.set()
        self.release.wait(PATIENCE_S)
        super().log(report)


class Failing(Noting):
    def log(self, report: OverlapReport) -> None:
        raise OSError("disk full")


def no_errors(sink: Sink, error: Exception) -> None:
    raise AssertionError(f"{type(sink).__name__} failed") from error


def used(sinks: FanOut, count: int = 2) -> None:
    sinks.open(run_info())
    sinks.block(0, 20, BLOCK)
    for number in range(count):
        sinks.log(window(number))
    sinks.close(5.0)


def test_a_sink_gets_the_record_then_the_run_then_each_window(tmp_path: Path) -> None:
    sink = Noting()
    used(FanOut([sink, JsonlSink(tmp_path)], no_errors))
    assert sink.calls == ["record overlap.jsonl", "open", "log 0", "log 1", "close"]
    assert len(read(tmp_path).windows) == 2


def test_without_a_record_sinks_get_none() -> None:
    sink = Noting()
    used(FanOut([sink], no_errors))
    assert sink.calls == ["open", "log 0", "log 1", "close"]


def test_each_sink_has_a_thread_of_its_own_and_the_record_none() -> None:
    first, second = Noting(), Noting()

    class Record(Noting):
        def kept_record(self) -> Path:
            return Path("overlap.jsonl")

    record = Record()
    used(FanOut([first, record, second], no_errors))
    assert record.threads == {threading.current_thread()}
    assert len(first.threads) == len(second.threads) == 1
    assert len(first.threads | second.threads | record.threads) == 3


def test_the_record_is_written_before_another_sink_may_stall(tmp_path: Path) -> None:
    order: list[str] = []

    class First(Noting):
        def log(self, report: OverlapReport) -> None:
            order.append(f"{len(read(tmp_path).windows)} in the record")

    used(FanOut([First(), JsonlSink(tmp_path)], no_errors))
    assert order == ["1 in the record", "2 in the record"]


def test_a_timed_block_goes_to_sinks_that_take_blocks() -> None:
    class Taking(Noting):
        def block(self, window: int, first_step: int, block: TimedBlock) -> None:
            self.note(f"block {block.block}")

    taking = Taking()
    used(FanOut([taking, Noting()], no_errors), count=1)
    assert taking.calls == ["open", "block 0", "log 0", "close"]


def test_a_sink_that_stalls_delays_the_record_once_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Stalling()
    sinks = FanOut([sink, JsonlSink(tmp_path)], no_errors)
    sinks.open(run_info())
    start = time.monotonic()
    for number in range(10):
        sinks.log(window(number))
    # 2 s for the first window, nothing for the others: for each of them it would be 20 s.
    assert near(time.monotonic() - start, 20.0)
    assert len(read(tmp_path).windows) == 10
    with caplog.at_level(logging.WARNING):
        sinks.close(0.1)
    assert "Stalling hangs, and may lack the last windows; the record has them" in caplog.text
    sink.release.set()


def test_a_sink_that_says_how_long_it_may_take_has_that_time_and_says_what_is_missing() -> None:
    class Bounded(Stalling):
        close_timeout_s = 0.1

        def close_timeout_error(self) -> Exception:
            return TimeoutError("two windows were not sent")

    sink = Bounded()
    errors: list[tuple[Sink, Exception]] = []
    sinks = FanOut([sink], lambda *failure: errors.append(failure))
    start = time.monotonic()
    used(sinks)
    assert near(time.monotonic() - start, 20.0)
    ((failed, error),) = errors
    assert failed is sink
    assert str(error) == "two windows were not sent"
    sink.release.set()


def test_windows_that_find_no_place_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from overlap_callbacks import _threads
    from overlap_callbacks.sinks import fan_out

    def small(name: str, *, patience_s: float) -> Any:
        return _threads.DetachedWorker(name, patience_s=0.1, capacity=2)

    monkeypatch.setattr(fan_out, "DetachedWorker", small)
    sink = Stalling()
    sinks = FanOut([sink], no_errors)
    sinks.open(run_info())
    sinks.log(window(0))
    assert sink.hangs.wait(PATIENCE_S)
    for number in range(1, 6):  # one is under way, two wait
        sinks.log(window(number))
    sink.release.set()
    with caplog.at_level(logging.WARNING):
        sinks.close(PATIENCE_S)
    assert "Stalling dropped 3 windows: it stalled for too long" in caplog.text
    assert sink.calls == ["open", "log 0", "log 1", "log 2", "close"]


def test_a_sink_that_fails_is_not_used_again_and_the_others_are() -> None:
    failing, other = Failing(), Noting()
    errors: list[tuple[Sink, Exception]] = []
    used(FanOut([failing, other], lambda *failure: errors.append(failure)))
    assert [(sink, str(error)) for sink, error in errors] == [(failing, "disk full")]
    assert failing.calls == ["open"]
    assert other.calls == ["open", "log 0", "log 1", "close"]


def test_without_sinks_it_is_false() -> None:
    assert not FanOut([], no_errors)
    sinks = FanOut([Noting()], no_errors)
    assert sinks
    sinks.close(1.0)
    assert not sinks


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("keeps_record", [True, False])
def test_a_sink_that_asks_to_leave_is_named_and_the_rest_goes_on(
    tmp_path: Path, keeps_record: bool, error: BaseException
) -> None:
    class Leaving(Noting):
        def kept_record(self) -> Path | None:
            return tmp_path / "other" if keeps_record else None

        def log(self, report: OverlapReport) -> None:
            raise error

    failed: list[tuple[Sink, Exception]] = []
    leaving, noting = Leaving(), Noting()
    sinks = FanOut([leaving, noting], lambda sink, why: failed.append((sink, why)))
    sinks.open(run_info())
    for number in range(2):
        sinks.log(window(number))
    sinks.close(20.0)
    assert [sink for sink, _ in failed] == [leaving]
    assert type(error).__name__ in str(failed[0][1])
    assert [call for call in noting.calls if call.startswith("log")] == ["log 0", "log 1"]
