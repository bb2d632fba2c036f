"""Checks of the user's arguments. Every message names the parameter, the value and what is allowed.

All raise TypeError for a wrong type, ValueError for a value that is out of range or not among those allowed.
"""

from __future__ import annotations

import difflib
import numbers
import operator
from typing import Any


def count(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an int of at least ``minimum`` and at most ``maximum``, if given.

    Rejects booleans and floats: ``repeats=True`` and ``repeats=2.0`` are mistakes, not counts. Accepts integer types of
    other libraries (``numpy.int64``).
    """
    # NumPy before 2.3 and torch accept their booleans as indices. Their dtype reveals them, without importing either.
    is_boolean = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        if is_boolean:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number of at least {minimum}, got {value!r} (a {type(value).__name__})"
        ) from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} (a {type(value).__name__})")
    return value


def fraction(name: str, value: Any) -> float:
    """Return ``value`` as a fraction above 0 and at most 1."""
    number = _real(name, value, "a fraction above 0 and at most 1")
    if not 0 < number <= 1:
        hint = f"; did you mean {number / 100:g}?" if 1 < number <= 100 else ""
        raise ValueError(f"{name} must be a fraction above 0 and at most 1, got {value!r}{hint}")
    return number


def positive(name: str, value: Any) -> float:
    """Return ``value`` as a positive, finite number."""
    return _finite(name, value, "number")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(str(value).lower(), allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return value


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return ``value`` as a positive, finite number of seconds; with ``zero``, 0 is allowed too."""
    return _finite(name, value, "number of seconds", zero=zero)


def _finite(name: str, value: Any, what: str, *, zero: bool = False) -> float:
    number = _real(name, value, f"a {what} of at least 0" if zero else f"a positive {what}")
    if not (0 < number < float("inf") or (zero and number == 0)):
        allowed = f"finite {what} of at least 0" if zero else f"positive, finite {what}"
        raise ValueError(f"{name} must be a {allowed}, got {value!r}")
    return number


def _real(name: str, value: Any, allowed: str) -> float:
    # NumPy's numbers pass because they are registered with numbers.Real. Booleans are integers in Python, but mistakes
    # here.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, got {value!r} (a {type(value).__name__})")
    return float(value)
