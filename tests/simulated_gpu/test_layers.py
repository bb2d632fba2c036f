"""A slow collective of one layer is named first, and a slow rank instead of a layer: one run of each framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import layers

RANKS_LOAD = ("deepspeed",)


@pytest.mark.parametrize("slow", ["layer", "rank"])
@pytest.mark.parametrize("kind", layers.FRAMEWORKS)
def test_what_is_slow_is_named_first(kind: str, slow: str, tmp_path: Path) -> None:
    (found,) = layers.run(kind, [0], slow, tmp_path)
    assert found["right"], found
