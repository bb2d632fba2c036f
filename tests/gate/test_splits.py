"""What an all-to-all sends to each rank, from its call. Gloo refuses uneven lists, so no CPU job has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap_callbacks.gate.collectives import operator_specs


def splits(name: str, *args: Any) -> Any:
    (spec,) = [spec for spec in operator_specs() if spec.name == name]
    return spec.splits(args) if spec.splits is not None else "does not tell"


def rows(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(length, 4) for length in lengths]


def test_lists_of_tensors_have_their_sizes_as_splits() -> None:
    # Elements: rows of four.
    assert splits("alltoall_", rows(3, 1), rows(2, 5), None) == ([12, 4], [8, 20])
    assert splits("alltoall_", rows(3, 0), rows(2, 2), None) == ([12, 0], [8, 8])
    assert splits("alltoall_", rows(2, 2), rows(2, 2), None) is None
    assert splits("alltoall_", [], [], None) is None


def test_one_tensor_has_the_given_sizes_as_splits() -> None:
    tensor = torch.zeros(4)
    assert splits("alltoall_base_", tensor, tensor, None, [1, 3], [2, 2]) == ([1, 3], [2, 2])
    assert splits("alltoall_base_", tensor, tensor, None, [], []) is None


@pytest.mark.parametrize("name", ["allreduce_", "send", "allgather_"])
def test_no_other_operator_has_splits(name: str) -> None:
    assert splits(name) == "does not tell"
