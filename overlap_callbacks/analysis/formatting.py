"""Figures and names as the page writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from overlap_callbacks.analysis.results.report import Estimate

# Names longer than this are cut: the record holds them whole, and a page must stay a page.
MAX_TEXT = 300

# Keeps a figure and its unit on one line.
NBSP = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"

# Control characters, and marks that turn the direction of the text after them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(text: object, most: int = MAX_TEXT) -> str:
    """Any text of a record, as one that a page can show: whatever it holds, it stays text."""
    found = _UNPRINTABLE.sub("\ufffd", str(text))
    return found if len(found) <= most else f"{found[: most - 1]}…"


def sentence(text: str) -> str:
    """A sentence that was made for the terminal, with true minus signs."""
    return clean(re.sub(r"(?<!\w)-(?=\d)", MINUS, text), 2000)


def number(value: float, digits: int) -> str:
    """With separators of thousands and a true minus sign; never a negative zero."""
    text = f"{value:,.{digits}f}"
    return text.replace("-", MINUS) if float(text.replace(",", "")) else text.replace("-", "")


def milliseconds(value: float, *, signed: bool = False) -> str:
    """E.g. ``12.34 ms``: four digits or so, whatever the size."""
    return _signed(number(value, _digits(value)), signed) + NBSP + "ms"


def percent(fraction: float, *, signed: bool = False) -> str:
    """E.g. ``+6.2%``."""
    text = number(100 * fraction, 1 if abs(fraction) < 10 else 0)
    return _signed(text, signed) + "%"


def quantity(value: float, unit: str, *, signed: bool = False) -> str:
    """A figure in its unit; ``fraction`` is shown in percent."""
    if unit == "fraction":
        return percent(value, signed=signed)
    if unit == "ms":
        return milliseconds(value, signed=signed)
    return f"{_signed(number(value, _digits(value)), signed)}{NBSP}{unit}"


def interval(figure: Estimate, unit: str, *, signed: bool = False) -> str:
    """Its 95 % interval, e.g. ``5.1% to 7.3%``; empty where there is none."""
    if figure.ci_low is None or figure.ci_high is None:
        return ""
    low, high = (quantity(bound, unit, signed=signed) for bound in (figure.ci_low, figure.ci_high))
    shared = "" if unit == "fraction" else f"{NBSP}{unit}"
    return f"{low.removesuffix(shared)} to {high}"


def may_be_chance(figure: Estimate) -> bool:
    """Whether the interval holds zero."""
    return figure.ci_low is not None and figure.ci_high is not None and figure.ci_low <= 0 <= figure.ci_high


def with_interval(figure: Estimate, unit: str, *, signed: bool = False) -> str:
    """E.g. ``+6.2% (95 % interval +5.1% to +7.3%)``."""
    bounds = interval(figure, unit, signed=signed)
    return quantity(figure.value, unit, signed=signed) + (f" (95 % interval {bounds})" if bounds else "")


def count(amount: int, noun: str) -> str:
    """E.g. ``1 window``, ``2 windows``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


def ranges(numbers: Iterable[int], most: int = 12) -> str:
    """Whole numbers, those that follow each other drawn together: ``0-4, 7``, with a dash."""
    found: list[list[int]] = []
    for value in sorted(set(numbers)):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    parts = [str(low) if low == high else f"{low}{DASH}{high}" for low, high in found[:most]]
    return ", ".join(parts) + (", …" if len(found) > most else "")


def rounded(value: float | None) -> float | None:
    """To six significant digits: more than anything here is known to, and shorter in the page."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _digits(value: float) -> int:
    size = abs(value)
    return 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or not size else 3


def _signed(text: str, signed: bool) -> str:
    """With a plus sign, unless there is a minus or it shows zero."""
    return f"+{text}" if signed and not text.startswith(MINUS) and text.strip("0.") else text


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people, e.g. ``ranks 0, 3``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
