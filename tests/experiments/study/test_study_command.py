"""``overlap study`` with real jobs of two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR, SWITCH
from overlap_callbacks.experiments.study.plan import make_start
from overlap_callbacks.experiments.study.sweep import Study, run_job
from overlap_callbacks.experiments.supervisor import Limits, processes_with
from overlap_callbacks.report.record import read
from tests.commands import invoke
from tests.experiments.study.machines import CPU
from tests.margins import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SMALL = ["--scale", "0.01", "--batch", "1", "--steps", "5"]


def environment(**changes: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), **changes}


@pytest.mark.nightly
def test_ctrl_c_keeps_what_was_measured_and_the_study_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    process = subprocess.Popen(
        [sys.executable, "-m", "overlap_callbacks", "study", *SMALL, "--strategy", "ddp,pp", "--precision", "tf32,fp32",
         "-o", str(folder)],
        env={**os.environ, **environment(**{SWITCH: "off"})}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    last = folder / "runs" / "003-gpt3-xl-pp-b1-fp32"
    # The last job has begun, and loads torch: it cannot be done before the signal comes.
    until(lambda: (last / "stderr.log").exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Interrupted: what was measured is kept. Go on with: " in errors
    assert f" study --resume {folder}" in errors
    assert processes_with(RUN_DIR, str(last)) == []
    assert "tf32 needs a GPU" in output
    rows = Study.read(folder).lines
    assert [row.configuration.precision for row in rows] == ["tf32", "tf32", "fp32"]
    assert [row.failure is None for row in rows] == [False, False, True]

    again = invoke("study", "--resume", str(folder), "--json", env=environment())
    assert again.exit_code == 0, again.output
    shown = json.loads(again.stdout)
    assert [row["configuration"]["strategy"] for row in shown["configurations"]] == ["ddp", "pp", "ddp", "pp"]
    for row in Study.read(folder).lines[2:]:
        assert row.figures is not None
        assert row.figures.num_windows == 1
        assert 3 <= row.figures.num_steps <= 5  # on a busy machine some took far longer than others, and are left out
        step = row.figures.values["overlap/e2e_overlapped_ms"]
        if step.ci_low is None:  # only where steps were left out, so that too few blocks remain
            assert row.figures.num_steps < 5
        else:
            assert step.ci_low < step.value
        assert row.figures.values["overlap/tokens_per_s"].value > 0
        assert row.model["parameters"] == 466_432
        assert row.record is not None
        assert read(folder / row.record).pooled()["e2e_overlapped_ms"] == step
    other = invoke("study", "--resume", str(folder), "--model", "bert", "--steps", "5")
    assert other.exit_code == 2
    assert "--resume goes on as it was begun: leave out --model and --steps" in other.output


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt5"], "--model must be one of"),
        (["--batch", "four"], "--batch must be whole numbers with commas between them, got 'four'"),
        (["--scale", "0"], "--scale must be from 0.01 to 1, got 0"),
    ],
)
def test_wrong_use_gives_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = invoke("study", "-o", str(tmp_path / "none"), *arguments)
    assert (result.exit_code, says in result.output) == (2, True), result.output
    assert not (tmp_path / "none").exists()


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "study.jsonl").write_text("{}\n")
    result = invoke("study", "-o", str(tmp_path))
    assert (result.exit_code, "has results already" in result.output) == (2, True)


def test_a_job_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    start = make_start({"strategies": ["ddp"], "batches": [1], "scale": 0.01, "steps": 5}, CPU)
    wrong = msgspec.structs.replace(start, options={**start.options, "threads": 0})
    (one,) = start.configurations
    row = run_job(Study(tmp_path, wrong), one, Limits(timeout_s=PATIENCE_S, left_s=1000))
    assert row is not None
    assert row.figures is None
    assert row.failure is not None
    assert row.failure.startswith("exit code 1: RuntimeError: set_num_threads")
    slow = run_job(Study(tmp_path, start), one, Limits(timeout_s=1, left_s=1000))
    assert slow is not None
    assert (slow.failure or "").startswith("it was not measured within 1 s (--timeout)")
    assert run_job(Study(tmp_path, start), one, Limits(timeout_s=PATIENCE_S, left_s=1)) is None
