from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap_callbacks.integrations._pytorch_race import ReducedTogether


class Call(SimpleNamespace):
    def __str__(self) -> str:
        return str(self.operator)


def log(*sizes: tuple[str, int, int]) -> Any:
    calls = [Call(operator=operator, bytes_in=bytes_in, bytes_out=bytes_out) for operator, bytes_in, bytes_out in sizes]
    return SimpleNamespace(collectives=calls)


def reduced(number: int, num_places: int, nbytes: int) -> ReducedTogether:
    return ReducedTogether("bucket", [], number, num_places, ("reduce_scatter", "allreduce"), nbytes)


@pytest.mark.parametrize(
    ("number", "num_places", "nbytes", "found"),
    [
        (1, 2, 999, "collective 3 of the step, allreduce_ of 4,000 bytes"),  # as many as places: by its place
        (0, 3, 4000, "collective 3 of the step, allreduce_ of 4,000 bytes"),  # else by what it reads
        (0, 3, 10, "collective 1 of the step, _reduce_scatter_base_ of 20 bytes"),  # or by what it writes
        (0, 3, 8, ""),  # a gather of that size reduces nothing
    ],
)
def test_the_collective_is_found_by_its_place_or_its_size(
    number: int, num_places: int, nbytes: int, found: str
) -> None:
    step = log(
        ("allgather_", 8, 8), ("_reduce_scatter_base_", 20, 10), ("broadcast_", 8, 8), ("allreduce_", 4000, 4000)
    )
    assert reduced(number, num_places, nbytes).collective_in(step) == found


def test_parameters_are_identified_by_identity_not_by_equality() -> None:
    mine: list[int] = []
    other: list[int] = []
    place = ReducedTogether("bucket", [mine], 0, 1, ("allreduce",), 1)
    assert place.holds(mine)
    assert not place.holds(other)
