"""What a metric's key says: its unit, and whether it is a figure, a bound of one, a count or a flag."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from overlap_callbacks.analysis.results.bound import Bound
from overlap_callbacks.analysis.results.catalogue import FIGURES, MEASUREMENT_OVERHEAD, power_units
from overlap_callbacks.analysis.results.experts import expert_units
from overlap_callbacks.analysis.results.memory import memory_units
from overlap_callbacks.analysis.results.throughput_metrics import throughput_units
from overlap_callbacks.analysis.safe_text import digest

# What is appended to a figure's key for a value that is not the figure itself.
BOUNDS = ("ci_low", "ci_high", "rank_low", "rank_high")
FLAGS = frozenset(
    {"overlap/valid", "overlap/verified", "overlap/complete", "overlap/control", *(bound.key for bound in Bound)}
)
COUNTS = frozenset({"overlap/ranks_heard"})

_BY_SUFFIX = (("_ms", "ms"), ("_bytes", "bytes"), ("_messages", "messages"), ("_comm_slowdown", "fraction"),
              ("_compute_slowdown", "fraction"), ("_fraction", "fraction"))  # fmt: skip
_MAX_KEY_PART_LENGTH = 100

# Sections whose keys hold a name of the job's, and how such keys end.
NAMED_SECTIONS = {"comm": "collective", "dimension": "dimension"}
_ENDS = (
    "_comm_slowdown",
    "_compute_slowdown",
    "_step_fraction",
    "_exposed_ms",
    "_comm_ms",
    "_busbw_gb_s",
    "_bytes",
    "_messages",
)


class Key(NamedTuple):
    """A metric's key, taken apart.

    Attributes:
        figure: the key without what is appended.
        bound: one of ``BOUNDS``; empty for the figure itself.
        unit: as in ``RunInfo.units``; empty for flags and counts.
    """

    figure: str
    bound: str
    unit: str


def describe(key: str) -> Key:
    """Take a key of ``OverlapReport.metrics()`` apart."""
    bound = next((bound for bound in BOUNDS if key.endswith(f"_{bound}")), "")
    figure = key[: -len(bound) - 1] if bound else key
    return Key(figure, bound, _unit(figure))


def _unit(figure: str) -> str:
    if figure in FLAGS or figure in COUNTS:
        return ""
    known = _units().get(figure)
    return known if known is not None else next((unit for end, unit in _BY_SUFFIX if figure.endswith(end)), "")


@cache
def _units() -> dict[str, str]:
    return {
        **{figure.key: figure.unit for figure in (*FIGURES, MEASUREMENT_OVERHEAD)},
        **power_units(),
        **memory_units(),
        **throughput_units(),
        **expert_units(),
    }


def split(key: str) -> tuple[str, str, str]:
    """Split a key into its section, the job's own name in it (of a group or an operator), and the rest.

    The name is empty where the key holds none.
    """
    section, slash, name = key.partition("/")
    if not slash:
        return "", "", key
    if section in NAMED_SECTIONS:
        figure = describe(name).figure
        for end in _ENDS:
            if figure.endswith(end):
                subject = figure.removesuffix(end)
                return section, subject, name[len(subject) :]
    return section, "", name


def fit(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that any vendor takes: finite values, under keys of letters, digits and underscores in one section.

    Most keys are like that already. Those that hold a user's name for a group may have any character. To W&B a dot is
    the path into a nested value, and one NaN would spoil its minimum for the rest of the run. Two names that would
    become one, as ``dp-cp`` and ``dp.cp``, get a digest to tell them apart.
    """
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    subjects: dict[tuple[str, str], set[str]] = {}
    for key in finite:
        section, subject, _ = split(key)
        subjects.setdefault((section, fit_name(subject)), set()).add(subject)
    fitted_metrics = {}
    for key, value in finite.items():
        section, subject, rest = split(key)
        fitted = fit_name(subject)
        if len(subjects[section, fitted]) > 1 and fitted != subject:
            fitted = f"{fitted}_{digest(subject)[:8]}"
        fitted_metrics[_join(section, f"{fitted}{fit_name(rest)}")] = value
    return fitted_metrics


def fit_name(name: str) -> str:
    """A part of a key: letters, digits and underscores. A long one is cut, and ends with a digest."""
    fitted = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return fitted if len(fitted) <= _MAX_KEY_PART_LENGTH else f"{fitted[: _MAX_KEY_PART_LENGTH - 9]}_{digest(name)[:8]}"


def _join(section: str, name: str) -> str:
    return "/".join(part for part in (fit_name(section), name) if part)
