"""A study in words: names of its configurations, its outcome, and caveats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.headline import saving_in_words, slowdown_in_words
from overlap_callbacks.analysis.results.bench import GLOO, LOOPBACK
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.safe_text import clean
from overlap_callbacks.analysis.statistics import inverted_change
from overlap_callbacks.analysis.study import (
    BATCH,
    CLOCK_CAP,
    LONGER,
    PEAK,
    POWER_CAP,
    PRECISION,
    PUBLISHED,
    SLOWDOWN,
    Configuration,
    Overall,
    StudyRow,
    StudyStart,
    overall,
    value_of,
)

NOTHING = "No configuration was measured."
TITLES = {
    SLOWDOWN: "Compute slowdown",
    LONGER: "Sequential steps, longer by",
    PEAK: "Highest power, higher by",
}


def on_cpu(start: StudyStart) -> bool:
    """Whether the ranks trained on a CPU, whose figures are not comparable with those of GPUs."""
    return start.link == GLOO or start.options.get("device") == "cpu"


def verdict(start: StudyStart, rows: Sequence[StudyRow]) -> str:
    """What overlap saves and costs over all configurations, in a few sentences."""
    names = Names(start.configurations)
    longer, slowdown = overall(rows, LONGER), overall(rows, SLOWDOWN)
    if longer is None and slowdown is None:
        return NOTHING if not any(row.figures for row in rows) else f"{NOTHING[:-1]} in both modes."
    sentences = [
        "What overlap saves was not measured: step times of both modes are missing."
        if longer is None
        else saving_in_words(inverted_change(longer.mean), over=_over(longer, names))
        + _most(longer, names, lambda value: value / (1 + value))
        + _costly(rows, longer)
    ]
    if slowdown is not None:
        sentences.append(slowdown_in_words(slowdown.mean, over=_over(slowdown, names)) + _most(slowdown, names, float))
    longer_mean, slower_mean = (PUBLISHED[figure].mean or 0.0 for figure in (LONGER, SLOWDOWN))
    if not on_cpu(start):
        saved = PLAIN.percent(longer_mean / (1 + longer_mean))
        sentences.append(f"The study found {saved} saved, and compute {PLAIN.percent(slower_mean)} slower.")
    return " ".join(sentences)


def _costly(rows: Sequence[StudyRow], longer: Overall) -> str:
    """How many configurations overlap slows down, if the mean says the opposite; else empty."""
    slower = sum([_high(value) < 0 for row in rows if (value := value_of(row, LONGER)) is not None])
    if not slower or longer.number == 1 or _high(longer.mean) < 0:
        return ""
    return f" In {slower} of {longer.number} it costs more than it saves."


def _over(figure: Overall, names: Names) -> str:
    if figure.number == 1:
        return f" in {names.whole(figure.most.configuration)}"
    return f" on average over {count(figure.number, 'configuration')}"


def _most(figure: Overall, names: Names, shown: Callable[[float], float]) -> str:
    """The largest value as ``shown``, if it is clear and the mean is not below zero."""
    if figure.number < 2 or _low(figure.most.estimate) <= 0 or _low(figure.mean) <= 0:
        return ""
    return f" Most: {PLAIN.percent(shown(figure.most.estimate.value))}, {names.whole(figure.most.configuration)}."


# -- caveats


def caveats(start: StudyStart, rows: Sequence[StudyRow]) -> list[str]:
    """What casts doubt on the figures or on comparing them with the study's, as sentences."""
    listed = []
    if on_cpu(start):
        listed.append(
            "These figures are of CPUs. They are not comparable with the study's, which are of GPUs: on a CPU, compute "
            "and Gloo's threads share the cores."
        )
    if start.link == LOOPBACK:
        listed.append(
            "On a loopback link the second rank is a phantom: how long communication takes and what it occupies is "
            "given. What a real link costs needs a second device."
        )
    if start.scale != 1:
        listed.append(
            f"The models were scaled by {start.scale:g}: they are not those of the study, and communication has "
            "another share of a step."
        )
    waiting = len(set(start.configurations) - {row.configuration for row in rows})
    if waiting:
        listed.append(f"{count(waiting, 'configuration')} of {len(start.configurations)} did not run yet.")
    return listed


def where(start: StudyStart, rows: Sequence[StudyRow]) -> str:
    """What ran on which machine, in one line."""
    measured = sum([row.figures is not None for row in rows])
    failed = sum([row.figures is None for row in rows])
    parts = [count(measured, "configuration") + " measured", *([f"{failed} failed"] if failed else [])]
    parts += [f"{count(start.ranks, 'rank')} on {start.device}", f"link: {start.link}"]
    parts += [f"torch {start.versions['torch']}"] if "torch" in start.versions else []
    return ", ".join(parts)


def clear_changes(rows: Sequence[StudyRow], key: str, subject: str, more: str, less: str) -> str:
    """In how many configurations a change is clear; empty for a single one, or without intervals.

    ``subject`` includes the verb, e.g. ``Compute is``; ``more`` and ``less`` precede the numbers, e.g. ``slower in``.
    """
    values = [value for row in rows if (value := value_of(row, key)) is not None]
    if len(values) < 2 or not any(value.ci_low is not None for value in values):
        return ""
    up, down = sum([_low(value) > 0 for value in values]), sum([_high(value) < 0 for value in values])
    parts = [f"{words} {number}" for words, number in ((more, up), (less, down)) if number]
    number = count(len(values), "configuration")
    if not parts:
        return f"Inconclusive in all of {number}."
    open_ = len(values) - up - down
    rest = f" {open_} inconclusive." if open_ else ""
    return f"{subject} clearly {' and '.join(parts)} of {number}.{rest}"


def _low(value: Estimate) -> float:
    return 0.0 if value.ci_low is None else value.ci_low


def _high(value: Estimate) -> float:
    return 0.0 if value.ci_high is None else value.ci_high


# -- names: only what distinguishes a configuration from the others of its study

_STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3", "tp": "TP", "pp": "PP"}
_PRECISIONS = {"fp32": "FP32", "tf32": "TF32", "fp16": "FP16", "bf16": "BF16"}
_MAX_NAME = 40


class Names:
    """Names of the configurations of one study."""

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        self._shows_precision = len({one.precision for one in configurations}) > 1

    def job(self, one: Configuration) -> str:
        """Model and strategy, e.g. ``gpt3-xl FSDP2``."""
        return f"{_clean(one.model)} {strategy_in_words(one.strategy)}"

    def setting(self, one: Configuration, *, without: str = "") -> str:
        """The rest, e.g. ``batch 4, FP16, 400 W``, without the field of one factor."""
        parts = []
        if without != BATCH:
            parts.append(f"batch {one.batch}")
        if self._shows_precision and without != PRECISION:
            parts.append(factor_in_words(one, PRECISION))
        parts += [
            factor_in_words(one, cap)
            for cap, value in ((POWER_CAP, one.power_cap_w), (CLOCK_CAP, one.clock_cap_mhz))
            if value is not None and without != cap
        ]
        return ", ".join(parts)

    def whole(self, one: Configuration, *, without: str = "") -> str:
        """Both, e.g. ``gpt3-xl FSDP2 batch 4, FP16``."""
        return f"{self.job(one)} {self.setting(one, without=without)}".strip()


def strategy_in_words(strategy: str) -> str:
    """E.g. ``ZeRO-3``."""
    return _STRATEGIES.get(strategy, _clean(strategy))


def factor_in_words(one: Configuration, factor: str) -> str:
    """The value of a factor, e.g. ``batch 4``, ``BF16``, ``400 W`` or ``no cap``."""
    if factor == BATCH:
        return f"batch {one.batch}"
    if factor == PRECISION:
        return _PRECISIONS.get(one.precision, _clean(one.precision))
    value, unit = (one.power_cap_w, "W") if factor == POWER_CAP else (one.clock_cap_mhz, "MHz")
    return "no cap" if value is None else f"{value:,.0f} {unit}"


def _clean(name: str) -> str:
    return clean(name, _MAX_NAME)
