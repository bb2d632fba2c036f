"""Gradients of one repetition against those of another, where they lie: nothing is waited for that training would not.

They are read on the current stream right after the repetition has returned, as an optimizer would read them. A wait
longer than that would hide a race.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overlap_callbacks.monitor.race.held_state import bits
from overlap_callbacks.monitor.race.repeatable import local

# Of a gradient that was there in one repetition and not in the other, all elements differ.
_Gradients = Mapping[str, "torch.Tensor | None"]


class Reference:
    """A copy of the gradients of one repetition, for each of the parameters.

    Args:
        parameters: by name; room for their gradients is taken at once.

    Attributes:
        held_bytes: of the copy.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        trained = {name: local(parameter) for name, parameter in parameters.items() if parameter.requires_grad}
        self._room: dict[str, torch.Tensor | None] = {n: torch.empty_like(part) for n, part in trained.items()}
        self._copies: dict[str, torch.Tensor | None] = {}
        self.held_bytes = sum([room.nbytes for room in self._room.values() if room is not None])

    def keep(self, gradients: _Gradients) -> None:
        """Copy these gradients."""
        for name, gradient in gradients.items():
            if gradient is None:
                self._copies[name] = None
                continue
            part = local(gradient)
            room = self._room.get(name)
            if room is not None and part.layout is torch.strided and _alike(part, room):
                self._copies[name] = room.copy_(part)
            else:
                self._copies[name] = part.clone()

    def count_differing(self, gradients: _Gradients) -> dict[str, torch.Tensor | int]:
        """How many elements of each gradient differ from the copy's, by name; a tensor where only the device knows."""
        found: dict[str, torch.Tensor | int] = {}
        for name in dict.fromkeys([*self._copies, *gradients]):
            copy, gradient = self._copies.get(name), gradients.get(name)
            if copy is None and gradient is None:
                continue
            if copy is None or gradient is None:
                there = gradient if copy is None else copy
                assert there is not None
                found[name] = local(there).numel()
                continue
            part = local(gradient)
            if not _alike(part, copy):
                found[name] = max(part.numel(), copy.numel())
            else:
                one, other = bits(part), bits(copy)
                # On a host, to compare is faster than to count.
                same = one.device.type == "cpu" and torch.equal(one, other)
                found[name] = 0 if same else torch.ne(one, other).sum()
        return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def amounts(counted: Mapping[str, torch.Tensor | int]) -> dict[str, int]:
    """Counts that are not zero, by name; waits for the device."""
    known = {name: int(amount) for name, amount in counted.items()}
    return {name: amount for name, amount in known.items() if amount}
