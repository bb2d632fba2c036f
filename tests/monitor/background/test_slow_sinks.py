"""Whatever another sink does, the record goes on; and a window that was cut compares nothing that it does not bear."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from overlap_callbacks import JsonlSink, OverlapMonitor
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.report import record
from overlap_callbacks.sinks import FunctionSink
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, run_steps, tiny_schedule, wait_until

NUM_WINDOWS = 4


def train_beside_a_sink_that_hangs(rank: int, folder: str) -> dict[str, Any]:
    release = threading.Event()
    sinks = [FunctionSink(lambda metrics, step: release.wait()), JsonlSink(folder)]
    schedule = tiny_schedule(every_n_steps=10)
    with captured_log() as lines:
        monitor = OverlapMonitor(schedule, sinks, max_overhead=None, report_timeout_s=2.0)
        training = Training(rank)
        for step in range(2 + 10 * NUM_WINDOWS):
            with monitor.step(step):
                training.step()
            time.sleep(0.02)
        if rank == 0:
            file = Path(folder, FILE_NAME)
            wait_until(lambda: file.exists() and file.read_text().count('"record":"window"') >= NUM_WINDOWS - 1)
        monitor.close()
        active = monitor.active
    release.set()
    return {"lines": lines, "active": active}


def test_a_sink_that_hangs_costs_no_window_of_the_record_and_is_named(tmp_path: Path) -> None:
    found = run_ranks(train_beside_a_sink_that_hangs, 2, str(tmp_path), timeout_s=60)
    windows = record.read(tmp_path).windows
    assert [window.window for window in windows] == list(range(NUM_WINDOWS))
    (line,) = found[0]["lines"]
    assert "FunctionSink hangs" in line
    assert found[1]["lines"] == []


def close_amid_a_window(rank: int, steps: int) -> list[tuple[bool, dict[str, float]]]:
    sink = KeptReports()
    schedule = tiny_schedule(every_n_steps=17, repeats=4)
    monitor = new_monitor(sink, schedule=schedule)
    run_steps(Training(rank), monitor, steps)
    monitor.close()
    return [(report.complete, report.metrics()) for report in sink.reports]


def test_a_window_that_was_cut_within_its_first_group_compares_nothing() -> None:
    # Two steps before the window, its recorded one, and one of each mode.
    ((complete, metrics),) = run_ranks(close_amid_a_window, 2, 2 + 1 + 2)[0]
    assert not complete
    assert metrics["overlap/e2e_overlapped_ms"] > 0
    assert "overlap/speedup_vs_sequential" not in metrics


def test_a_window_that_was_cut_after_a_group_says_what_it_bears() -> None:
    ((complete, metrics),) = run_ranks(close_amid_a_window, 2, 2 + 1 + 6)[0]
    assert not complete
    assert "overlap/speedup_vs_sequential" in metrics
