"""What is tested for each change of the code, and what at night: steps of changing modes, and variants.

A variant may be left to the night if a test of each change holds the same behaviour: the same collectives in another
combination, the same path with another framework's version of a model, more steps of the same kind. Each adapter's main
form stays: its weights are compared bit by bit for each change.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

# ``.ci/nightly`` sets the variable. A mode that hangs or changes something does so in few steps, as a rule.
TOGGLING_STEPS = 200 if os.environ.get("OVERLAP_LONG_TESTS") else 40


def at_night(names: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which those in ``nightly`` are left to the night. A tuple is several parameters."""
    left_out = list(nightly)
    return [
        pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=pytest.mark.nightly)
        if name in left_out
        else name
        for name in names
    ]


# Values of a parameter ``every``: whether each case is tried, or a sample of them.
SAMPLE_OR_ALL = [pytest.param(False, id="sample"), pytest.param(True, id="all", marks=pytest.mark.nightly)]


def places(content: bytes, *, every: bool) -> list[int]:
    """Places in a file: each, or those at its ends, around the brackets and commas of JSON, and 60 others."""
    if every:
        return [*range(len(content))]
    syntax = {near for place, byte in enumerate(content) if byte in b"[]{}," for near in (place, place + 1)}
    drawn = random.Random(0).sample(range(len(content)), 60)
    ends = (*range(20), *range(len(content) - 12, len(content)))
    return sorted([place for place in syntax.union(drawn, ends) if place < len(content)])


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter in those tests of the module that are run; for fixtures that do all in one go."""
    return {
        item.callspec.params[parameter]
        for item in request.session.items
        if item.path == request.path and parameter in getattr(getattr(item, "callspec", None), "params", {})
    }
