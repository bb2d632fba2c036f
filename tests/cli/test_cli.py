from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks import FIGURES, JsonlSink, Schedule
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.session import run_info
from overlap_callbacks.report import record
from overlap_callbacks.report.views.comparison import head_lines
from tests.commands import invoke
from tests.margins import PATIENCE_S
from tests.samples import window_report


def write_record(
    folder: Path, *reports: OverlapReport, blocks: tuple[TimedBlock, ...] = (), control: bool = False
) -> None:
    sink = JsonlSink(folder)
    sink.open(
        run_info(MonitorConfig(schedule=Schedule(control=control), framework="pytorch"), Job(0, 2, "gloo"), "cpu")
    )
    for report in reports:
        sink.log(report)
    for block in blocks:
        sink.block(0, 20, block)
    sink.close()


def show(*arguments: str) -> str:
    result = invoke("show", *arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_show_says_the_verdict_and_the_five_equations(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    assert "What overlap saves" in show(str(tmp_path)) or "Overlap saves " in show(str(tmp_path))
    output = show(str(tmp_path), "--all")
    for number in range(1, 6):
        assert f"(eq. {number})" in output
    assert not re.search(r" {3,}not measured", output[: output.index("What does it cost?")])
    assert "9.9%" in output  # 10 % by construction, less the drift of the blocks


def test_show_takes_the_file_as_well_as_its_folder(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    assert show(str(tmp_path)) == show(str(tmp_path / "overlap.jsonl"))


def test_show_of_several_runs_says_which_is_faster_and_the_headline_of_each(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_record(tmp_path / name, window_report())
    runs = [str(tmp_path / name) for name in ("first", "second")]
    output = " ".join(show(*runs).split())
    assert output.startswith(head_lines(["first", "second"], [record.read(Path(run)) for run in runs])[0])
    (headline,) = re.findall(r"first: (.*?) second: \1", output)
    assert headline in " ".join(show(runs[0]).split())
    assert output.endswith(f"All tables: overlap show {' '.join(runs)} --all")
    assert "Side by side" in show(*runs, "--all")
    assert invoke("show", *runs, "--json").exit_code == 2


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    found = window_report()
    slower = tuple(msgspec.structs.replace(kernel, overlapped_ms=kernel.overlapped_ms + 1) for kernel in found.kernels)
    write_record(tmp_path, msgspec.structs.replace(found, kernels=slower))
    assert "<b>aten::add</b>" in show(str(tmp_path), "--all")


def test_what_is_shown_first_is_short_and_says_what_else_there_is(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    output = show(str(tmp_path))
    assert output.count("\n") <= 20
    assert not re.search(r"eq\. \d|residual|kernels that lose most", output)
    assert re.search(rf"All tables(, and \d notes?)?: overlap show {tmp_path} --all", " ".join(output.split()))
    everything = show(str(tmp_path), "--all")
    assert "kernels that lose most" in everything
    assert "Power was not measured." in everything


def test_what_was_measured_in_a_window_that_does_not_count_is_not_called_missing(tmp_path: Path) -> None:
    write_record(tmp_path, msgspec.structs.replace(window_report(), valid=False))
    output = show(str(tmp_path), "--all")
    assert "Power was not measured." in output
    assert "kernels that lose most" not in output


def test_a_name_cannot_imitate_a_line_of_the_library_or_fill_the_screen(tmp_path: Path) -> None:
    notes = ("a\nOverlap costs more than it saves here", "x" * 5000)
    write_record(tmp_path, msgspec.structs.replace(window_report(), problems=notes))
    output = show(str(tmp_path))
    assert "\nOverlap costs" not in output
    assert output.count("x" * 20) < 20


def test_names_in_errors_and_of_older_runs_do_not_steer_the_terminal(tmp_path: Path) -> None:
    for name in ("a\x1b[2J", "b"):
        write_record(tmp_path / name, window_report())
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "overlap.jsonl").write_text(
        json.dumps({"record": "run", "schema_version": 99, "library_version": "\x1b[2J"}) + "\n"
    )
    for folder in (tmp_path, tmp_path / "a\x1b[2J", tmp_path / "c"):
        result = invoke("show", str(folder))
        assert "\x1b" not in result.stdout + result.stderr


def test_names_that_steer_a_terminal_are_shown_without_that(tmp_path: Path) -> None:
    nasty = "\x1b[2J\x1b]0;owned\x07\u202ek\tn\x9b31m"
    kernel = KernelTime(nasty, False, 1.0, 1.0, overlapped_ms=2.0, sequential_ms=1.0)
    reports = msgspec.structs.replace(window_report(), kernels=(kernel,), problems=(nasty,))
    write_record(tmp_path, reports)
    output = show(str(tmp_path), "--all")
    assert output.count("owned") == 2  # kernel and note
    assert not set(output) & set(nasty) - set("[2J]0;ownedk31mtn")
    as_json = show(str(tmp_path), "--json")
    assert json.loads(as_json)["problems"] == [nasty]
    assert all(char.isprintable() or char == "\n" for char in as_json)


def test_a_terminal_without_unicode_gets_what_it_can_show(tmp_path: Path) -> None:
    write_record(tmp_path, msgspec.structs.replace(window_report(), problems=("Straße, 10 µs",)))

    def printed(*options: str) -> bytes:
        command = [sys.executable, "-m", "overlap_callbacks", "show", str(tmp_path), *options]
        found = subprocess.run(
            command,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert b"Stra?e, 10 ?s" in printed("--all")
    assert b"Overlapped  ####" in printed()
    assert json.loads(printed("--json"))["problems"] == ["Straße, 10 µs"]


def test_a_record_without_a_window_says_that_nothing_was_measured(tmp_path: Path) -> None:
    write_record(tmp_path)
    assert "Nothing has been measured" in show(str(tmp_path))


def test_a_window_that_was_cut_off_is_shown_with_what_it_had(tmp_path: Path) -> None:
    arms = (Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.SEQUENTIAL, Mode.OVERLAPPED)
    write_record(tmp_path, blocks=tuple(TimedBlock(arm, block, (100.0, 101.0)) for block, arm in enumerate(arms)))
    output = show(str(tmp_path))
    assert "no window is whole" in output
    assert "4 timed blocks so far" in output


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_too_few_blocks_are_shown_without_a_percentage(tmp_path: Path, num_blocks: int) -> None:
    arms = (Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.SEQUENTIAL)[:num_blocks]
    write_record(tmp_path, blocks=tuple(TimedBlock(arm, block, (100.0, 101.0)) for block, arm in enumerate(arms)))
    output = show(str(tmp_path))
    assert "Unfinished: too few blocks were measured to say what overlap saves." in output
    assert "100.5 ms" in output
    assert "%" not in output.replace("95%", "")


def test_a_window_that_was_cut_short_after_its_timed_part_is_shown_with_its_step_times(tmp_path: Path) -> None:
    report = window_report(complete=False)
    write_record(tmp_path, report)
    output = show(str(tmp_path))
    assert "No window counts" not in output
    assert "Nothing has been measured" not in output
    assert "Unfinished: " in output
    assert re.search(r"^window \d+ +step [\d,]+ +cut short", output, re.MULTILINE)
    assert report.e2e_sequential_ms is not None
    assert f"{report.e2e_sequential_ms.value:.1f} ms" in output
    found = json.loads(show(str(tmp_path), "--json"))
    assert found["figures"] == {}
    assert found["unfinished"]["figures"]["e2e_sequential_ms"]["value"] == report.e2e_sequential_ms.value


def test_of_a_folder_of_runs_the_newest_is_shown_and_said(tmp_path: Path) -> None:
    for age, name in enumerate(("run-b", "run-c", "run-a")):
        write_record(tmp_path / name, window_report())
        os.utime(tmp_path / name / "overlap.jsonl", (10**9 + age, 10**9 + age))
    result = invoke("show", str(tmp_path), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["path"] == str(tmp_path / "run-a" / "overlap.jsonl")
    assert result.stderr == f"{tmp_path} holds 3 runs; this is the newest, run-a. Older: run-c, run-b\n"
    (tmp_path / "empty").mkdir()
    result = invoke("show", str(tmp_path / "empty"))
    assert (result.exit_code, "no record at" in result.output) == (2, True)


def test_a_missing_profile_is_said_in_words(tmp_path: Path) -> None:
    write_record(tmp_path, window_report(profiled=()))
    assert "no profile has verified that the sequential steps were sequential." in " ".join(show(str(tmp_path)).split())
    assert "not measured" in show(str(tmp_path), "--all")


def test_a_control_run_gives_no_verdict(tmp_path: Path) -> None:
    write_record(tmp_path, control=True)
    assert "worth it" not in show(str(tmp_path))


def test_json_holds_the_figures_with_their_intervals(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    found = json.loads(show(str(tmp_path), "--json"))
    # The sample has no pipeline, no lengths of profiled steps, no collectives on the host of a job on a device,
    # and none that were compared by rank.
    not_in_the_sample = {"bubble_ms", "profiler_slowdown", "profiler_slowdown_isolated", "waiting_ms"}
    not_in_the_sample |= {"waiting_isolated_ms", "exposed_on_host_ms"}
    assert set(found["figures"]) == {figure.name for figure in FIGURES} - not_in_the_sample
    assert found["state"] == "one window"
    assert found["verdict"].startswith("71.4% of communication is hidden; ")
    speedup = found["figures"]["speedup_vs_sequential"]
    assert speedup["ci_low"] < speedup["value"] < speedup["ci_high"]


def test_the_waiting_of_each_mode_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    waiting = {"waiting_ms": Estimate(3.25, 3.0, 3.5, 8, 8), "waiting_isolated_ms": Estimate(1.5, 1.25, 1.75, 8, 8)}
    write_record(tmp_path, msgspec.structs.replace(window_report(), **waiting))
    figures = json.loads(show(str(tmp_path), "--json"))["figures"]
    assert {name: figures[name]["value"] for name in waiting} == {"waiting_ms": 3.25, "waiting_isolated_ms": 1.5}
    cells = [re.split(r" {2,}", line.strip()) for line in show(str(tmp_path), "--all").splitlines()]
    rows = {row[0]: row[1] for row in cells if len(row) > 2}
    assert rows["waiting in communication"] == "3.25 ms"
    assert rows["waiting in communication, sequential"] == "1.50 ms"


@pytest.mark.parametrize(
    "content", ["", "no json\n", '{"record": "window"}\n', '{"record": "run", "schema_version": 99}\n']
)
def test_a_file_that_is_not_a_record_gives_one_line_that_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "overlap.jsonl").write_text(content)
    result = invoke("show", str(tmp_path))
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


def test_a_missing_folder_gives_one_line_that_says_so(tmp_path: Path) -> None:
    result = invoke("show", str(tmp_path / "none"))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "no record at" in result.output


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--steps", "0", "0"),
        ("--hidden", "30", "multiple of 4"),
        ("--framework", "jax", "jax"),
        ("--bucket-mb", "0", "0"),
    ],
)
def test_demo_refuses_options_that_cannot_be(option: str, value: str, said: str) -> None:
    result = invoke("demo", option, value)
    assert result.exit_code == 2
    assert option in result.output
    assert said in result.output


# That of PyTorch is in ``test_offline.py``.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing")
@pytest.mark.nightly
def test_the_demo_of_lightning_measures_all_five_equations_with_intervals(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "overlap_callbacks", "demo", "--framework", "lightning",
        "--steps", "95", "--layers", "2", "--hidden", "128", "--bucket-mb", "0.2", "--json",
        "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_demo(json.loads(done.stdout), tmp_path / "run")


def check_demo(found: dict[str, Any], run_dir: Path) -> None:
    """Hold what a demo printed, and its record, against what a demo of two ranks measures."""
    for name in (
        "compute_slowdown",
        "overlap_ratio",
        "e2e_overlapped_ms",
        "e2e_ideal_ms",
        "e2e_sequential_model_ms",
        "e2e_sequential_ms",
    ):
        figure = found["figures"][name]
        assert figure["ci_low"] <= figure["value"] <= figure["ci_high"]
    (window,) = record.read(run_dir).valid_windows
    assert window.ranks == (0, 1)
    # Measured from the profile: what is left of overlap in sequential steps, and that there was some in the others.
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05
    assert window.overlap_ratio is not None
    assert window.overlap_ratio.value > 0.05
    assert window.collectives[0].isolated_ms is not None
    assert 0 < window.collectives[0].isolated_ms < window.e2e_sequential_ms.value
