"""A figure, and one value of it. ``overlap_callbacks.analysis.results.catalogue`` declares them all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from overlap_callbacks.analysis.results.estimate import Estimate, Spread

# Suffixes of a figure's key for values other than the figure itself.
BOUNDS = ("ci_low", "ci_high", "rank_low", "rank_high")
# The aggregates of a figure that are meaningful over a run.
ALL, LAST, HIGHEST, LOWEST, SHARE = "min,max,mean,last", "last", "max,last", "min,last", "mean,last"
_PLACEHOLDER = re.compile(r"\{(\w+)\}_?")


# Mean times that figures are made of: of timed steps of each mode, and of profiled ones.
STEP, SEQ, OV, ISO = range(4)


# Fractions from here on are percentages.
_PERCENT = 2.0


def meant(percent: float) -> str:
    """What a percentage is as a fraction, as a question; empty if it cannot be one."""
    share = f"{percent / 100:.2f}" if round(percent, 9) == int(percent) else f"{percent / 100:g}"
    return f"; did you mean {share}?" if abs(percent) <= 100 else ""


class Formula(NamedTuple):
    """A figure as a function of mean times of timed and profiled steps: ``STEP``, ``SEQ``, ... of the catalogue."""

    samples: tuple[int, ...]
    of: Callable[..., float]


class Figure(NamedTuple):
    """Everything about a figure except its value.

    Attributes:
        key: of its metric: a section, a slash and its name, with a placeholder for each label, as in
            ``power/{mode}_avg_w``.
        unit: ``ms``, ``fraction``, ``W``, ...; empty for flags and plain numbers.
        short_label: label if its definition is not nearby; empty if that is ``label``.
        part_label: label below the figure that it is a part of; empty if it is not a part.
        of: reads its value from what measured it; None for the attribute or item of its name.
        formula: its definition by mean times; None if it is measured otherwise.
        compares: whether it depends on sequential steps, and so is meaningless in an invalid window.
        signed: whether it is a relative change, shown with its sign; other fractions are shares.
        less_is_worse: whether a limit on it is passed from above.
        log: whether its interval is symmetric on a logarithmic scale.
        detail: whether a summary omits it.
        card: whether a small card shows it too.
        optional: whether most jobs lack it, so that a summary does not report it as not measured.
        between: its minimum and maximum, if its unit and sign do not imply them.
        aggregate: its aggregates over a run, if its unit does not imply them.
    """

    key: str
    unit: str
    meaning: str
    label: str = ""
    short_label: str = ""
    part_label: str = ""
    of: Callable[[Any], float | Estimate | None] | None = None
    formula: Formula | None = None
    compares: bool = False
    signed: bool = False
    less_is_worse: bool = False
    log: bool = False
    detail: bool = False
    card: bool = False
    optional: bool = False
    between: tuple[float, float] | None = None
    aggregate: str = ""

    @property
    def section(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        """Its key without section and labels; for a headline figure, the field of the report."""
        return _PLACEHOLDER.sub("", self.key.partition("/")[2])

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(_PLACEHOLDER.findall(self.key))

    @property
    def general_key(self) -> str:
        """Its key with ``<mode>`` for any mode, and so on."""
        return self.key.replace("{", "<").replace("}", ">")

    @property
    def defined(self) -> Formula:
        assert self.formula is not None
        return self.formula

    @property
    def of_sequential(self) -> bool:
        """Whether sequential steps are part of it: in a control run these are steps of the other side."""
        return self.compares or (self.formula is not None and not {SEQ, ISO}.isdisjoint(self.formula.samples))

    @property
    def bounds(self) -> tuple[float, float]:
        """Its minimum and maximum: times from 0, shares from 0 to 1, changes from -1."""
        if self.between is not None:
            return self.between
        if self.unit != "fraction":
            return 0.0, math.inf
        return (-1.0, math.inf) if self.signed else (0.0, 1.0)

    def most(self, step: Estimate | None) -> float | None:
        """The most that it can be as a part of a step, which may be none of it; None if it is not such a part."""
        return step.value if self.unit == "ms" and not self.log and step is not None else None

    def refusal(self, limit: float) -> str:
        """Why a number cannot be a limit on it, and what was probably meant; empty if it can.

        A fraction of ``_PERCENT`` or more is a percentage: no share exceeds 1, and no job takes three times as long.
        """
        low, high = self.bounds
        if low <= limit <= high and (self.unit != "fraction" or abs(limit) < _PERCENT):
            return ""
        lowest = f"{low:g}" if math.isfinite(low) else f"above -{_PERCENT:g}"
        if self.unit != "fraction":
            return f"must not be below {lowest}, got {limit:g}"
        highest = f"{high:g}" if math.isfinite(high) else f"below {_PERCENT:g}"
        return f"must be from {lowest} to {highest}, got {limit:g}{meant(limit) if limit > 0 or low < 0 else ''}"

    @property
    def aggregates(self) -> str:
        """Its aggregates over a run.

        Figures have all four: a run is judged by its mean and by its worst window, and the last window shows the
        current state. A number that cannot be averaged (the bytes of a step) has its last value.
        """
        return self.aggregate or (LAST if self.unit in ("bytes", "messages", "") else ALL)

    @property
    def short(self) -> str:
        return self.short_label or self.label or self.name.replace("_", " ")

    @property
    def title(self) -> str:
        return self.short[0].upper() + self.short[1:]

    def value(self, part: Any) -> Any:
        """The figure in ``part`` of a report: a number, an estimate, a spread over ranks, or None."""
        if self.of is not None:
            return self.of(part)
        return part.get(self.name) if isinstance(part, Mapping) else getattr(part, self.name)

    def number(self, part: Any) -> float | None:
        found = self.value(part)
        return found.value if isinstance(found, Estimate) else found


class Value(NamedTuple):
    """One number of a report.

    ``labels`` distinguish it from other values of the figure; they come from the job, with any characters. ``bound`` is
    one of ``BOUNDS``, or empty for the figure itself.
    """

    figure: Figure
    number: float
    labels: Mapping[str, str]
    bound: str = ""

    @property
    def key(self) -> str:
        return self.key_with(self.labels)

    def key_with(self, labels: Mapping[str, str]) -> str:
        key = self.figure.key.format(**labels) if labels else self.figure.key
        return f"{key}_{self.bound}" if self.bound else key

    @property
    def aggregates(self) -> str:
        """The meaningful aggregates over a run: for an interval's end only the last."""
        if self.bound.startswith("ci"):
            return LAST
        return {"rank_low": LOWEST, "rank_high": HIGHEST}.get(self.bound) or self.figure.aggregates


class Family(NamedTuple):
    """Figures of the same part of a report.

    ``parts`` yields these parts, each with its labels; none if it was not measured, or is meaningless.
    """

    parts: Callable[[Any], Iterable[tuple[Mapping[str, str], Any]]]
    figures: tuple[Figure, ...]

    def values(self, report: Any) -> Iterator[Value]:
        for labels, part in self.parts(report):
            for figure in self.figures:
                if report.compared or not (figure.of_sequential if report.control else figure.compares):
                    yield from values_of(figure, figure.value(part), labels)


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """A report with a field for each of its figures: an ``Estimate``, or None if it was not measured.

    ``with_fields`` makes the base class of one.
    """

    _figures: ClassVar[tuple[Figure, ...]] = ()
    _families: ClassVar[tuple[Family, ...]] = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Estimate | None: ...

    @classmethod
    def with_fields(cls, figures: tuple[Figure, ...], families: tuple[Family, ...]) -> type[Reported]:
        """A base class with a field for each of ``figures``, which are among those of ``families``."""
        fields = [(figure.name, Estimate | None, None) for figure in figures]
        made: type[Any] = msgspec.defstruct(
            "Figures", fields, bases=(cls,), namespace={"_figures": figures, "_families": families}, frozen=True,
            kw_only=True,
        )  # fmt: skip
        return made

    def figures(self) -> dict[str, Estimate]:
        """The measured figures by name, in order."""
        values = ((figure.name, getattr(self, figure.name)) for figure in self._figures)
        return {name: value for name, value in values if value is not None}

    def values(self) -> list[Value]:
        """All measured values, with their meaning and the labels of their keys.

        An invalid window has none that depend on its sequential steps, and a control window has no such steps.
        """
        return [value for family in self._families for value in family.values(self)]

    def metrics(self) -> dict[str, float]:
        """The values as flat metrics, with the names used by every sink; missing figures have no key."""
        return {value.key: value.number for value in self.values()}


def values_of(figure: Figure, found: Any, labels: Mapping[str, str] | None = None) -> Iterator[Value]:
    """The values of a figure: an estimate and the ends of its interval, or the extremes of a spread; none for None."""
    numbers: dict[str, float | None] = {}
    if isinstance(found, Spread):
        numbers = {"rank_low": found.low, "rank_high": found.high}
    elif isinstance(found, Estimate):
        ends = (found.ci_low, found.ci_high) if None not in (found.ci_low, found.ci_high) else (None, None)
        numbers = {"": found.value, "ci_low": ends[0], "ci_high": ends[1]}
    elif found is not None:
        numbers = {"": float(found)}
    for bound, number in numbers.items():
        if number is not None:
            yield Value(figure, number, labels or {}, bound)
