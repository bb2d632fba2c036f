"""Keys that any vendor takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from overlap_callbacks.analysis.results.figure import Value
from overlap_callbacks.analysis.safe_text import digest

_MAX_NAME_LENGTH = 100


def fit(values: Iterable[Value]) -> dict[str, Value]:
    """Finite values, under keys of letters, digits and underscores in one section.

    Most keys are like that already. Those that hold a user's name for a group may have any character. To W&B a dot is
    the path into a nested value, and one NaN would spoil its minimum for the rest of the run. Two names that would
    become one, as ``dp-cp`` and ``dp.cp``, get a digest to tell them apart.
    """
    finite = [value for value in values if math.isfinite(value.number)]
    names: dict[tuple[str, str], set[str]] = {}
    for value in finite:
        for name in value.labels.values():
            names.setdefault((value.figure.section, fit_name(name)), set()).add(name)

    def fitted(section: str, name: str) -> str:
        short = fit_name(name)
        return f"{short}_{digest(name)[:8]}" if short != name and len(names[section, short]) > 1 else short

    return {
        value.key_with({label: fitted(value.figure.section, name) for label, name in value.labels.items()}): value
        for value in finite
    }


def fit_name(name: str) -> str:
    """A part of a key: letters, digits and underscores. A long one is cut, and ends with a digest."""
    fitted = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return fitted if len(fitted) <= _MAX_NAME_LENGTH else f"{fitted[: _MAX_NAME_LENGTH - 9]}_{digest(name)[:8]}"
