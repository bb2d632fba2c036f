"""torchtitan's own ``Trainer`` on two Gloo ranks, with FSDP2, and one line: ``attach(trainer.optimizers)``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.loops.harness import compare, expect_measured
from tests.loops.torchtitan_loop import train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_torchtitan(accumulate: int, tmp_path: Path) -> None:
    expect_measured(compare(train, tmp_path / "run", str(tmp_path / "out"), accumulate, timeout_s=250))
