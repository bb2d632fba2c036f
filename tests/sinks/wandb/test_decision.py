"""What a job has decided about its arms, and the parts of its steps, in W&B."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks import WandbSink
from overlap_callbacks.analysis.decision_words import decision_in_words
from overlap_callbacks.analysis.results.frontier import HeldUp, StepFrontier
from tests.analysis.test_decision_words import FAST, decision
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info
from tests.sinks.wandb.test_content import summary
from tests.wandb_reader import SETTINGS

wandb = pytest.importorskip("wandb")


def test_the_decision_is_text_in_the_summary(tmp_path: Path) -> None:
    sink = WandbSink(settings=wandb.Settings(**SETTINGS), dir=tmp_path)
    sink.open(run_info())
    sink.log_arm(arm_window(1))
    sink.decision(decision(best=FAST))
    sink.close()
    assert summary(tmp_path)["overlap/decision"] == decision_in_words(decision(best=FAST))


def test_parts_of_steps_are_rows_of_their_own_and_who_holds_others_up_is_text(tmp_path: Path) -> None:
    sink = WandbSink(settings=wandb.Settings(**SETTINGS), dir=tmp_path)
    sink.open(run_info())
    parts = {"input": 128_000_000, "forward": 384_000_000}
    sink.frontier(StepFrontier(0, 127, 128, 2, parts, parts, (HeldUp("input", 1, 64_000_000),)))
    sink.frontier(StepFrontier(128, 255, 0, 2, {}, {}))
    sink.close()
    found = summary(tmp_path)
    assert {key: found[key] for key in found if key.startswith("parts/")} == {
        "parts/input_ms": 1.0,
        "parts/forward_ms": 3.0,
    }
    assert found["overlap/parts"] == (
        "Forward takes 75.0% of a step; rank 1 holds the others up in input, by 0.500 ms a step."
    )
