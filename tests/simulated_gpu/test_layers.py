"""A slow collective of one layer is named first, and a slow rank instead of a layer: see ``benchmarks/layers.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import layers


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "slow"),
    [
        ("DDP", "layer"),
        ("DDP", "rank"),
        ("FSDP2", "layer"),
        ("FSDP2", "rank"),
        pytest.param("Megatron", "layer", marks=pytest.mark.nightly),
        pytest.param("Megatron", "rank", marks=pytest.mark.nightly),
        pytest.param("ZeRO-3", "layer", marks=pytest.mark.nightly),
        pytest.param("ZeRO-3", "rank", marks=pytest.mark.nightly),
    ],
)
def test_what_is_slow_is_named_first(kind: str, slow: str, tmp_path: Path) -> None:
    (found,) = layers.run(kind, [0], slow, tmp_path)
    if found["host_bound"]:
        pytest.skip("the host was late, so what was drawn is not what is slow")
    assert found["right"], found
