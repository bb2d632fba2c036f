"""What is tested for each change of the code, and what at night: steps of changing modes, and variants.

A variant may be left to the night if a test of each change holds the same behaviour: the same collectives in another
combination, the same path with another framework's version of a model, more steps of the same kind. Each adapter's main
form stays: its weights are compared bit by bit for each change.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

# ``.ci/nightly`` sets the variable. A mode that hangs or changes something does so in few steps, as a rule.
TOGGLING_STEPS = 200 if os.environ.get("OVERLAP_LONG_TESTS") else 60


def at_night(names: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which those in ``nightly`` are left to the nightly run."""
    left_out = list(nightly)
    return [pytest.param(name, marks=pytest.mark.nightly) if name in left_out else name for name in names]


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter in those tests of the module that are run; for fixtures that do all in one go."""
    return {
        item.callspec.params[parameter]
        for item in request.session.items
        if item.path == request.path and parameter in getattr(getattr(item, "callspec", None), "params", {})
    }
