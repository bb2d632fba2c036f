"""What a record says of arms: in the terminal, as JSON, on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.arms import arm_summaries
from overlap_callbacks.analysis.results.decision import Decision, LeftOut, Why, Winner
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import Pooling
from overlap_callbacks.cli import main
from overlap_callbacks.report import page
from overlap_callbacks.report.record import read
from overlap_callbacks.report.views.arms import arms
from overlap_callbacks.report.views.elements import Table
from overlap_callbacks.sinks import JsonlSink
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info, window


def record_of(folder: Path, *, sequential: bool = True) -> Path:
    sink = JsonlSink(folder)
    sink.open(run_info())
    for number in range(2 if sequential else 0):
        sink.log(window(number))
    for number in (2, 3, 4):
        sink.log_arm(arm_window(number, power=True))
    sink.log_arm(arm_window(5, "allow_tf32", equal_results=False))
    sink.log_arm(msgspec.structs.replace(arm_window(6), complete=False))
    sink.close()
    return folder


def test_arms_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    arms = read(record_of(tmp_path)).arms
    assert arms[0] == arm_window(2, power=True)
    assert [report.arm.name for report in arms] == [*["prefetch_2_2"] * 3, "allow_tf32", "prefetch_2_2"]


def test_arms_are_pooled_over_the_windows_that_count_the_best_first(tmp_path: Path) -> None:
    record = read(record_of(tmp_path))
    rows = arm_summaries(record.summary, record.arms)
    assert {row.arm.name: row.num_windows for row in rows} == {"prefetch_2_2": 3, "allow_tf32": 1, "sequential": 2}
    values = [row.speedup.value for row in rows if row.speedup is not None]
    assert values == sorted(values, reverse=True)
    (prefetch,) = [row for row in rows if row.arm.name == "prefetch_2_2"]
    assert prefetch.speedup is not None
    assert prefetch.speedup.value == pytest.approx(412 / 468 - 1, abs=0.01)
    assert prefetch.device["peak_memory_bytes"] == 5 * 2**30
    assert prefetch.device["configured_peak_memory_bytes"] == 3 * 2**30
    assert prefetch.device["configured_energy_per_step_j"] is not None
    assert {name: type(value) for name, value in prefetch.device.items() if name.endswith("_bytes")} == {
        "peak_memory_bytes": int, "configured_peak_memory_bytes": int,
    }  # fmt: skip
    # Sequential steps as an arm: the speed-up of overlap with the sign turned. Three arms hold together at all looks.
    (sequential,) = [row for row in rows if row.arm.name == "sequential"]
    overlap = record.summary.pooled(Pooling(all_looks=True, confidence=1 - 0.05 / 3))["speedup_vs_sequential"]
    plain = record.pooled()["speedup_vs_sequential"]
    assert overlap.ci_low < plain.ci_low < plain.ci_high < overlap.ci_high
    assert sequential.speedup is not None
    assert (1 + sequential.speedup.value) * (1 + overlap.value) == pytest.approx(1)
    assert overlap.ci_high is not None
    assert sequential.speedup.ci_low == pytest.approx(1 / (1 + overlap.ci_high) - 1)


def test_the_terminal_and_json_show_arms(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["show", str(record_of(tmp_path)), "--all"]).output
    assert "The job with one thing turned, and as configured" in shown
    assert "prefetch_2_2" in shown
    assert "Intervals are valid however often you look, and for all arms together." in " ".join(shown.split())
    assert "allow_tf32 changes results" in shown
    head = shown.partition("With the arm, and as configured")[2].partition("prefetch_2_2")[0]
    assert {"exposed", "comm", "energy", "memory"} <= set(re.findall(r"\w+", head))  # in 80 columns
    arms = json.loads(CliRunner().invoke(main, ["show", str(tmp_path), "--json"]).stdout)["arms"]
    assert {arm["arm"] for arm in arms} == {"prefetch_2_2", "allow_tf32", "sequential"}
    (prefetch,) = [arm for arm in arms if arm["arm"] == "prefetch_2_2"]
    assert [row["counts"] for row in prefetch["by_window"]] == [True, True, True, False]
    assert prefetch["figures"]["speedup"]["num_blocks"] == 3


def test_the_page_shows_arms(tmp_path: Path) -> None:
    content = page([read(record_of(tmp_path))])
    assert "What would a switch change?" in content
    assert "allow_tf32 changes results" in content


def test_a_run_of_arms_alone_does_not_say_that_nothing_was_measured(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["show", str(record_of(tmp_path, sequential=False))]).output
    assert "No window had sequential steps" in " ".join(shown.split())
    assert "Nothing has been measured" not in shown
    assert "Nothing has been measured" not in page([read(tmp_path)])


def test_a_run_without_arms_says_nothing_of_them(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.open(run_info())
    sink.log(window(0))
    sink.close()
    assert "What would a switch change?" not in CliRunner().invoke(main, ["show", str(tmp_path), "--all"]).output
    assert "What would a switch change?" not in page([read(tmp_path)])


def test_a_decision_is_read_back_and_shown_with_the_arms_that_are_left_out(tmp_path: Path) -> None:
    speedup = Estimate(0.048, 0.031, 0.066, 384, 24)
    decision = Decision(
        window=4, first_step=2000, keeps=True, wrong=0.05, budget=0.005, cost_s=1.0, training_s=400.0,
        best=Winner("prefetch_2_2", 4, 24, speedup, "turn_on()"), left=("prefetch_2_2",),
        left_out=(LeftOut("no_reshard", 3, Why.BEHIND, 5, speedup, "prefetch_2_2"),),
    )  # fmt: skip
    record_of(tmp_path)
    sink = JsonlSink(tmp_path)
    sink.open(run_info())
    sink.log_arm(arm_window(2))
    sink.decision(decision)
    sink.close()
    record = read(tmp_path)
    assert record.decision == decision
    (section,) = arms(record)
    assert "prefetch_2_2 is turned on between windows, as the budget allows" in section.answer
    assert "turn_on()" in section.answer
    (table,) = [block for block in section.blocks if isinstance(block, Table) and block.title == "No longer measured"]
    assert [cell.text for cell in table.rows[0]][:2] == ["no_reshard", "slower than prefetch_2_2"]
