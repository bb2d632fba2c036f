"""Sizes of messages as text, e.g. ``16MiB``, and bandwidths. Pure."""

from __future__ import annotations

import re

from overlap_callbacks.analysis.formatting import PLAIN, Style, three_digits

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST = 2**40
_RATES = (("GB/s", 1.0), ("MB/s", 1e-3), ("kB/s", 1e-6), ("B/s", 1e-9))


def bytes_of(text: str, option: str) -> int:
    """A size in bytes.

    Args:
        text: e.g. ``8``, ``64KiB``, ``1GB``.
        option: what to call it in an error.

    Raises:
        ValueError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)?\s*", text, re.IGNORECASE)
    unit = _UNITS.get((found[2] or "").upper()) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if not 1 <= size <= _MOST or size != int(size):
        raise ValueError(f"{option} must be whole numbers of bytes such as 8, 64KiB or 1GB, up to 1 TiB; got {text!r}")
    return int(size)


def size_in_words(size: float, space: str = " ") -> str:
    """A size for people: ``16 MiB``, ``1 GB``, ``72 B``."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit and size % unit == 0:
            return f"{size / unit:,.0f}{space}{name}"
    for name, unit in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= unit:
            return f"{size / unit:,.4g}{space}{name}"
    return f"{size:,.0f}{space}B"


def rate_in_words(gb_s: float, style: Style = PLAIN) -> str:
    """A bandwidth for people, with three digits that count: ``7.43 kB/s``, ``1.66 GB/s``.

    A sweep from 8 B on spans six powers of ten: in one unit, zeros would be most of what is read.
    """
    shown = float(f"{gb_s:.3g}")
    name, unit = next(((name, unit) for name, unit in _RATES if shown >= unit), _RATES[-1])
    return f"{three_digits(shown / unit, style)}{style.space}{name}"


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """The powers of two from ``low`` to ``high``; if that is none, ``low`` itself."""
    exponent = max(0, (low - 1).bit_length())
    found = []
    while 2**exponent <= high:
        found.append(2**exponent)
        exponent += 1
    return tuple(found) or (low,)
