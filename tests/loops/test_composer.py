"""Composer's ``Trainer`` on two Gloo ranks: ``attach`` on its optimizer, in a callback of Composer's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.loops.composer_loop import train
from tests.loops.harness import compare, expect_measured

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("composer") is None, reason="Composer is not installed"),
    pytest.mark.slow,
]


def test_composer(tmp_path: Path) -> None:
    expect_measured(compare(train, tmp_path / "run", 4))  # two micro-batches
