"""Formats figures as text (unit, sign, interval), and makes text from records safe to show.

``PLAIN`` writes for terminals, logs, JSON and W&B, ``PAGE`` for the HTML page. They differ only in characters: a figure
has the same digits everywhere. ``decimals_of`` sets how many; ``page.js`` has the same rule for charts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from overlap_callbacks.analysis.safe_text import clean, printable

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.estimate import Estimate
    from overlap_callbacks.analysis.results.figure import Figure

# Longer names are cut: the record has them in full, but a page must stay readable.
MAX_TEXT = 300

# Keeps a figure and its unit on one line.
NBSP = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"


class Style(msgspec.Struct, frozen=True):
    """How a medium writes figures: minus sign, space between number and unit, and thousands separator."""

    minus: str
    space: str
    thousands: str

    def number(self, value: float, decimals: int) -> str:
        """E.g. ``-1,234.5``; never a negative zero. An integer beyond a float's range is ``inf``."""
        try:
            text = f"{abs(value):,.{decimals}f}"
        except OverflowError:  # only in corrupt records
            text = "inf"
        is_negative = value < 0 and bool(text.strip("0.,"))
        return (self.minus if is_negative else "") + text.replace(",", self.thousands)

    def by_size(self, value: float, unit: str = "") -> str:
        """A number without its unit, with the decimals of ``decimals_of``, e.g. for a column that names the unit."""
        return self.number(value, decimals_of(value, unit))

    def milliseconds(self, value: float) -> str:
        """A trace's time in milliseconds, without its unit; to the microsecond unless it is long."""
        return self.number(value, millisecond_decimals(value))

    def ms(self, value: float) -> str:
        """The same with its unit."""
        return f"{self.milliseconds(value)}{self.space}ms"

    def percent(self, fraction: float, *, signed: bool = False, decimals: int | None = None) -> str:
        """E.g. ``+6.2%``."""
        if decimals is None:
            decimals = decimals_of(fraction, "fraction")
        return self._with_sign(self.number(100 * fraction, decimals), signed) + "%"

    def quantity(self, value: float, unit: str, *, signed: bool = False, decimals: int | None = None) -> str:
        """A value in its unit, e.g. ``12.34 ms``; a ``fraction`` in percent. ``decimals_of`` is the default."""
        if decimals is None:
            decimals = decimals_of(value, unit)
        if unit == "fraction":
            return self.percent(value, signed=signed, decimals=decimals)
        return f"{self._with_sign(self.number(value, decimals), signed)}{self.space}{unit}"

    def share_of_training(self, fraction: float) -> str:
        """The cost of measuring, e.g. ``0.42%``, with two decimals because it should be small."""
        return self.percent(fraction, decimals=2)

    def measuring_cost(self, cost: Estimate) -> str:
        """The cost of measuring, e.g. ``2.10% of training (1.40 to 2.80)`` or ``not resolved (below 4.00%)``."""
        if cost.ci_low is None or cost.ci_high is None:
            return f"{self.share_of_training(cost.value)} of training"
        useful = cost.ci_high <= 1
        if cost.ci_low <= 0:
            below = f" (below {self.share_of_training(max(cost.ci_high, 0.0001))})"
            return f"{NOT_RESOLVED}{below if useful else ''}"
        low, high = self.number(100 * cost.ci_low, 2), self.number(100 * cost.ci_high, 2)
        bounds = f"{low} to {high}" if useful else f"at least {low}"
        return f"{self.share_of_training(cost.value)} of training ({bounds})"

    def shows(self, value: float, unit: str) -> bool:
        """Whether the value is not shown as zero."""
        return any(character in "123456789" for character in self.quantity(value, unit))

    def interval(
        self,
        estimate: Estimate,
        unit: str,
        *,
        signed: bool = False,
        decimals: int | None = None,
        most: float | None = None,
    ) -> str:
        """Its 95% interval as in ``ends``; empty without one.

        One that is too wide to be of use (``says_nothing``) is ``NOT_RESOLVED``; of a clear change the nearer end is
        left.
        """
        shown = self.ends(estimate, unit, signed=signed, decimals=decimals)
        if not says_nothing(estimate, unit, signed=signed, most=most):
            return shown
        return f"at least {shown.partition(' to ')[0]}" if signed and (estimate.ci_low or 0) > 0 else NOT_RESOLVED

    def ends(self, estimate: Estimate, unit: str, *, signed: bool = False, decimals: int | None = None) -> str:
        """The ends of its interval, however wide, e.g. ``5.1% to 7.3%`` or ``11.50 to 12.50 ms``; empty without one.

        Both have the decimals of the value.
        """
        if estimate.ci_low is None or estimate.ci_high is None:
            return ""
        if decimals is None:
            decimals = decimals_of(estimate.value, unit)
        low, high = (
            self.quantity(bound, unit, signed=signed, decimals=decimals)
            for bound in (estimate.ci_low, estimate.ci_high)
        )
        return f"{low.removesuffix(f'{self.space}{unit}')} to {high}"

    def with_interval(self, estimate: Estimate, unit: str, *, signed: bool = False, decimals: int | None = None) -> str:
        """E.g. ``+6.2% (95% interval +5.1% to +7.3%)``."""
        bounds = self.interval(estimate, unit, signed=signed, decimals=decimals)
        value = self.quantity(estimate.value, unit, signed=signed, decimals=decimals)
        return value + (f" (95% interval {bounds})" if bounds else "")

    def in_brackets(self, estimate: Estimate, unit: str, *, signed: bool = False, most: float | None = None) -> str:
        """With its interval, if it has one, e.g. ``+6.2% (+5.1% to +7.3%)``."""
        bounds = self.interval(estimate, unit, signed=signed, most=most)
        return self.quantity(estimate.value, unit, signed=signed) + (f" ({bounds})" if bounds else "")

    def figure(self, figure: Figure, value: float) -> str:
        """A value of a headline figure, with the unit and sign of the catalogue."""
        if figure.name == "measurement_overhead":
            return self.share_of_training(value)
        return self.quantity(value, figure.unit, signed=figure.signed)

    def figure_interval(self, figure: Figure, estimate: Estimate, step: Estimate | None = None) -> str:
        """The 95% interval of a headline figure; empty without one. ``step``: the step time that it may be part of."""
        return self.interval(estimate, figure.unit, signed=figure.signed, most=figure.most(step))

    def _with_sign(self, text: str, signed: bool) -> str:
        """Add a plus sign, unless there is a minus sign or the number shows as zero."""
        return f"+{text}" if signed and not text.startswith(self.minus) and text.strip("0.") else text


# Instead of an interval.
NOT_RESOLVED = "not resolved"
# Intervals are too wide from here on: of a share; of a change, each way; the upper end over the value.
_WIDE_SHARE, _WIDE_CHANGE, _WIDE_RATIO = 0.9, 1.0, 2.0


def says_nothing(estimate: Estimate, unit: str, *, signed: bool = False, most: float | None = None) -> bool:
    """Whether a figure has an interval that is too wide to be of use. No screen prints or draws one.

    So is that of a share which may be nearly anything, of a relative change (``signed``) where even 100 % would not
    show, and of a time, a power or a rate from zero on or beyond twice its value. ``most``: the figure may be zero, and
    its interval is of use up to this.
    """
    low, high = estimate.ci_low, estimate.ci_high
    if low is None or high is None:
        return False
    if unit == "fraction":
        return hides(estimate, abs(estimate.value)) if signed else high - low > _WIDE_SHARE
    if most is not None and low <= 0:
        return high > most
    return low <= 0 or high > _WIDE_RATIO * estimate.value


def hides(estimate: Estimate, largest: float) -> bool:
    """Whether a figure's interval, drawn, would hide values of up to this size."""
    low, high = estimate.ci_low, estimate.ci_high
    return low is not None and high is not None and high - low > 2 * _WIDE_CHANGE * max(1.0, largest)


def useful(estimate: Estimate, unit: str, *, signed: bool = False) -> Estimate:
    """The figure, without an interval that says nothing."""
    wide = says_nothing(estimate, unit, signed=signed)
    return msgspec.structs.replace(estimate, ci_low=None, ci_high=None) if wide else estimate


PLAIN = Style(minus="-", space=" ", thousands="")
PAGE = Style(minus=MINUS, space=NBSP, thousands=",")


def decimals_of(value: float, unit: str = "") -> int:
    """Number of decimals of a value, wherever it is shown.

    Percentages have one. Otherwise about four significant digits, three for power, and integers for a clock: no sensor
    is more precise.
    """
    size = abs(value)
    if unit == "fraction":
        return 1 if size < 10 else 0
    if unit == "MHz":
        return 0
    if unit == "W":
        size *= 10
    return 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or not size else 3


def millisecond_decimals(value: float) -> int:
    """Decimals of a trace's time in milliseconds."""
    return 3 if abs(value) < 100 else 2 if abs(value) < 1000 else 1


def column_decimals(values: Iterable[float]) -> int:
    """Decimals for a column of times in milliseconds, aligned below each other: more if all are short."""
    return 2 if max(map(abs, values), default=0.0) >= 1 else 4


def three_digits(value: float, style: Style = PLAIN) -> str:
    """Three significant digits, whatever the size: a latency of microseconds is a few thousandths of a millisecond."""
    size = abs(value)
    return style.number(value, 0 if size >= 100 or not size else min(9, 2 - math.floor(math.log10(size))))


def change_in_words(fraction: float, more: str, less: str, style: Style = PLAIN) -> str:
    """A relative change without its sign, e.g. ``6.2% longer``."""
    decimals = enough_decimals((fraction,), decimals_of(fraction, "fraction"))
    return f"{style.percent(abs(fraction), decimals=decimals)} {more if fraction >= 0 else less}"


def change_decimals(change: Estimate) -> int:
    """Decimals of a clear change and of its interval: more if an end would show as 0, which it excludes."""
    known = [one for one in (change.value, change.ci_low, change.ci_high) if one is not None]
    return enough_decimals(known, decimals_of(change.value, "fraction"))


def enough_decimals(fractions: Iterable[float], least: int) -> int:
    """Decimals of percentages, ``least`` to 2, with which none shows as 0 that two decimals would show."""
    shown = [100 * abs(one) for one in fractions if abs(one) > 0.00005]
    return next((decimals for decimals in range(least, 2) if all([round(one, decimals) for one in shown])), 2)


def includes_zero(estimate: Estimate) -> bool:
    """Whether the interval includes zero."""
    return estimate.ci_low is not None and estimate.ci_high is not None and estimate.ci_low <= 0 <= estimate.ci_high


CLEAR, WITHIN_NOISE, INCONCLUSIVE = "clear", "within noise", "inconclusive"
# Changes up to this do not matter: an interval that lies entirely this close to zero means no difference.
_NEGLIGIBLE = 0.01
# In sentences, percentages of at least this have no decimals.
_WHOLE = 0.0195


def certainty(change: Estimate) -> str:
    """How certain a relative change is; empty without an interval.

    ``CLEAR`` if its interval excludes zero, ``WITHIN_NOISE`` if all of it is near zero, else ``INCONCLUSIVE``.
    """
    if change.ci_low is None or change.ci_high is None:
        return ""
    if not includes_zero(change):
        return CLEAR
    return WITHIN_NOISE if _furthest(change) <= _NEGLIGIBLE else INCONCLUSIVE


def value_and_certainty(change: Estimate, style: Style) -> tuple[str, str]:
    """A clear change with its sign, and its interval; else how certain it is, and the limit."""
    if certainty(change) != CLEAR:
        return certainty(change) or "unknown", limit_in_words(change, style)
    decimals = change_decimals(change)
    value = style.percent(change.value, signed=True, decimals=decimals)
    return value, style.interval(change, "fraction", signed=True, decimals=decimals)


def certainty_in_words(change: Estimate, style: Style = PLAIN) -> str:
    """``certainty`` and its limit, e.g. ``within noise (no difference above 0.4%)``."""
    state, limit = certainty(change), limit_in_words(change, style)
    return f"{state} ({limit})" if state else limit


def limit_in_words(change: Estimate, style: Style = PLAIN) -> str:
    """The difference ruled out, or that would show: ``no difference above 0.4%``, ``a difference of 5% would show``."""
    state, would_show = certainty(change), what_would_show(change)
    if would_show is None:
        return "too few blocks for an interval"
    if state == WITHIN_NOISE:
        return f"no difference above {at_most_in_words(_furthest(change), style)}"
    if would_show > 1:
        return f"even a difference of {percent_in_words(1.0, style)} would not show"
    return f"a difference of {percent_in_words(would_show, style)} would show"


def percent_in_words(fraction: float, style: Style = PLAIN) -> str:
    """A percentage in a sentence, whole from 2 % on: e.g. ``19%`` or ``0.4%``."""
    return style.percent(fraction, decimals=int(abs(fraction) < _WHOLE))


def at_most_in_words(fraction: float, style: Style = PLAIN) -> str:
    """The same of a bound, rounded up, and never 0."""
    decimals = int(fraction < _WHOLE)
    scale = 100 * 10**decimals
    return style.percent(max(math.ceil(round(scale * fraction, 6)), 1) / scale, decimals=decimals)


def what_would_show(change: Estimate) -> float | None:
    """The smallest true change whose interval would exclude zero, as a rule: half the interval's width."""
    return None if change.ci_low is None or change.ci_high is None else (change.ci_high - change.ci_low) / 2


def none_clear_in_words(changes: Sequence[Estimate]) -> str:
    """How certain it is that none of some points differs, where no change is clear, and what would show."""
    points = "the only point" if len(changes) == 1 else f"all of {count(len(changes), 'point')}"
    unsure = [change for change in changes if certainty(change) != WITHIN_NOISE]
    limits = [limit for change in changes if (limit := what_would_show(change)) is not None]
    if not limits:
        return f"too few blocks for an interval at {points}"
    shows = f"a difference of {at_most_in_words(max(limits))} would show"
    if not unsure:
        return f"no difference at {points}; {shows}"
    where = points if len(unsure) == len(changes) else f"{len(unsure)} of {count(len(changes), 'point')}"
    if len(limits) < len(changes) or min(limits) < max(limits):
        shows = f"a difference of {at_most_in_words(min(limits))} would show at one"
        if len(limits) == len(changes):
            shows += f", of {at_most_in_words(max(limits))} at each"
    return f"inconclusive at {where}; {shows}"


def _furthest(change: Estimate) -> float:
    """The distance from zero of the interval's further end."""
    return max(abs(end) for end in (change.ci_low, change.ci_high) if end is not None)


def listed(names: Sequence[str], max_names: int | None = None) -> str:
    """One or more names in a sentence, e.g. ``a, b and c``; at most ``max_names`` of them."""
    shown = list(names[:max_names])
    left = len(names) - len(shown)
    *others, last = [*shown, f"{left:,} more"] if left else shown
    return f"{', '.join(others)} and {last}" if others else last


def count(amount: int, noun: str) -> str:
    """E.g. ``1 window``, ``2 windows``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


def ranges(numbers: Iterable[int], max_ranges: int = 12) -> str:
    """Integers in ascending order, consecutive ones as a range with a dash, e.g. ``0-4, 7``."""
    runs: list[tuple[int, int]] = []
    for value in sorted(set(numbers)):
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return ranges_in_words(runs, max_ranges)


def ranges_in_words(runs: Sequence[tuple[int, int]], max_ranges: int = 12, *, more: bool = False) -> str:
    """Like ``ranges``, from the first and last number of each range; ``more`` if there are others."""
    shown = [str(low) if low == high else f"{low}{DASH}{high}" for low, high in runs[:max_ranges]]
    return ", ".join(shown) + (", …" if more or len(runs) > max_ranges else "")


def rounded(value: float | None) -> float | None:
    """Round to six significant digits: more than any figure's precision, and shorter on the page."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a sentence, e.g. ``ranks 0, 3``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


# -- text from elsewhere


# A message's code, by which docs/troubleshooting.md lists it; all have the same length.
_CODE = re.compile(r" \[OC\d{3}\]")
_CODE_LENGTH = len(" [OCxxx]")


def shortened(text: str, max_length: int = MAX_TEXT) -> str:
    """Text of limited length, with an ellipsis if it is cut. The code of a message that is cut stays."""
    if len(text) <= max_length:
        return text
    room = max_length - 1 - _CODE_LENGTH
    code = _CODE.search(text, room - _CODE_LENGTH + 1) if room >= _CODE_LENGTH else None
    return f"{text[: max_length - 1]}…" if code is None else f"{text[:room]}…{code.group()}"


def one_line(text: str, max_length: int = MAX_TEXT) -> str:
    """A record's text on one line: so that no name can pass for a line of ours, or fill the terminal."""
    return shortened(clean(text), max_length)


# Width below which names are cut only at the end.
_MIN_CUT = 7


def _shared(name: str, other: str) -> int:
    """Length of the common prefix of two names."""
    pairs = enumerate(zip(name, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(name), len(other)))


def cut(name: str, column: Sequence[str], width: int) -> str:
    """A name cut to at most ``width`` characters.

    The start is kept. If other names in the column share it, the remaining width goes to the text around the first
    character that differs from any of them; otherwise the start takes it all.
    """
    if len(name) <= width:
        return name
    if width < _MIN_CUT:
        return name[: max(width - 1, 0)] + "…"[:width]
    others = [other for other in column if other != name]
    shared = max((_shared(name, other) for other in others), default=0)
    if shared < width - 2:
        return name[: width - 1] + "…"
    head = width // 3
    tail = width - head - 1
    # A few characters before the difference show where it is.
    begin = max(min(shared - min(4, tail - 2), len(name) - tail), head)
    rest = name[begin:]
    return name[:head] + "…" + (rest if len(rest) <= tail else rest[: tail - 1] + "…")


_COMMON_PARTS = re.compile(r"^void |\(anonymous namespace\)::|at::native::|c10::")


def short_kernel_name(name: str) -> str:
    """A kernel's name without the parts common to all of torch's kernels, so that the rest is visible."""
    return _COMMON_PARTS.sub("", name) or name


def page_text(text: object, max_length: int = MAX_TEXT) -> str:
    """A record's text made safe for a page: printable, of limited length, with its line breaks."""
    return shortened(printable(str(text), keep=f"\t\n{NBSP}"), max_length)


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|W|J|MHz|B|[KMGT]iB|GB/s|tokens/s|samples/s)\b)")


def page_sentence(text: str) -> str:
    """A sentence in ``PLAIN`` style for the page, with true minus signs, and no line break before a unit."""
    return page_text(_BEFORE_UNIT.sub(NBSP, re.sub(r"(?<!\w)-(?=\d)", MINUS, text)), 2000)


def one_digit(value: float) -> str:
    """A number with one significant digit: for notes that all ranks should word identically."""
    return f"{float(f'{value:.1g}'):,g}"


def bytes_in_words(number: float) -> str:
    """Bytes in binary units, like sizes everywhere else; e.g. ``1.5 MiB``."""
    unit, size = unit_of(number)
    value = number / size
    return f"{value:.0f} {unit}" if value >= 99.5 or size == 1 else f"{value:.3g} {unit}"


def unit_of(number: float) -> tuple[str, float]:
    """The unit for this many bytes, and the unit's size."""
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if number >= size * 0.9995:
            return unit, size
    return "B", 1.0
