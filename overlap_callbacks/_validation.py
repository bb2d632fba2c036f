"""Checks of the user's arguments. Every message names the parameter, the value and what is allowed.

All raise TypeError for a wrong type, ValueError for a value that is out of range or not among those allowed.
"""

from __future__ import annotations

import difflib
import numbers
import operator
from typing import Any

# No larger whole number is exact in every reader of JSON; and no wait of a thread may be longer than these seconds.
_MOST, _MOST_S = 2**53, 1e9


def count(name: str, value: Any, *, minimum: int, maximum: int = _MOST) -> int:
    """Return ``value`` as an int of at least ``minimum`` and at most ``maximum``.

    Rejects booleans and floats: ``repeats=True`` and ``repeats=2.0`` are mistakes, not counts. Accepts integer types of
    other libraries (``numpy.int64``).
    """
    try:
        # NumPy before 2.3 and torch accept their booleans as indices.
        if isinstance(value, bool) or _is_foreign_boolean(value):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number of at least {minimum}, got {value!r} (a {type(value).__name__})"
        ) from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def _is_foreign_boolean(value: Any) -> bool:
    """Whether it is a boolean of NumPy's or torch's, by its dtype: without importing either."""
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool") and not getattr(value, "ndim", 0)


def flag(name: str, value: Any) -> bool:
    if not (isinstance(value, bool) or _is_foreign_boolean(value)):
        raise TypeError(f"{name} must be True or False, got {value!r} (a {type(value).__name__})")
    return bool(value)


def plain(value: Any) -> Any:
    """A number, boolean or text of another library as Python's own type, which JSON takes; anything else unchanged."""
    if isinstance(value, bool) or _is_foreign_boolean(value):
        return bool(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return str.__str__(value) if isinstance(value, str) else value


def fraction(name: str, value: Any) -> float:
    """Return ``value`` as a fraction above 0 and at most 1."""
    number = _real(name, value, "a fraction above 0 and at most 1")
    if not 0 < number <= 1:
        hint = f"; did you mean {number / 100:g}?" if 1 < number <= 100 else ""
        raise ValueError(f"{name} must be a fraction above 0 and at most 1, got {value!r}{hint}")
    return number


def real(name: str, value: Any) -> float:
    """Return ``value`` as a finite number."""
    number = _real(name, value, "a number")
    if not abs(number) < float("inf"):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """Return ``value`` as a positive, finite number."""
    return _finite(name, value, "number")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(str(value).lower(), allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return allowed[allowed.index(value)]


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return ``value`` as a positive number of seconds that a wait may last; with ``zero``, 0 is allowed too."""
    number = _finite(name, value, "number of seconds", zero=zero)
    if number > _MOST_S:
        raise ValueError(f"{name} must be at most {_MOST_S:g} seconds, got {value!r}")
    return number


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
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {allowed}, got a whole number too large for one") from None
