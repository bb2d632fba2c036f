"""A command is ended in time, with all that it started, whatever it does against it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.experiments import supervisor
from overlap_callbacks.experiments.supervisor import (
    Ending,
    Outcome,
    exit_in_words,
    processes_with,
    supervise,
    telling_line,
)

# Starts a child in a session of its own, as torchrun does with workers; both are deaf to SIGTERM.
DEAF = "trap '' TERM; echo ready > $OVERLAP_CALLBACKS_RUN_DIR/ready; setsid sh -c \"trap '' TERM; sleep 60\" & wait"


def run(folder: Path, script: str, **options: Any) -> Outcome:
    options = {"is_done": lambda: False, "timeout_s": 30.0, "grace_s": 0.2, **options}
    return supervise(["sh", "-c", script], environment={**os.environ, RUN_DIR: str(folder)}, **options)


def test_a_command_that_ends_by_itself_has_its_exit_code(tmp_path: Path) -> None:
    outcome = run(tmp_path, "exit 3")
    assert (outcome.ending, outcome.exit_code) == (Ending.BY_ITSELF, 3)


def test_a_command_that_has_done_enough_is_ended_with_its_deaf_grandchildren(tmp_path: Path) -> None:
    outcome = run(tmp_path, DEAF, is_done=(tmp_path / "ready").exists)
    assert (outcome.ending, outcome.exit_code) == (Ending.DONE, None)
    assert outcome.seconds < 20
    assert processes_with(RUN_DIR, str(tmp_path)) == []


@pytest.mark.parametrize("misses", [0, 1])
def test_what_a_command_leaves_behind_is_ended_too_even_if_a_look_misses_it(tmp_path: Path, misses: int) -> None:
    left = "setsid sh -c 'echo > $OVERLAP_CALLBACKS_RUN_DIR/left; sleep 60; :' &"
    script = f"{left} while [ ! -e $OVERLAP_CALLBACKS_RUN_DIR/left ]; do sleep 0.01; done; exit 0"
    looks = itertools.count()

    def look(variable: str, value: str) -> list[int]:
        return [] if next(looks) < misses else processes_with(variable, value)

    with mock.patch.object(supervisor, "processes_with", look):
        outcome = run(tmp_path, script)
    assert (outcome.ending, outcome.exit_code) == (Ending.BY_ITSELF, 0)
    assert processes_with(RUN_DIR, str(tmp_path)) == []


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert run(tmp_path, "sleep 60", timeout_s=0.3).ending is Ending.TIMEOUT


def test_an_interrupt_ends_the_command_and_goes_on_to_the_caller(tmp_path: Path) -> None:
    def interrupt() -> bool:
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt
        return False

    running: list[list[int]] = []
    with pytest.raises(KeyboardInterrupt):
        run(
            tmp_path, DEAF, is_done=interrupt,
            on_interrupt=lambda: running.append(processes_with(RUN_DIR, str(tmp_path))),
        )  # fmt: skip
    assert len(running) == 1
    assert running[0], "the command was ended before anybody was told"
    assert processes_with(RUN_DIR, str(tmp_path)) == []


def test_a_command_that_cannot_be_started_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        supervise(["/no/such/program"], environment={RUN_DIR: str(tmp_path)}, is_done=lambda: False, timeout_s=1.0)


def test_processes_of_others_are_not_found(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, RUN_DIR: f"{tmp_path}-other"}
    )
    try:
        while not processes_with(RUN_DIR, f"{tmp_path}-other"):
            time.sleep(0.01)
        assert processes_with(RUN_DIR, str(tmp_path)) == []
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", ""),
        ("only this\n\n", "only this"),
        (
            "[rank0]: Traceback (most recent call last):\n"
            "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried 20 GiB\n"
            "[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:1234\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n===\n  exitcode: 1\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried 20 GiB",
        ),
        ("KeyError: 'a'\n\nDuring handling\n\x1b[31mValueError: bad value\x1b[0m\nbye\n", "ValueError: bad value"),
        ("x.ChildFailedError: \n=====", "x.ChildFailedError:"),
    ],
)
def test_the_line_that_says_most_is_found(output: str, line: str) -> None:
    assert telling_line(output) == line


def test_exit_codes_in_words() -> None:
    assert exit_in_words(1) == "exit code 1"
    assert exit_in_words(-signal.SIGKILL) == "ended by SIGKILL"


def test_ctrl_c_while_a_command_starts_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs already, and nobody has its number yet."""
    started: list[Any] = []

    class Start(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Start)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "sleep 60")
    monkeypatch.undo()
    assert started[0].poll() is not None
    assert processes_with(RUN_DIR, str(tmp_path)) == []
