"""Loops of Accelerate and Lightning, which the campaign runs too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loops import accelerate_loop, lightning_loop
from tests.loops.harness import compare, expect_measured
from tests.toggling import at_night

pytestmark = pytest.mark.slow


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expect_measured(compare(accelerate_loop.train, tmp_path))


@pytest.mark.parametrize("micro_batches", at_night([1, 2], [1]))
def test_lightning(micro_batches: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expect_measured(compare(lightning_loop.train, tmp_path / "run", str(tmp_path / "out"), micro_batches))
