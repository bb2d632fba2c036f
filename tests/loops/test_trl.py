"""TRL's ``SFTTrainer`` and ``DPOTrainer`` on two Gloo ranks, with ``OverlapCallback`` as with any Trainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.loops.harness import compare, expect_measured
from tests.loops.trl_loops import dpo, sft

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("loop", [sft, dpo])
def test_trl(loop: Any, tmp_path: Path) -> None:
    expect_measured(compare(loop, tmp_path / "run", str(tmp_path / "out")))
