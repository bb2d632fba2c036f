"""Gradients that a framework reduces together, and which collective of a step's log reduces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.step_log import StepLog


class ReducedTogether:
    """Gradients that are reduced together: those of a bucket, or of a group of sharded parameters.

    Args:
        bucket: what to call them.
        parameters: whose gradients they are.
        number: in the order in which the backward pass reduces them, from 0.
        num_places: how many of the same framework there are.
        words: one of them is in the name of the operator that reduces them.
        nbytes: that it reads or writes on this rank.
    """

    def __init__(
        self, bucket: str, parameters: Sequence[Any], number: int, num_places: int, words: Sequence[str], nbytes: int
    ) -> None:
        self.bucket = bucket
        self._parameters = {id(parameter) for parameter in parameters}
        self._number, self._num_places = number, num_places
        self._words = words
        self._nbytes = nbytes

    def holds(self, parameter: Any) -> bool:
        """Whether the gradient of a parameter is among them."""
        return id(parameter) in self._parameters

    def collective_in(self, log: StepLog) -> str:
        """The collective that reduces them, in words: by its place if each has one, else by its size; empty if none."""
        of_kind = [
            (index, call)
            for index, call in enumerate(log.collectives)
            if any(word in call.operator for word in self._words)
        ]
        if len(of_kind) == self._num_places:
            return _said(*of_kind[self._number])
        by_size = [(index, call) for index, call in of_kind if self._nbytes in (call.bytes_in, call.bytes_out)]
        return _said(*by_size[0]) if by_size else ""


def _said(index: int, call: Collective) -> str:
    return f"collective {index} of the step, {call} of {max(call.bytes_in, call.bytes_out):,} bytes"
