"""Calls that do not fit, values that are not allowed: in production one warning and training goes on, else an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from overlap_callbacks import MisuseError, Mode, OverlapMonitor, Schedule
from overlap_callbacks.integrations._options import AdvancedOptions
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report.record import read
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import (
    KeptReports,
    Training,
    digest_without_library,
    dispatch_table,
    kept_logs,
    kernels_are_registered,
    new_monitor,
    own_threads,
    run_steps,
    tiny_schedule,
)

# -- without a process group: these need no job


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="overlap_callbacks")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "overlap_callbacks"]


def far_schedule() -> Schedule:
    """No window in the steps of these tests."""
    return tiny_schedule(first_step=1_000_000)


# What a user may give as the step number by mistake, and the words that must stand in the message.
NO_NUMBERS = {
    "float": (3.0, "3.0"),
    "bool": (True, "True"),
    "string": ("3", "'3'"),
    "negative": (-1, "-1"),
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_an_invalid_step_number_gives_one_warning_and_the_loop_goes_on(kind, warnings_logged):
    number, shown = NO_NUMBERS[kind]
    monitor = new_monitor(schedule=far_schedule())
    done = 0
    for _ in range(5):
        with monitor.step(number):
            done += 1
    monitor.close()
    assert done == 5
    (line,) = warnings_logged()
    assert "step must be" in line
    assert shown in line


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_an_invalid_step_number_is_an_error_that_names_the_parameter_when_strict(kind):
    number, shown = NO_NUMBERS[kind]
    monitor = new_monitor(schedule=far_schedule(), strict=True)
    with pytest.raises(MisuseError, match="step must be") as error:
        monitor.step_begin(number)
    assert shown in str(error.value)
    monitor.close()


@pytest.mark.parametrize("number", [np.int64(0), torch.tensor(0)])
def test_whole_numbers_of_other_libraries_are_step_numbers_too(number, warnings_logged):
    monitor = new_monitor(schedule=far_schedule(), strict=True)
    monitor.step_begin(number)
    assert monitor.in_step
    monitor.step_end(number)
    assert not monitor.in_step
    monitor.close()
    assert warnings_logged() == []


def begin_without_end(monitor: OverlapMonitor) -> None:
    monitor.step_begin(monitor.last_step + 1)


def begin_a_later_one_without_end(monitor: OverlapMonitor) -> None:
    for number in (monitor.last_step + 1, monitor.last_step + 5):
        monitor.step_begin(number)


def end_without_begin(monitor: OverlapMonitor) -> None:
    monitor.step_end()


def end_another_step(monitor: OverlapMonitor) -> None:
    monitor.step_begin(monitor.last_step + 1)
    monitor.step_end(monitor.last_step + 1)


def go_back(monitor: OverlapMonitor) -> None:
    last = max(monitor.last_step, 10)
    for number in (last + 1, last - 5):
        monitor.step_begin(number)
        monitor.step_end()


def repeat_a_number(monitor: OverlapMonitor) -> None:
    number = monitor.last_step + 1
    for _ in range(2):
        monitor.step_begin(number)
        monitor.step_end()


def twice(call: Callable[[OverlapMonitor], None], monitor: OverlapMonitor) -> None:
    call(monitor)
    call(monitor)


# What is done wrong, and the call that the message must name.
WRONG_CALLS = {
    "step_begin twice": (begin_without_end, "step_begin"),
    "step_begin twice, with a jump": (begin_a_later_one_without_end, "step_begin"),
    "step_end without step_begin": (end_without_begin, "step_begin"),
    "step_end of another step": (end_another_step, "step_end"),
    "going back": (go_back, "step_begin"),
    "the same number again": (repeat_a_number, "step_begin"),
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_a_call_that_does_not_fit_gives_one_warning_however_often_it_comes(what, warnings_logged):
    call, named = WRONG_CALLS[what]
    monitor = new_monitor(schedule=far_schedule())
    for _ in range(5):
        call(monitor)
    assert monitor.active
    monitor.close()
    (line,) = warnings_logged()
    assert named in line


def test_the_same_number_within_its_own_step_is_both_nested_and_back(warnings_logged):
    monitor = new_monitor(schedule=far_schedule())
    for _ in range(3):
        monitor.step_begin(7)
    monitor.close()
    nested, back = warnings_logged()
    assert "began before step 7 ended" in nested
    assert "step_begin(7) came after step 7" in back


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_a_call_that_does_not_fit_is_an_error_when_strict(what):
    call, named = WRONG_CALLS[what]
    monitor = new_monitor(schedule=far_schedule(), strict=True)
    with pytest.raises(MisuseError, match=named):
        twice(call, monitor)
    monitor.close()


def test_without_a_process_group_one_warning_says_so_and_the_loop_goes_on(warnings_logged):
    monitor = new_monitor(KeptReports())
    for _ in range(20):
        with monitor.step():
            pass
    monitor.close()
    (line,) = warnings_logged()
    assert "no process group" in line


# -- what may be given to a constructor

BAD_OPTIONS = {
    "every_n_steps": 0,
    "first_step": -1,
    "blocks": "OSS",
    "repeats": 2.0,
    "steps_per_block": True,
    "warmup_steps": "1",
    "profiled_steps": 3,
    "control": 1,
    "max_overhead": 0,
    "order_timeout_s": -1.0,
    "report_timeout_s": "10",
    "schedule": {"every_n_steps": 100},
    "sinks": ["wandb"],
}


def optimizer_of_its_own() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_a_bad_option_of_attach_is_an_error_that_names_it_and_what_was_given(option):
    given = BAD_OPTIONS[option]
    advanced = {"advanced": {option: given}} if option in AdvancedOptions.__annotations__ else {option: given}
    for options in ({option: given}, advanced):
        for strict in (False, True):
            with pytest.raises((TypeError, ValueError), match=option) as raised:
                attach(optimizer_of_its_own(), strict=strict, **options)
            assert repr(given[0] if isinstance(given, list) else given) in str(raised.value)


def test_an_option_that_does_not_exist_is_an_error_that_lists_those_that_do():
    with pytest.raises(TypeError, match=r"unknown options \['every_n'\].*every_n_steps"):
        attach(optimizer_of_its_own(), every_n=5)


def test_something_else_than_an_optimizer_is_an_error():
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        attach(torch.nn.Linear(2, 2))


def test_an_invalid_mode_cannot_be_forced():
    monitor = new_monitor(schedule=far_schedule())
    with pytest.raises(TypeError, match="mode must be"):
        monitor.force("sequential")
    monitor.close()


# -- with a job


def train_alone(rank: int, strict: bool) -> dict[str, Any]:
    untouched = dispatch_table()
    monitor = new_monitor(KeptReports(), strict=strict)
    training = Training(rank)
    with captured_log() as lines:
        run_steps(training, monitor, 20)
        touched = kernels_are_registered() or dispatch_table() != untouched
        monitor.close()
    # Its parts of steps are told by threads of the library's own, which end with the monitor.
    did = touched, own_threads()
    return {"lines": lines, "did": did, "same": training.digest() == digest_without_library(rank, 20)}


@pytest.mark.parametrize("strict", [False, True])
def test_a_job_of_one_rank_gets_one_warning_and_is_not_measured(strict):
    (found,) = run_ranks(train_alone, 1, strict)
    (line,) = found["lines"]
    assert "one rank" in line
    assert found["did"] == (False, [])
    assert found["same"]


def train_with_step_numbers(rank: int, numbers: list[int]) -> dict[str, Any]:
    monitor = new_monitor(sink := KeptReports(), schedule=tiny_schedule(every_n_steps=10))
    training, modes = Training(rank), {}
    with captured_log() as lines, kept_logs():
        for number in numbers:
            with monitor.step(number):
                modes[number] = monitor.mode
                training.step()
        monitor.close()
    return {
        "lines": lines,
        "sequential": [number for number, mode in modes.items() if mode is Mode.SEQUENTIAL],
        "same": training.digest() == digest_without_library(rank, len(numbers)),
        "reports": sink.facts(),
    }


# Windows begin at 2, 12 and 22; the third and fourth steps of the first are sequential.
JUMPING = [*range(5), *range(9, 22)]
GOING_BACK = [*range(14), *range(8, 22)]


def test_a_step_number_that_jumps_within_a_window_gives_one_warning():
    for rank in run_ranks(train_with_step_numbers, 2, JUMPING):
        (line,) = rank["lines"]
        assert "jumped" in line


def test_a_step_number_that_jumps_within_a_window_ends_it_and_the_next_one_is_measured():
    found = run_ranks(train_with_step_numbers, 2, JUMPING)
    for rank in found:
        assert rank["sequential"][0] == 4
        assert len(rank["sequential"]) == 3
        assert rank["same"]
    cut, whole = found[0]["reports"]
    assert not cut["complete"]
    assert any("jumped from 4 to 9" in problem for problem in cut["problems"])
    assert whole["complete"]


def test_a_step_number_that_goes_back_within_a_window_ends_it_and_the_schedule_goes_on_from_there():
    found = run_ranks(train_with_step_numbers, 2, GOING_BACK)
    for rank in found:
        (line,) = rank["lines"]
        assert "step_begin(8) came after step 13" in line
        assert [step for step in rank["sequential"] if step < 12] == [4, 5]
        assert len(rank["sequential"]) == 4
        assert rank["same"]
    assert [report["complete"] for report in found[0]["reports"]] == [True, False, True]


def train_with_nested_steps(rank: int) -> dict[str, Any]:
    """step_end is forgotten once, in the first sequential step."""
    monitor = new_monitor(sink := KeptReports(), schedule=tiny_schedule(every_n_steps=10))
    training = Training(rank)
    with captured_log() as lines:
        for number in range(22):
            monitor.step_begin(number)
            training.step()
            if number != 4:
                monitor.step_end()
        monitor.close()
    return {
        "lines": lines,
        "same": training.digest() == digest_without_library(rank, 22),
        "complete": [report["complete"] for report in sink.facts()],
    }


def test_a_forgotten_step_end_gives_one_warning_costs_the_window_and_nothing_else():
    found = run_ranks(train_with_nested_steps, 2)
    assert all(rank["same"] for rank in found)
    assert found[0]["complete"] == [False, True]
    for rank in found:
        (line,) = rank["lines"]
        assert "step 5 began before step 4 ended" in line


def train_with_a_folder_that_cannot_be(rank: int, folder: str) -> dict[str, Any]:
    monitor = OverlapMonitor(tiny_schedule(), run_dir=folder, max_overhead=None)
    training = Training(rank)
    with captured_log() as lines:
        run_steps(training, monitor, 40)
        active = monitor.active
        monitor.close()
    return {"lines": lines, "active": active, "same": training.digest() == digest_without_library(rank, 40)}


@pytest.fixture
def impossible_folder(tmp_path) -> str:
    (tmp_path / "file").write_text("no folder")
    return str(tmp_path / "file" / "run")


def test_a_run_dir_that_cannot_be_written_gives_one_warning_and_training_goes_on(impossible_folder):
    first, second = run_ranks(train_with_a_folder_that_cannot_be, 2, impossible_folder)
    assert first["same"]
    assert second["same"]
    assert first["active"]
    # On a busy machine a rank may also come late to a window.
    (line,), others = [
        [said for said in rank["lines"] if "no sequential steps" not in said] for rank in (first, second)
    ]
    assert "JsonlSink failed" in line
    assert impossible_folder in line
    assert others == []


def train_strictly_with_a_folder_that_cannot_be(rank: int, folder: str) -> list[str]:
    """Training goes on without the monitor once that has raised, so as not to leave the other rank alone."""
    monitor = OverlapMonitor(tiny_schedule(), run_dir=folder, max_overhead=None, strict=True, order_timeout_s=0.3)
    training, raised = Training(rank), []
    for step in range(20):
        try:
            if not raised:
                monitor.step_begin(step)
        except OSError as error:
            raised.append(str(error))
        training.step()
        if not raised:
            monitor.step_end(step)
    monitor.close()
    return raised


def test_a_run_dir_that_cannot_be_written_is_an_error_that_names_it_when_strict(impossible_folder):
    (message,), nothing = run_ranks(train_strictly_with_a_folder_that_cannot_be, 2, impossible_folder)
    assert impossible_folder in message
    assert "run_dir" in message
    assert nothing == []


def train_where_a_record_is_already(rank: int, folder: str) -> None:
    monitor = OverlapMonitor(tiny_schedule(), run_dir=folder, max_overhead=None)
    run_steps(Training(rank), monitor, 8)
    monitor.close()


def test_a_run_dir_with_a_record_in_it_is_continued(tmp_path):
    for _ in range(2):
        run_ranks(train_where_a_record_is_already, 2, str(tmp_path))
    record = read(tmp_path)
    # Each job ends in its second window, before a step of it counts.
    assert (len(record.runs), len(record.windows), len(record.left_out), record.broken_lines) == (2, 2, 2, 0)
