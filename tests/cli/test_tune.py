"""``overlap tune`` with real jobs of two ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.experiments.supervisor import processes_with
from overlap_callbacks.experiments.tune.sweep import Tune
from overlap_callbacks.report.record import read
from tests.commands import invoke
from tests.margins import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = [sys.executable, str(ROOT / "tests/experiments/job.py")]
SHORT = ["--steps", "8", "--warmup", "2", "--timeout", str(PATIENCE_S)]


def environment(**changes: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def test_the_faster_setting_comes_first_and_a_failing_one_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    result = invoke(
        "tune", "--arg", "nap-ms=80,too-much,0", *SHORT, "--repeats", "2", "-o", str(folder), "--json", "--", *JOB,
        env=environment(NAP_S="0.001"),
    )  # fmt: skip
    shown = json.loads(result.stdout)
    assert [row["settings"]["nap-ms"] for row in shown["rows"]] == ["0", "80", "too-much"]
    fast, slow, failed = shown["rows"]
    assert slow["step_ms"]["value"] > 80
    assert 1 < fast["step_ms"]["value"] < slow["step_ms"]["value"]
    assert fast["change"]["value"] < 0
    # Two runs of eight steps: on a busy machine even this difference may not be clear, and then the command says so.
    assert result.exit_code == (0 if fast["change"]["ci_high"] < 0 else 3), result.output
    assert (fast["runs"], slow["runs"], failed["runs"]) == (2, 2, 0)
    assert failed["failure"] == "exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    found = Tune.read(folder).lines
    assert [run.combination for run in found] == [0, 1, 2, 2, 0]
    assert all(run.world_size == 2 and len(run.block_ms) == 4 for run in found if not run.failure)
    # The record is where tune wants it, whatever the script says, and holds overlapped blocks alone.
    record = read(folder / found[0].folder)
    assert record.windows == []
    assert {block.mode.value for block in record.unfinished.samples[0].timed} == {"overlapped"}  # type: ignore[union-attr]
    assert not Path("not-here").exists()
    assert "Step time against nap-ms" in (folder / "tune.html").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_ctrl_c_ends_the_job_and_keeps_what_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    overlap = [sys.executable, "-m", "overlap_callbacks", "tune"]
    process = subprocess.Popen(
        [*overlap, "--arg", "nap-ms=1,2", *SHORT, "--repeats", "1", "-o", str(folder), "--", *JOB],
        env={**os.environ, **environment()}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    second = folder / "runs" / "001-0"
    # The job has begun, and loads torch: it cannot be done before the signal comes.
    until(lambda: (second / "stderr.log").exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert f" tune --resume {folder}" in errors
    assert processes_with(RUN_DIR, str(second)) == []
    assert [run.combination for run in Tune.read(folder).lines] == [0]
    assert re.search(r"nap-ms=1", output)
    assert "Not finished: 1 of 2 runs did not run yet." in (folder / "tune.html").read_text()

    result = invoke("tune", "--resume", str(folder), "--repeats", "1", env=environment(COLUMNS="200"))
    assert result.exit_code == 3, result.output
    assert [run.combination for run in Tune.read(folder).lines] == [0, 1]
    assert "Inconclusive so far" in result.stdout
    assert "Not finished" not in (folder / "tune.html").read_text()
    other = invoke("tune", "--resume", str(folder), "--", "another")
    assert (other.exit_code, "another command" in other.output) == (2, True)


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the command to run"),
        (["--", "x"], "there is nothing to compare"),
        (["--env", "A=1,1", "--", "x"], "1 is given twice"),
        (["--arg", "a=1,2", "--arg", "a=3", "--", "x"], "a is given twice"),
        (["--arg", "a=1,2", "train"], "put -- before the command: -- train"),
        (["--arg", "a=1,2", "torchrun", "--nproc-per-node", "2", "t.py"], "Put -- before a command that is run"),
        (["--arg", "a=1,2", "--", "no-such-program"], "cannot be started: there is no program no-such-program"),
    ],
)
def test_wrong_use_gives_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = invoke("tune", "-o", str(tmp_path / "none"), *arguments)
    assert (result.exit_code, says in result.output) == (2, True), result.output
    assert not (tmp_path / "none").exists()


def test_a_command_that_gives_no_step_times_ends_in_rows_that_say_why(tmp_path: Path) -> None:
    folder = str(tmp_path / "tuned")
    result = invoke("tune", "--env", "A=1,2", "-o", folder, "--", "true", env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "No combination was measured." in result.stdout
    assert "Failed: A=1; A=2: the command ended and no steps were timed: is the library attached in it" in result.stdout
    again = invoke("tune", "--env", "A=1,2", "-o", folder, "--", "true")
    assert (again.exit_code, "has results already" in again.output) == (2, True)
    of_file = invoke("tune", "--resume", f"{folder}/tune.jsonl")
    assert (of_file.exit_code, "is a file" in of_file.output) == (2, True)


def test_runs_that_do_not_fit_into_the_time_are_left_for_later(tmp_path: Path) -> None:
    folder = str(tmp_path / "tuned")
    result = invoke("tune", "--env", "A=1,2", "--minutes", "0.1", "-o", folder, "--", "sleep", "60")
    assert result.exit_code == 2
    assert f" tune --resume {folder}" in result.output
    assert Tune.read(Path(folder)).lines == []
