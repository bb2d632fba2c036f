"""When things end badly: killed ranks leave a readable record, an error of the library's own leaves training alone."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import JsonlSink, Mode, OverlapMonitor
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker, Ruling
from overlap_callbacks.report.record import read
from tests.distributed import captured_log, die, run_mortal_ranks, run_ranks
from tests.monitor.jobs import (
    KeptReports,
    Training,
    digest_without_library,
    dispatch_table,
    is_pass_through,
    new_monitor,
    own_threads,
    run_steps,
    tiny_schedule,
    wait_until,
)
from tests.toggling import asked_for, at_night

# -- ranks that are killed


def lines_in(folder: str) -> int:
    file = Path(folder, FILE_NAME)
    return file.read_bytes().count(b"\n") if file.exists() else 0


def train_until_killed(rank: int, folder: str, mortals: list[int], report_timeout_s: float) -> dict[str, Any]:
    """Windows of 9 steps at 2 and 11: a recorded one and eight blocks. The ``mortals`` die in step 16."""
    schedule = tiny_schedule(every_n_steps=9, repeats=2)
    monitor = OverlapMonitor(schedule, run_dir=folder, max_overhead=None, report_timeout_s=report_timeout_s)
    training, raised = Training(rank), ""
    with captured_log() as lines:
        try:
            for step in range(22):
                with monitor.step():
                    training.step()
                    if step == 16 and rank in mortals:
                        # Blocks are written by another thread: those of steps 12 to 15 are on disk before we die.
                        # With the run itself, eight blocks of the first window and its report.
                        wait_until(lambda: lines_in(folder) >= 1 + 8 + 1 + 4)
                        die()
        except RuntimeError as error:
            raised = str(error)
        monitor.close()
    return {"lines": lines, "raised": raised, "pass_through": is_pass_through(), "threads": own_threads()}


def test_after_another_rank_was_killed_in_mid_window_the_record_holds_what_this_one_measured(tmp_path):
    first, second = run_mortal_ranks(train_until_killed, 2, str(tmp_path), [1], 1.0)
    assert (second.returned, second.exit_code) == (False, -9)
    # The user's own error, from Gloo; ours is none.
    assert first.value["raised"]
    assert first.value["lines"] == []
    assert first.value["pass_through"]
    assert first.value["threads"] == []
    record = read(tmp_path)
    assert (record.broken_lines, record.unfinished) == (0, None)
    whole, cut = record.windows
    assert whole.complete
    assert whole.ranks == (0, 1)
    assert not cut.complete
    assert cut.ranks == (0,)
    assert cut.world_size == 2
    assert {"1 of 2 ranks were not heard [OC328]", "cut short: an exception in the user's step [OC311]"} <= set(
        cut.problems
    )
    assert [block.block for block in cut.samples[0].timed] in ([0, 1, 2, 3], [0, 1, 2, 3, 4])


def test_after_all_ranks_were_killed_in_mid_window_the_record_holds_the_blocks_measured_so_far(tmp_path):
    outcomes = run_mortal_ranks(train_until_killed, 2, str(tmp_path), [0, 1], 1.0)
    assert [outcome.exit_code for outcome in outcomes] == [-9, -9]
    record = read(tmp_path)
    assert record.broken_lines == 0
    assert [window.first_step for window in record.windows] == [2]
    cut = record.unfinished
    assert not cut.complete
    assert cut.first_step == 11
    arms = [block.mode for block in cut.samples[0].timed][:4]
    assert arms in ([Mode.OVERLAPPED, Mode.SEQUENTIAL] * 2, [Mode.SEQUENTIAL, Mode.OVERLAPPED] * 2)
    assert {"e2e_overlapped_ms", "e2e_sequential_ms"} <= set(cut.figures())
    # OSOS: drift would fall on the later mode, so they are not compared.
    assert cut.problems[0] == "4 timed blocks so far, too few blocks to compare the modes"


def resume(rank: int, folder: str) -> None:
    monitor = OverlapMonitor(tiny_schedule(), run_dir=folder, max_overhead=None)
    run_steps(Training(rank), monitor, 7)
    monitor.close()


def test_a_job_that_resumes_after_a_crash_in_mid_line_goes_on_with_the_record(tmp_path):
    run_mortal_ranks(train_until_killed, 2, str(tmp_path), [0, 1], 1.0)
    with Path(tmp_path, FILE_NAME).open("ab") as file:
        file.write(b'{"record": "window", "first_st')
    cut = read(tmp_path)
    assert (cut.broken_lines, len(cut.windows), cut.unfinished.first_step) == (1, 1, 11)
    run_ranks(resume, 2, str(tmp_path))
    record = read(tmp_path)
    assert (record.broken_lines, len(record.runs), len(record.windows)) == (1, 2, 2)
    assert record.unfinished is None


# -- errors of the library's own


class InjectedError(Exception):
    pass


# Where something of ours goes wrong, on all ranks that get there.
PARTS = (
    "instruments.clocks.StepClock.mark",
    "monitor.background.measurement.segments_of",
    "monitor.background.order_check.check_order",
    "monitor.background.order_check.in_step",
    "monitor.background.reporter.Reporter.submit_block",
    "monitor.background.reporter.Reporter.submit_window",
    "monitor.background.reporter.report_of",
    "monitor.background.reporter.measure",
    "monitor.background.reporter.measure_block",
    "gate.step_log.SequenceTracker.admits",
    "gate.serialiser.HostSerialiser.after",
    "gate.gate.Gate.begin_step",
    "gate.gate.Gate.end_step",
    "gate.gate.Gate.register",
    "gate.gate.Group.of",
    "instruments.profiler.Profile.begin_step",
    "instruments.profiler.Profile.end_step",
    "gate.deadlock.CollectiveSequence.encode",
    "gate.deadlock.CollectiveSequence.of",
    "monitor.background.store.StoreChannel.__init__",
    "monitor.background.tree.Exchange.gather",
    "monitor.background.store.StoreChannel.publish",
    "monitor.background.order_check.OrderChecker.start",
    "monitor.background.submissions.RecordedKinds.of",
    "monitor.schedule.Schedule.plan",
    "monitor.session.Session.__init__",
    "monitor.window.Window.__init__",
    "monitor.window.Window.begin_step",
    "monitor.window.Window.close",
    "monitor.window.Window.end_step",
)
NUM_STEPS = 25


@contextlib.contextmanager
def failing(part: str) -> Iterator[None]:
    """``part`` of the library raises whenever it is called."""
    module, *owners, name = part.split(".")
    owner = importlib.import_module(f"overlap_callbacks.{module}")
    for attribute in owners:
        owner = getattr(owner, attribute)
    before = vars(owner)[name]

    def fail(*_: Any, **__: Any) -> None:
        raise InjectedError(part)

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, before)


def train_with_an_error(
    rank: int, part: str, strict: bool, num_steps: int = NUM_STEPS, patience_s: float = 0.3
) -> dict[str, Any]:
    """Windows of 9 steps at 2 and 12; training goes on, without the monitor, where that raises."""
    untouched = dispatch_table()
    monitor = new_monitor(
        KeptReports(), schedule=tiny_schedule(every_n_steps=10, profiled_steps=2), strict=strict,
        order_timeout_s=patience_s, report_timeout_s=max(1.0, patience_s),
    )  # fmt: skip
    training, raised = Training(rank), []

    def call(action: Callable[[], None]) -> None:
        try:
            if not raised:
                action()
        except InjectedError as error:
            raised.append(str(error))

    with captured_log() as lines, failing(part):
        for step in range(num_steps):
            call(functools.partial(monitor.step_begin, step))
            training.step()
            call(functools.partial(monitor.step_end, step))
        active, passes = monitor.active, is_pass_through()
        call(monitor.close)
    monitor.close()
    return {
        "lines": lines,
        "raised": raised,
        "active": active,
        "digest": training.digest(),
        "let_go": (passes, dispatch_table() == untouched, own_threads(), torch.autograd._profiler_enabled()),
    }


def train_with_each_error(rank: int, strict: bool, parts: Sequence[str]) -> tuple[str, dict[str, dict[str, Any]]]:
    expected, found = digest_without_library(rank, NUM_STEPS), {}
    for part in parts:
        # On a busy machine rank 1 may be too late for a window, which rank 0 then says: once more, with more patience.
        for patience_s in (0.3, 10.0):
            found[part] = once = train_with_an_error(rank, part, strict, patience_s=patience_s)
            in_time = torch.tensor(float(rank or not any("no sequential steps" in line for line in once["lines"])))
            dist.all_reduce(in_time, dist.ReduceOp.MIN)
            if in_time:
                break
    return expected, found


@pytest.fixture(scope="module")
def errors_in_production() -> list[Any]:
    return run_ranks(train_with_each_error, 2, False, PARTS, timeout_s=150)


@pytest.fixture(scope="module")
def errors_when_strict(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(train_with_each_error, 2, True, sorted(asked_for(request, "strict_part")), timeout_s=150)


def _but_for_what_rank_0_did_not_say(lines: list[str]) -> list[str]:
    """A rank says that too, where it runs so late that rank 0 has given up: no other rank decides the order."""
    return [line for line in lines if "rank 0 did not decide within" not in line]


@pytest.mark.parametrize("part", PARTS)
def test_in_production_an_internal_error_gives_one_warning_and_training_continues(errors_in_production, part):
    for expected, found in errors_in_production:
        assert found[part]["raised"] == []
        assert found[part]["digest"] == expected
        assert found[part]["let_go"] == (True, True, [], False)
        assert len(_but_for_what_rank_0_did_not_say(found[part]["lines"])) <= 1
    (_, first), _ = errors_in_production
    (line,) = first[part]["lines"]
    assert part in line
    assert "training goes on" in line
    assert not first[part]["active"]


# All these parts are guarded by the same code, which tells by the option whether to raise: that each is guarded at all,
# the test above shows. For each change every third is tried.
@pytest.mark.parametrize("strict_part", at_night(PARTS, [part for n, part in enumerate(PARTS) if n % 3]))
def test_when_strict_an_internal_error_is_raised(errors_when_strict, strict_part):
    for expected, found in errors_when_strict:
        assert found[strict_part]["digest"] == expected
        assert found[strict_part]["let_go"] == (True, True, [], False)
    (_, first), _ = errors_when_strict
    assert first[strict_part]["raised"] == [strict_part]


# ``measure`` runs on the reporting thread, and there is no step after the last window's to notice what it raised.
LAST_WINDOW_STEPS = 2 + 9


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_in_the_report_of_the_last_window_is_not_lost(strict):
    first, _ = run_ranks(train_with_an_error, 2, "monitor.background.reporter.measure", strict, LAST_WINDOW_STEPS)
    assert first["raised"] == (["monitor.background.reporter.measure"] if strict else [])
    if not strict:
        (line,) = first["lines"]
        assert "monitor.background.reporter.measure" in line


def train_with_an_error_of_a_thread_in_a_sequential_step(rank: int, folder: str) -> dict[str, Any]:
    """From the error on, the collectives of the step are not serialised."""
    monitor = new_monitor(JsonlSink(folder), schedule=tiny_schedule(every_n_steps=20, repeats=2))
    training, sequential = Training(rank), 0
    with captured_log() as lines:
        for step in range(NUM_STEPS):
            with monitor.step(step):
                if monitor.mode is Mode.SEQUENTIAL:
                    sequential += 1
                    if sequential == 2:
                        monitor._driver.faults.report(InjectedError("of a thread"))
                training.step()
        active = monitor.active
        monitor.close()
    same = training.digest() == digest_without_library(rank, NUM_STEPS)
    return {"lines": lines, "active": active, "same": same}


def test_a_step_in_which_an_error_came_in_is_not_reported(tmp_path):
    first, second = run_ranks(train_with_an_error_of_a_thread_in_a_sequential_step, 2, str(tmp_path))
    for rank in (first, second):
        assert (rank["active"], rank["same"]) == (False, True)
        (line,) = rank["lines"]
        assert "of a thread" in line
    (window,) = read(tmp_path).windows
    assert not window.complete
    for sample in window.samples:
        assert sum(len(block.step_ms) for block in sample.timed if block.mode is Mode.SEQUENTIAL) == 1


# -- an error on one rank only


@contextlib.contextmanager
def noted_patience() -> Iterator[list[tuple[float, bool]]]:
    """How long the training thread was ready to wait for each ruling, and whether it was in vain.

    The first one may take long on a busy machine; the others are in vain, so they are waited for shortly.
    """
    noted: list[tuple[float, bool]] = []
    await_ruling = OrderChecker.await_ruling

    def noting(checks: OrderChecker) -> Ruling:
        patience_s = checks.patience_s
        ruling = await_ruling(checks)
        if not noted:
            checks._timeout_s, checks.patience_s = 0.3, 0.9
        noted.append((patience_s, ruling.decision is Decision.LATE))
        return ruling

    OrderChecker.await_ruling = noting
    try:
        yield noted
    finally:
        OrderChecker.await_ruling = await_ruling


def train_with_an_error_on_one_rank(rank: int, broken_rank: int) -> dict[str, Any]:
    """Six windows of 5 steps; on one rank the second one fails."""
    sink = KeptReports()
    monitor = new_monitor(sink, schedule=tiny_schedule(every_n_steps=10), order_timeout_s=10.0, report_timeout_s=5.0)
    training, expected = Training(rank), digest_without_library(rank, 60)
    with captured_log() as lines, noted_patience() as patience:
        run_steps(training, monitor, 10)
        with failing("monitor.window.Window.begin_step") if rank == broken_rank else contextlib.nullcontext():
            run_steps(training, monitor, 50)
        monitor.close()
    return {
        "lines": lines,
        "same": training.digest() == expected,
        "patience": patience,
        "let_go": (is_pass_through(), own_threads()),
        "reports": sink.facts(),
    }


@pytest.fixture(scope="module", params=[0, 1])
def error_on_one_rank(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, run_ranks(train_with_an_error_on_one_rank, 2, request.param)


def test_an_error_on_one_rank_neither_hangs_nor_changes_training_on_the_others(error_on_one_rank):
    broken_rank, found = error_on_one_rank
    for rank, of_rank in enumerate(found):
        assert of_rank["same"]
        assert of_rank["let_go"] == (True, [])
        (line,) = of_rank["lines"]
        assert ("internal error" in line) == (rank == broken_rank)
        assert ("no sequential steps" in line) == (rank != broken_rank)
    first, *others = found[0]["reports"]
    assert (first["complete"], first["ranks"]) == (True, [0, 1])
    assert not any(report["complete"] for report in others)


def test_a_rank_that_is_not_heard_any_more_is_waited_for_once_and_not_in_every_window(error_on_one_rank):
    broken_rank, found = error_on_one_rank
    first, in_vain, *later = found[1 - broken_rank]["patience"]
    assert first == (pytest.approx(30.0), False)
    assert in_vain == (pytest.approx(0.9), True)
    # In windows 2 and 4, and not in 3 and 5, it looks for a moment, and goes on training.
    assert later == [(pytest.approx(0.3), True)] * 2
