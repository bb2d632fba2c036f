from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from overlap_callbacks import FIGURES, JsonlSink, Schedule, record
from overlap_callbacks.cli import main
from overlap_callbacks.metrics import OverlapReport
from overlap_callbacks.ranks import Job
from overlap_callbacks.run_info import run_info
from overlap_callbacks.samples import TimedBlock
from overlap_callbacks.schedule import Mode
from tests.samples import window_report


def write_record(
    folder: Path, *reports: OverlapReport, blocks: tuple[TimedBlock, ...] = (), control: bool = False
) -> None:
    sink = JsonlSink(folder)
    sink.open(run_info(Job(0, 2, "gloo"), Schedule(control=control), "pytorch", "cpu"))
    for report in reports:
        sink.log(report)
    for block in blocks:
        sink.block(0, 20, block)
    sink.close()


def show(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["show", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_show_says_the_verdict_and_the_five_equations(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    output = show(str(tmp_path))
    assert "Overlap is worth it here" in output
    for number in range(1, 6):
        assert f"(eq. {number})" in output
    assert "not measured" not in output
    assert "9.9%" in output  # 10 % by construction, less the drift of the blocks


def test_show_takes_the_file_as_well_as_its_folder(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    assert show(str(tmp_path)) == show(str(tmp_path / "overlap.jsonl"))


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    assert "<b>aten::add</b>" in show(str(tmp_path))


def test_a_record_without_a_window_says_that_nothing_was_measured(tmp_path: Path) -> None:
    write_record(tmp_path)
    assert "Nothing has been measured" in show(str(tmp_path))


def test_a_window_that_was_cut_off_is_shown_with_what_it_had(tmp_path: Path) -> None:
    arms = (Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.SEQUENTIAL, Mode.OVERLAPPED)
    write_record(tmp_path, blocks=tuple(TimedBlock(arm, block, (100.0, 101.0)) for block, arm in enumerate(arms)))
    output = show(str(tmp_path))
    assert "one unfinished window" in output
    assert "cut off after 4 timed blocks" in output


def test_a_missing_profile_is_said_in_words(tmp_path: Path) -> None:
    write_record(tmp_path, window_report(profiled=()))
    assert "not measured" in show(str(tmp_path))


def test_a_control_run_gives_no_verdict(tmp_path: Path) -> None:
    write_record(tmp_path, control=True)
    assert "worth it" not in show(str(tmp_path))


def test_json_holds_the_figures_with_their_intervals(tmp_path: Path) -> None:
    write_record(tmp_path, window_report())
    found = json.loads(show(str(tmp_path), "--json"))
    assert set(found["figures"]) == {figure.name for figure in FIGURES}
    speedup = found["figures"]["speedup_vs_sequential"]
    assert speedup["ci_low"] < speedup["value"] < speedup["ci_high"]


@pytest.mark.parametrize(
    "content", ["", "no json\n", '{"record": "window"}\n', '{"record": "run", "schema_version": 99}\n']
)
def test_what_is_no_record_gives_one_line_that_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "overlap.jsonl").write_text(content)
    result = CliRunner().invoke(main, ["show", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


def test_a_missing_folder_gives_one_line_that_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["show", str(tmp_path / "none")])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
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
    result = CliRunner().invoke(main, ["demo", option, value])
    assert result.exit_code == 2
    assert option in result.output
    assert said in result.output


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pytorch", "lightning"])
def test_demo_measures_all_five_equations_with_intervals(tmp_path: Path, framework: str) -> None:
    if framework == "lightning":
        pytest.importorskip("lightning")
    command = [
        sys.executable, "-m", "overlap_callbacks", "demo", "--framework", framework, "--run-dir", str(tmp_path / "run"),
        "--steps", "95", "--layers", "2", "--hidden", "128", "--bucket-mb", "0.2", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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
    (window,) = record.read(tmp_path / "run").valid_windows
    assert window.ranks == (0, 1)
    # Measured from the profile: what is left of overlap in sequential steps, and that there was some in the others.
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05
    assert window.overlap_ratio is not None
    assert window.overlap_ratio.value > 0.05
    assert window.collectives[0].isolated_ms is not None
    assert 0 < window.collectives[0].isolated_ms < window.e2e_sequential_ms.value
