"""Checks of what a user passes in. Every message names the parameter, what was given and what is allowed."""

from __future__ import annotations

import numbers
import operator
from typing import Any


def count(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an int of at least ``minimum`` and, where it is given, at most ``maximum``.

    Booleans and floats are refused: ``repeats=True`` and ``repeats=2.0`` are mistakes, not counts. Integer types of
    other libraries (``numpy.int64``) pass.

    Raises:
        TypeError: not a whole number.
        ValueError: smaller than ``minimum``, or larger than ``maximum``.
    """
    # NumPy before 2.3 and torch take their booleans for indices. Their dtype tells, without an import of either.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a whole number of at least {minimum}, got {value!r} (a {kind})")
    try:
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
    """Return ``value`` if it is True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} (a {type(value).__name__})")
    return value


def fraction(name: str, value: Any) -> float:
    """Return ``value`` as a fraction above 0 and at most 1.

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    number = _real(name, value, "a fraction above 0 and at most 1")
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be a fraction above 0 and at most 1, got {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """Return ``value`` as a positive, finite number.

    Raises:
        TypeError: not a number.
        ValueError: not positive, or not finite.
    """
    number = _real(name, value, "a positive number")
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}")
    return number


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the texts that are allowed.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return ``value`` as a positive, finite number of seconds.

    Args:
        name: of the parameter.
        value: what was given.
        zero: whether 0 is allowed too.

    Raises:
        TypeError: not a number.
        ValueError: not positive, or not finite.
    """
    number = _real(name, value, "a number of seconds of at least 0" if zero else "a positive number of seconds")
    if not (0 < number < float("inf") or (zero and number == 0)):
        allowed = "finite number of seconds of at least 0" if zero else "positive, finite number of seconds"
        raise ValueError(f"{name} must be a {allowed}, got {value!r}")
    return number


def _real(name: str, value: Any, allowed: str) -> float:
    # NumPy's numbers pass, because they are registered with numbers.Real. Booleans are integers to Python, but mistakes
    # here.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, got {value!r} (a {type(value).__name__})")
    return float(value)
