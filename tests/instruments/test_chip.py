from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from overlap_callbacks.analysis.kernels.sm_loss import Chip
from overlap_callbacks.instruments.device import chip_of

STREAM = cast(Any, SimpleNamespace(device=torch.device("cuda", 1)))


@pytest.fixture(autouse=True)
def properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties that torch gives of device 1."""
    known = {torch.device("cuda", 1): SimpleNamespace(multi_processor_count=132, major=9, minor=0)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)


def test_the_chip_is_that_of_the_streams_device() -> None:
    assert chip_of(STREAM) == Chip(132, (9, 0))


def test_a_cpu_has_none() -> None:
    assert chip_of(None) is None


def test_a_device_of_amd_is_not_taken_for_one_of_nvidia_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert chip_of(STREAM) is None
