"""``overlap check``: exit codes, and one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.experiments.check import EXPOSED_SHARE, State, judge, limit_on
from overlap_callbacks.experiments.supervisor import processes_with
from tests.commands import invoke
from tests.margins import PATIENCE_S
from tests.report.runs import run_info, window, write

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = [sys.executable, str(ROOT / "tests/experiments/job.py"), "--nap-ms", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Of a step of 412 ms, 36 ms of communication are exposed; compute runs 14% slower.
    return str(write(tmp_path_factory.mktemp("runs") / "run", window(0), window(1), window(2)))


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (["--max-exposed", "0.1"], 0),
        (["--max-exposed", "0.08"], 1),
        (["--min-overlap", "0.7"], 0),
        (["--min-overlap", "0.8"], 1),
        (["--max-slowdown", "0.2"], 0),
        (["--max-slowdown", "0.1"], 1),
        (["--max", "e2e_overlapped_ms=500", "--min", "speedup_vs_sequential=0.05"], 0),
        (["--max", "e2e_overlapped_ms=500", "--min", "speedup_vs_sequential=0.5"], 1),
        (["--max-slowdown", "0.14"], 3),
        (["--max-slowdown", "0.14", "--max-exposed", "0.01"], 1),
        (["--max-slowdown", "0.14", "--max-exposed", "0.1"], 3),
        (["--max", "profiler_slowdown=nan"], 2),
        (["--max", "speed=1"], 2),
        ([], 2),
    ],
)
def test_exit_codes(run: str, limits: list[str], code: int) -> None:
    result = invoke("check", *limits, run)
    assert result.exit_code == code, result.output


def test_a_broken_limit_says_what_was_measured_and_whose_communication_is_exposed(run: str) -> None:
    result = invoke("check", "--max-exposed", "0.01", "--max-slowdown", "0.9", run)
    first, *rest = result.stdout.splitlines()
    assert first.startswith("A limit is broken: exposed communication, as a share of a profiled step, is 8.")
    assert "95% interval" in first
    assert first.endswith(", and at most 1.0% is allowed.")
    assert any("dimension" in line and "exposed" in line for line in rest)


def test_the_most_exposed_collectives_are_told_by_size_and_place_over_all_ranks_and_steps(run: str) -> None:
    lines = [line.strip() for line in invoke("check", "--max-exposed", "0.01", run).stdout.splitlines()]
    assert lines[-1].startswith("To try first: ")
    assert lines[-3:-1] == [
        "windows 0 to 2: of 192 ms exposed on 2 ranks 144 ms are the 64 MiB reduce-scatter that ends the step, "
        "in 6 of 12 steps",
        "windows 0 to 2: of 192 ms exposed on 2 ranks 48.0 ms are the 24 MiB all-reduces in the middle of the step, "
        "in 12 of 12 steps",
    ]
    told = json.loads(invoke("check", "--max-exposed", "0.01", "--json", run).stdout)["collectives"]
    assert [(row["place"], row["exposed_ms"], row["worst_rank"]) for row in told] == [
        ("last", 144, 1),
        ("middle", 48, 0),
    ]


def test_the_advice_is_on_the_figure_that_broke(run: str, tmp_path: Path) -> None:
    """Compute takes most of this job's step, and loses time to contention; neither exposes communication."""

    def advice(*limits: str, of: str = run) -> str:
        result = invoke("check", *limits, of)
        assert result.exit_code == 1, result.output
        return result.stdout.splitlines()[-1].strip()

    on_exposed = advice("--max-exposed", "0.01")
    assert on_exposed.startswith("To try first: Keep each tensor-parallel group within a node, on its fastest links: ")
    assert on_exposed == advice("--min-overlap", "0.99") == advice("--max", "exposed_comm_ms=1")
    assert advice("--max-slowdown", "0.01").startswith("To try first: Give NCCL fewer SMs: lower NCCL_MAX_CTAS: ")
    # Where no contention can be seen, nothing is known against a slowdown.
    quiet = msgspec.structs.replace(window(0), compute_slowdown=Estimate(0.01, 0.008, 0.012, 8, 16))
    found = advice("--max-slowdown", "0.001", of=str(write(tmp_path / "quiet", quiet)))
    assert found.startswith(("No advice: ", "To try first: "))
    assert "Make compute itself faster" not in found


def test_older_records_do_not_tell_collectives(tmp_path: Path) -> None:
    older = str(write(tmp_path, msgspec.structs.replace(window(0), exposure=None)))
    assert "that end" not in invoke("check", "--max-exposed", "0.01", older).stdout
    assert json.loads(invoke("check", "--max-exposed", "0.01", "--json", older).stdout)["collectives"] == []


def test_the_whole_interval_decides(run: str) -> None:
    measured = json.loads(invoke("check", "--max-slowdown", "0", "--json", run).stdout)["limits"][0]["measured"]
    low, value, high = (measured[name] for name in ("ci_low", "value", "ci_high"))
    limits = (low - 0.01, (low + value) / 2, (value + high) / 2, high + 0.01)
    assert [invoke("check", "--max-slowdown", str(one), run).exit_code for one in limits] == [1, 3, 3, 0]
    assert [invoke("check", "--min", f"compute_slowdown={one}", run).exit_code for one in limits] == [0, 3, 3, 1]


def test_a_limit_within_a_wide_interval_is_never_said_to_hold(run: str) -> None:
    for bound, low in ((0.10, 0.0), (0.5, 0.0), (0.10, None), (0.5, None)):
        pooled = _Pooled(Estimate(0.33, low, 0.76, 24, 4))
        (found,) = judge(pooled, [limit_on(EXPOSED_SHARE, "--max-exposed", str(bound))])  # type: ignore[arg-type]
        assert found.state is State.INCONCLUSIVE
        assert ("(no interval yet)" in found.sentence()) == (low is None)
    result = invoke("check", "--max-slowdown", "0.14", "--min-overlap", "0.1", run)
    assert result.stdout.startswith("Inconclusive: compute slowdown is 14.")
    assert "and at most 14.0% is allowed. More windows give narrower intervals." in result.stdout
    assert "hold" not in result.stdout


def test_what_is_inconclusive_is_not_listed_as_broken(run: str) -> None:
    said = invoke("check", "--max-slowdown", "0.14", "--max-exposed", "0.01", run).stdout.splitlines()[0]
    assert re.match(r"A limit is broken: exposed communication, .*; inconclusive: compute slowdown is 14\.", said)


def test_no_end_of_an_interval_beyond_a_limit_looks_like_the_limit() -> None:
    for low, high, bound, said in (
        (0.3, 0.3502, 0.35, "33.00% (95% interval 30.00% to 35.02%), and at most 35.00% is allowed"),
        (0.3, 0.35, 0.35, "33.0% (95% interval 30.0% to 35.0%), and at most 35.0% is allowed"),
        (0.3, 0.35, 0.0004, "33.00% (95% interval 30.00% to 35.00%), and at most 0.04% is allowed"),
        (0.0, 0.4, 0.0, "33.0% (95% interval 0.0% to 40.0%), and at most 0.0% is allowed"),
    ):
        pooled = _Pooled(Estimate(0.33, low, high, 24, 4))
        (found,) = judge(pooled, [limit_on(EXPOSED_SHARE, "--max-exposed", str(bound))])  # type: ignore[arg-type]
        assert found.sentence().endswith(said)


class _Pooled:
    """A run's summary with this share of exposed communication."""

    def __init__(self, share: Estimate) -> None:
        self.share = share

    def undecided(self) -> dict[str, str]:
        return {}

    def pooled(self) -> dict[str, Estimate]:
        step = {"compute_busy_ms": 60.0, "exposed_comm_ms": 33.0, "idle_ms": 7.0}
        found = {name: Estimate(value, None, None, 24, 4) for name, value in step.items()}
        low = None if self.share.ci_low is None else 100 * self.share.ci_low
        return found | {"exposed_comm_ms": Estimate(33.0, low, 100 * self.share.ci_high, 24, 4)}


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("--max-exposed=10", "--max-exposed must be from 0 to 1, got 10; did you mean 0.10?"),
        ("--max-exposed=12.5", "--max-exposed must be from 0 to 1, got 12.5; did you mean 0.125?"),
        ("--min-overlap=50", "--min-overlap must be from 0 to 1, got 50; did you mean 0.50?"),
        ("--max=comm_ratio=30", "--max comm_ratio must be from 0 to 1, got 30; did you mean 0.30?"),
        ("--max-exposed=200", "--max-exposed must be from 0 to 1, got 200"),
        ("--max-exposed=-0.1", "--max-exposed must be from 0 to 1, got -0.1"),
        ("--max-exposed=10%", "--max-exposed must be a fraction, got 10%; did you mean 0.10?"),
        ("--max-slowdown=15", "--max-slowdown must be from -1 to below 2, got 15; did you mean 0.15?"),
        ("--max-slowdown=2", "--max-slowdown must be from -1 to below 2, got 2; did you mean 0.02?"),
        ("--max-slowdown=150", "--max-slowdown must be from -1 to below 2, got 150"),
        (
            "--min=speedup_vs_sequential=-5",
            "--min speedup_vs_sequential must be from -1 to below 2, got -5; did you mean -0.05?",
        ),
        ("--max=gap_to_ideal=12.5", "--max gap_to_ideal must be from -1 to below 2, got 12.5; did you mean 0.125?"),
        (
            "--min=attained_fraction=80",
            "--min attained_fraction must be from above -2 to 1, got 80; did you mean 0.80?",
        ),
        ("--max=e2e_overlapped_ms=-1", "--max e2e_overlapped_ms must not be below 0, got -1"),
        ("--max-slowdown=20%", "--max-slowdown must be a fraction, got 20%; did you mean 0.20?"),
        ("--max-slowdown=nan", "--max-slowdown must be a number, got 'nan'"),
        ("--min-overlap=much", "--min-overlap must be a number, got 'much'"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_with_what_was_meant(run: str, limit: str, says: str) -> None:
    result = invoke("check", run, limit)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.rstrip().endswith(says)
    assert invoke("check", run, "--max-slowdown", "1.5").exit_code == 0  # which is no share


def test_options_may_follow_the_run_and_a_command_follows_dashes(run: str) -> None:
    assert invoke("check", run, "--max-exposed", "0.1").exit_code == 0
    assert json.loads(invoke("check", "--json", run, "--max-exposed", "0.1").stdout)["exit_code"] == 0
    for arguments, says in (
        ([], "give a run, or -- and a command"),
        ([run, "--", "true"], "give a run, or -- and a command"),
        ([run, run], "give one run, or put -- before a command: -- "),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "Put -- before a command that is run"),
        ([run, "--windows", "2", "--timeout", "9"], "--windows and --timeout: only for a command that is run first"),
    ):
        result = invoke("check", "--max-exposed", "0.1", *arguments)
        assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_an_unmeasured_figure_is_not_a_pass(tmp_path: Path) -> None:
    def changed(**changes: object) -> OverlapReport:
        return msgspec.structs.replace(window(), **changes)

    unmeasured = write(tmp_path / "run", changed(compute_slowdown=None))
    result = invoke("check", "--max-slowdown", "0.5", str(unmeasured))
    assert (result.exit_code, "was not measured" in result.stdout) == (3, True)
    # A broken limit beside it is still broken.
    assert invoke("check", "--max-slowdown", "0.5", "--max", "e2e_overlapped_ms=1", str(unmeasured)).exit_code == 1
    invalid = write(tmp_path / "invalid", changed(valid=False))
    assert invoke("check", "--max-slowdown", "0.5", str(invalid)).exit_code == 3
    control = write(tmp_path / "control", changed(control=True), run=run_info(schedule={"control": True}))
    assert invoke("check", "--max-slowdown", "0.5", str(control)).exit_code == 2
    assert invoke("check", "--max-slowdown", "0.5", str(tmp_path)).exit_code == 2
    (tmp_path / "empty").mkdir()
    assert invoke("check", "--max-slowdown", "0.5", str(tmp_path / "empty")).exit_code == 2


def test_a_command_is_run_and_ended_once_a_window_counts(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    result = invoke(
        "check", "--max", "e2e_overlapped_ms=60000", "--windows", "1", "--timeout", str(PATIENCE_S), "--run-dir",
        str(folder),
        "--", *JOB, "--every", "100", "--repeats", "2", env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("All limits hold: ")
    assert (folder / "overlap.jsonl").exists()
    again = invoke("check", "--max-exposed", "1", "--run-dir", str(folder), "--", "true")
    assert (again.exit_code, "has a record already" in again.output) == (2, True)


@pytest.mark.parametrize(("windows", "code"), [("3", 0), ("4", 2)])
def test_a_command_that_fails_with_its_last_window_has_done_enough(
    run: str, tmp_path: Path, windows: str, code: int
) -> None:
    script = f'mkdir -p "${RUN_DIR}" && ln -s {run}/overlap.jsonl "${RUN_DIR}"; exit 3'
    result = invoke(
        "check", "--max", "e2e_overlapped_ms=60000", "--windows", windows, "--run-dir", str(tmp_path / "record"),
        "--", "sh", "-c", script,
    )  # fmt: skip
    assert result.exit_code == code, result.output
    assert ("the command failed (exit code 3)" in result.output) == (code == 2)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["sh", "-c", "exit 7"], "the command failed (exit code 7)"),
        (["true"], "no record"),
        (["/no/such/program", "x"], "the command cannot be started"),
    ],
)
def test_a_command_without_a_record_is_not_a_pass(command: list[str], says: str) -> None:
    result = invoke("check", "--max-exposed", "1", "--", *command)
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_ctrl_c_keeps_the_windows_that_were_measured_and_says_how_to_judge_them(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "overlap_callbacks", "check", "--max", "e2e_overlapped_ms=60000", "--", *JOB,
         "--every", "100", "--repeats", "4"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    while not any('"record":"window"' in file.read_text() for file in tmp_path.glob("overlap-check-*/overlap.jsonl")):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    (folder,) = tmp_path.glob("overlap-check-*")
    assert process.returncode == 130, errors
    assert f" check --max e2e_overlapped_ms=60000 {folder}" in errors
    assert processes_with(RUN_DIR, str(folder)) == []
    assert invoke("check", "--max", "e2e_overlapped_ms=60000", str(folder)).exit_code == 0


def test_json_says_why_no_window_counts(tmp_path: Path) -> None:
    folder = str(write(tmp_path, msgspec.structs.replace(window(0), valid=False, problems=("it was too short",))))
    result = invoke("check", "--max-exposed", "0.1", "--json", folder)
    told = json.loads(result.stdout)
    assert (result.exit_code, told["exit_code"], told["state"], told["valid_windows"]) == (3, 3, "invalid", 0)
    (limit,) = told["limits"]
    assert (limit["state"], limit["measured"]) == ("cannot be judged", None)
    assert "it was too short" in limit["doubt"]
