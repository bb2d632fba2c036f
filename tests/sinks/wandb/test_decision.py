"""What a job has decided about its arms, in W&B."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks import WandbSink
from overlap_callbacks.analysis.decision_words import decision_in_words
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
