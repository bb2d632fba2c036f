"""From the first window to the end: what is taken up, and that all of it is let go again."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import JsonlSink, Mode, OverlapMonitor
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.monitor.background.reporter import Reporter
from overlap_callbacks.monitor.window import MeasuredWindow, Window
from overlap_callbacks.report.record import read
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import (
    TINY_WINDOW_STEPS,
    KeptReports,
    Training,
    digest_without_library,
    dispatch_table,
    is_pass_through,
    kept_logs,
    kernels_are_registered,
    new_monitor,
    own_threads,
    run_steps,
    tiny_schedule,
    wait_until,
)

# -- letting go


def train_and_let_go(rank: int) -> dict[str, Any]:
    untouched = dispatch_table()
    group = dist.new_group()
    tensor = torch.ones(4)
    gate = Gate()
    monitor = new_monitor(KeptReports(), gate, schedule=tiny_schedule(every_n_steps=20, profiled_steps=2))
    with captured_log() as lines:
        for _ in range(15):
            with monitor.step():
                dist.all_reduce(tensor, group=group)
        in_the_way = dispatch_table() != untouched
        registered = kernels_are_registered()
        monitor.close()
    alive = {
        "tensor": weakref.ref(tensor),
        "group": weakref.ref(group),
        "monitor": weakref.ref(monitor),
        "gate": weakref.ref(gate),
    }
    dist.destroy_process_group(group)
    del tensor, group, monitor, gate
    gc.collect()
    return {
        "lines": lines,
        "registered": registered,
        "in_the_way": in_the_way,
        "alive": [name for name, reference in alive.items() if reference() is not None],
        "table_restored": dispatch_table() == untouched,
        "threads": own_threads(),
    }


def test_after_close_nothing_is_kept_alive_and_the_dispatcher_is_as_before():
    for found in run_ranks(train_and_let_go, 2):
        assert found["lines"] == []
        assert found["registered"]
        assert not found["in_the_way"]  # between windows
        assert found["alive"] == []
        assert found["table_restored"]
        assert found["threads"] == []


def use_a_tensor_and_a_group_in_a_window(rank: int) -> list[str]:
    """What is alive in mid-window, after the step that used it."""
    group, tensor = dist.new_group(), torch.ones(4)
    monitor = new_monitor()
    for step in range(5):
        with monitor.step():
            dist.all_reduce(tensor if step < 4 else torch.ones(4), group=group if step < 4 else None)
    assert monitor.in_window
    alive = {"tensor": weakref.ref(tensor), "group": weakref.ref(group)}
    dist.destroy_process_group(group)
    del tensor, group
    gc.collect()
    found = [name for name, reference in alive.items() if reference() is not None]
    monitor.close()
    return found


def test_an_open_window_keeps_no_tensor_and_no_process_group_alive():
    assert run_ranks(use_a_tensor_and_a_group_in_a_window, 2) == [[], []]


def outlive_a_window(rank: int) -> tuple[bool, int]:
    """Whether the monitor still measures once all of a window is gone, and the number of objects that were there."""
    windows, init, submit_window = [], Window.__init__, Reporter.submit_window

    def note_open(window: Window, *args: Any, **options: Any) -> None:
        windows.append(weakref.ref(window))
        init(window, *args, **options)

    def note_closed(reporter: Reporter, window: MeasuredWindow, *args: Any) -> None:
        windows.append(weakref.ref(window))
        submit_window(reporter, window, *args)

    Window.__init__, Reporter.submit_window = note_open, note_closed
    try:
        monitor, training = new_monitor(KeptReports(), schedule=tiny_schedule()), Training(rank)
        run_steps(training, monitor, 2 + TINY_WINDOW_STEPS)
        wait_until(lambda: gc.collect() >= 0 and all(window() is None for window in windows))
        active = monitor.active
        monitor.close()
    finally:
        Window.__init__, Reporter.submit_window = init, submit_window
    return active, len(windows)


def test_a_window_is_released_once_it_is_reported():
    assert run_ranks(outlive_a_window, 2) == [(True, 2), (True, 2)]


def close_twice(rank: int) -> dict[str, Any]:
    monitor = new_monitor(sink := KeptReports())
    training = Training(rank)
    with captured_log() as lines:
        run_steps(training, monitor, 8)
        monitor.close()
        monitor.close()
        run_steps(training, monitor, 8)
        monitor.close()
    return {
        "lines": lines,
        "active": monitor.active,
        "reports": len(sink.reports),
        "same": training.digest() == digest_without_library(rank, 16),
    }


def test_closing_twice_and_stepping_on_after_that_does_no_harm():
    found = run_ranks(close_twice, 2)
    for rank in found:
        assert rank["lines"] == []
        assert not rank["active"]
        assert rank["same"]
    # Steps 2 to 6, and the one step of the second window that close() cut short.
    assert [rank["reports"] for rank in found] == [2, 0]


def drop_without_close(rank: int, folder: str) -> dict[str, Any]:
    untouched = dispatch_table()
    monitor = OverlapMonitor(tiny_schedule(), run_dir=folder, max_overhead=None)
    training = Training(rank)
    with captured_log() as lines:
        run_steps(training, monitor, 20)
        reference = weakref.ref(monitor)
        del monitor
        gc.collect()
    return {
        "lines": lines,
        "collected": reference() is None,
        "table_restored": dispatch_table() == untouched,
        "threads": own_threads(),
        "same": training.digest() == digest_without_library(rank, 20),
    }


def test_a_monitor_that_is_dropped_without_close_lets_go_and_leaves_its_record(tmp_path):
    for found in run_ranks(drop_without_close, 2, str(tmp_path)):
        assert found["lines"] == []
        assert found["collected"]
        assert found["table_restored"]
        assert found["threads"] == []
        assert found["same"]
    assert len(read(tmp_path).windows) == 3


# -- a thousand windows


def measure_many_windows(rank: int, folder: str, counts: tuple[int, ...]) -> dict[str, Any]:
    class Counting(KeptReports):
        def __init__(self) -> None:
            self.windows = 0

        def log(self, report: Any) -> None:
            self.windows += 1

    sink = Counting()
    monitor = OverlapMonitor(tiny_schedule(first_step=0), [sink, JsonlSink(folder)], max_overhead=None)
    store = dist.distributed_c10d._get_default_store()
    seen = []
    with captured_log() as lines:
        for windows in counts:
            while monitor.last_step + 1 < windows * TINY_WINDOW_STEPS:
                with monitor.step():
                    dist.all_reduce(torch.ones(8))
            # Rank 0 is done with the reports first, then the other rank looks too.
            if rank == 0:
                wait_until(lambda windows=windows: sink.windows == windows)
            dist.barrier()
            gc.collect()
            kinds = Counter([type(one).__qualname__ for one in gc.get_objects()])
            seen.append((kinds, resident_bytes(), store.num_keys(), len(threading.enumerate())))
            dist.barrier()
        monitor.close()
    return {"lines": lines, "seen": seen}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "most_objects"),
    [((50, 150, 250), 100), pytest.param((200, 700, 1200), 500, marks=pytest.mark.nightly)],
)
def test_a_thousand_windows_leave_no_object_no_memory_and_no_key_in_the_store_behind(tmp_path, counts, most_objects):
    found = run_ranks(measure_many_windows, 2, str(tmp_path), counts, timeout_s=120)
    for rank in found:
        assert rank["lines"] == []
        (objects, memory, keys, threads), (by_half, *_), last = rank["seen"]
        # What is made once, such as a module that is imported late, is in one half; what each window leaves, in both.
        grown = by_half - objects, last[0] - by_half
        assert min([half.total() for half in grown]) < most_objects / 2, [half.most_common(9) for half in grown]
        assert last[1] - memory < 4 * 2**20
        assert last[2] - keys < 10
        assert last[3] == threads
    assert len(read(tmp_path).windows) == counts[-1]


# -- exceptions of the user's


class UserError(Exception):
    pass


def raise_in_steps(rank: int) -> dict[str, Any]:
    """One exception in a recorded step, one in a sequential step, one outside any window."""
    monitor = new_monitor(sink := KeptReports(), schedule=tiny_schedule(every_n_steps=10))
    training, modes, unchanged, pass_through = Training(rank), [], [], []
    with captured_log() as lines:
        for step in range(42):
            error = UserError(step)
            try:
                with monitor.step():
                    modes.append(monitor.mode)
                    training.step()
                    if step in (2, 14, 19):
                        raise error
            except UserError as caught:
                unchanged.append(caught is error and caught.__cause__ is None and caught.__context__ is None)
                pass_through.append(is_pass_through() and monitor.mode is Mode.OVERLAPPED and not monitor.in_window)
        monitor.close()
    return {
        "lines": lines,
        "modes": [step for step, mode in enumerate(modes) if mode is Mode.SEQUENTIAL],
        "unchanged": unchanged,
        "pass_through": pass_through,
        "same": training.digest() == digest_without_library(rank, 42),
        "reports": sink.facts(),
    }


def test_an_exception_in_a_step_passes_unchanged_ends_the_window_and_the_next_one_is_measured():
    found = run_ranks(raise_in_steps, 2)
    for rank in found:
        assert rank["lines"] == []
        assert rank["unchanged"] == [True] * 3
        assert rank["pass_through"] == [True] * 3
        # Windows at 2, 12, 22, 32, each with two sequential steps. The first two were cut short.
        assert [step for step in rank["modes"] if step < 12] == []
        assert len([step for step in rank["modes"] if step < 22]) < 2
        assert len([step for step in rank["modes"] if step >= 22]) == 4
        assert rank["same"]
    reports = found[0]["reports"]
    assert [report["complete"] for report in reports] == [False, False, True, True]
    assert all("exception" in report["problems"][0] for report in reports[:2])


# -- pause


def evaluate_in_mid_step(rank: int) -> dict[str, Any]:
    evaluation = dist.new_group(group_desc="evaluation")
    monitor = new_monitor(sink := KeptReports())
    training, modes = Training(rank), []
    with captured_log() as lines, kept_logs() as logs:
        for step in range(7):
            with monitor.step():
                modes.append(monitor.mode)
                if step in (2, 4):  # the recorded step, and the first of two sequential ones
                    with monitor.pause():
                        dist.all_reduce(torch.ones(1), group=evaluation)
                        inner = monitor.mode
                training.step()
        monitor.close()
    sequential = [log for log in logs if any(c.start is not None for c in log.collectives)]
    return {
        "lines": lines,
        "inner": inner,
        "same": training.digest() == digest_without_library(rank, 7),
        "evaluations_seen": sum(c.group.name == evaluation.group_name for log in logs for c in log.collectives),
        "serialised": [[c.start is not None for c in log.collectives] for log in sequential],
        "reports": sink.facts(),
    }


def test_collectives_within_a_pause_are_neither_seen_nor_serialised_and_their_step_does_not_count():
    found = run_ranks(evaluate_in_mid_step, 2)
    for rank in found:
        assert rank["lines"] == []
        assert rank["same"]
        assert rank["evaluations_seen"] == 0
        assert len(rank["serialised"]) == 2
        assert all(all(step) for step in rank["serialised"])
    (report,) = found[0]["reports"]
    assert report["complete"]
    assert report["blocks"] == {0: [0, 2, 3], 1: [0, 2, 3]}


# -- options


def train_with_two_monitors(rank: int) -> dict[str, Any]:
    first, second = new_monitor(sink := KeptReports()), new_monitor(KeptReports())
    strict = new_monitor(KeptReports(), strict=True)
    training, strict_error = Training(rank), ""
    with captured_log() as lines:
        for _ in range(22):
            with first.step(), second.step():
                training.step()
            if not strict_error:
                try:
                    with strict.step():
                        pass
                except RuntimeError as error:
                    strict_error = str(error)
        still_active = (first.active, second.active)
        first.close()
        second.close()
        strict.close()
    return {
        "lines": lines,
        "strict_error": strict_error,
        "active": still_active,
        "same": training.digest() == digest_without_library(rank, 22),
        "reports": sink.facts(),
    }


def test_a_second_monitor_at_the_same_time_is_refused_and_the_first_one_goes_on():
    found = run_ranks(train_with_two_monitors, 2)
    for rank in found:
        (line,) = rank["lines"]
        assert "another OverlapMonitor of this process is measuring, and only one can: close() it first" in line
        assert "close() it first" in rank["strict_error"]
        assert rank["active"] == (True, False)
        assert rank["same"]
    assert [report["complete"] for report in found[0]["reports"]] == [True] * 4


def train_with_a_monitor_after_another(rank: int) -> list[Any]:
    found = []
    for _ in range(2):
        monitor = new_monitor(sink := KeptReports())
        run_steps(Training(rank), monitor, 12)
        monitor.close()
        found.append([(report["complete"], report["ranks"]) for report in sink.facts()])
    return found


def test_a_monitor_after_another_measures_again():
    assert run_ranks(train_with_a_monitor_after_another, 2)[0] == [[(True, [0, 1])] * 2] * 2


def train_switched_off(rank: int, folder: str, word: str) -> dict[str, Any]:
    os.environ["OVERLAP_CALLBACKS"] = word
    untouched = dispatch_table()
    training = Training(rank)
    monitor = attach(training.optimizer, run_dir=folder, every_n_steps=5, first_step=0, **TINY)
    monitor.force(Mode.SEQUENTIAL)
    with captured_log() as lines, kept_logs() as logs:
        for _ in range(20):
            training.step()
        threads, touched = own_threads(), kernels_are_registered() or dispatch_table() != untouched
        monitor.close()
    return {
        "did": (lines, logs, threads, touched, monitor.active),
        "same": training.digest() == digest_without_library(rank, 20),
    }


TINY = {"repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 0}


@pytest.mark.parametrize("word", ["off", " OFF ", "0", "false"])
def test_switched_off_by_the_environment_it_does_nothing_at_all(tmp_path, word):
    for found in run_ranks(train_switched_off, 2, str(tmp_path / "run"), word):
        assert found["did"] == ([], [], [], False, False)
        assert found["same"]
    assert list(tmp_path.iterdir()) == []


# -- a pause


def abort_within_a_pause(rank: int) -> tuple[bool, bool]:
    """Whether the gate is at work within the window, and after a step was given up in a pause."""
    monitor = new_monitor(schedule=tiny_schedule())
    training = Training(rank)
    run_steps(training, monitor, 2)
    monitor.step_begin(2)
    within = not is_pass_through()
    with monitor.pause():
        monitor.abort_step()
    after = not is_pass_through()
    monitor.close()
    return within, after


def test_a_pause_that_ends_after_its_step_was_given_up_resumes_nothing():
    assert run_ranks(abort_within_a_pause, 2) == [(True, False)] * 2


# -- another profiler


def train_under_the_users_profiler(rank: int) -> dict[str, Any]:
    monitor = new_monitor(sink := KeptReports(), schedule=tiny_schedule(every_n_steps=20, profiled_steps=2))
    training = Training(rank)
    with captured_log() as lines:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            run_steps(training, monitor, 22)
        run_steps(training, monitor, 20)
        monitor.close()
    return {
        "lines": lines,
        "theirs": sum("optimizer" in event.key.lower() for event in theirs.key_averages()),
        "same": training.digest() == digest_without_library(rank, 42),
        "reports": sink.facts(),
    }


def test_with_the_users_own_profiler_only_the_timed_part_is_measured_and_the_report_says_so():
    found = run_ranks(train_under_the_users_profiler, 2)
    for rank in found:
        (line,) = rank["lines"]
        assert "another profiler was running" in line
        assert rank["theirs"] > 0
        assert rank["same"]
    beside, alone = found[0]["reports"]
    assert {"e2e_overlapped_ms", "e2e_sequential_ms"} <= set(beside["figures"])
    assert "compute_ms" not in beside["figures"]
    assert any("another profiler was running" in problem for problem in beside["problems"])
    assert "compute_ms" in alone["figures"]
    # A step this small is mostly Python, and a note says so.
    assert [problem for problem in alone["problems"] if "in no torch operator" not in problem] == []


def pause_outside_of_windows(rank: int) -> tuple[set[int], bool]:
    monitor = new_monitor(KeptReports(), schedule=tiny_schedule(every_n_steps=100, spread=False))
    training = Training(rank)
    for step in range(40):
        with monitor.step():
            training.step()
            if step == 20:
                with monitor.pause():
                    pass
        if step == 30:
            with monitor.pause():  # between two steps: it is the time of the one before
                pass
    numbers, _ = monitor._driver.ring.durations()
    monitor.close()
    return set(range(39)) - set(numbers.tolist()), training.digest() == digest_without_library(rank, 40)


def test_rhythms_are_found_without_steps_that_have_a_pause_or_are_in_a_window():
    for missing, same in run_ranks(pause_outside_of_windows, 2):
        assert {step for step in missing if step > 10} == {20, 30}
        assert 2 in missing  # recorded
        assert same
