"""The interface of a sink."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.catalogue import SHORT_KEYS
from overlap_callbacks.analysis.results.causal import CausalWindow
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.figure import Value
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.analysis.safe_text import digest


class Sink:
    """A destination of reports. If it raises, the job continues: the sink is dropped with one message.

    Its methods are called on rank 0 only, one at a time, and never on the training thread. They may block: training
    never waits for them, and the record for two seconds at most (``sinks/fan_out.py``). Import optional packages when
    they are needed, never at the top of a module.
    """

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    # Maximum time in seconds that ``close`` may take; None for the time left when the job ends.
    close_timeout_s: float | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        sink = super().__new__(cls)
        object.__setattr__(sink, "_made_with", (args, options))  # a sink may be a frozen dataclass
        return sink

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a new sink that is not open: a run's files and connections cannot be copied."""
        args, options = self._made_with
        return functools.partial(type(self), *args, **options), ()

    def check(self) -> None:
        """Called before ``open``, at attach; must leave nothing behind. Raises if reports cannot be written."""

    def destination(self) -> str:
        """Where reports go, in some words for the user; empty to say nothing."""
        return ""

    def open(self, run: RunInfo) -> None:
        """Called once, before anything except ``use_record``."""

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        """Called as soon as rank 0 has measured a timed block, so that a crash mid-window loses little."""

    def arm_block(self, window: int, first_step: int, arm: ComparedArm, block: TimedBlock) -> None:
        """Like ``block``, in a window of an arm other than sequential steps."""

    def log_arm(self, report: ArmReport) -> None:
        """Called once for each window of such an arm."""

    def left_out(self, window: int, first_step: int, reason: str) -> None:
        """Called for each window without a report, with the reason."""

    def answer(self, text: str) -> None:
        """Called with the answer of a quick look, once."""

    def log_causal(self, window: CausalWindow) -> None:
        """Called once for each window in which collectives were delayed."""

    def frontier(self, stretch: StepFrontier) -> None:
        """Called with what a stretch of steps was spent on, over all ranks; later in a run stretches are longer."""

    def change(self, change: Change) -> None:
        """Called with each lasting change, and again once a window has shown more of it."""

    def goodput(self, goodput: Goodput) -> None:
        """Called with where the time of this start of the job went, again and again."""

    def decision(self, decision: Decision) -> None:
        """Called with what the job has decided about its arms, when that changes or more is owed, and at the end."""

    def log(self, report: OverlapReport) -> None:
        """Called once for each window."""
        raise NotImplementedError

    def close(self) -> None:
        """Called once, at the end; must be safe to call without ``open``, and twice."""

    def kept_record(self) -> Path | None:
        """Path of the record that this sink writes; None if it writes none.

        A sink that writes the record is called before the others, and directly: it must not block.
        """
        return None

    def use_record(self, path: Path) -> None:
        """Called before ``open`` with the path of the record that another sink writes: for sinks that pass it on."""

    def close_timeout_error(self) -> Exception | None:
        """The error to report if ``close`` did not finish in time; None for a plain warning.

        Called on a different thread than the other methods.
        """
        return None


_MAX_NAME_LENGTH = 100
DETAILS = ("short", "all")


def chosen(values: Iterable[Value], detail: str) -> list[Value]:
    """The values that a tracker gets: those that the catalogue names for all, or with ``"all"`` every one."""
    return [value for value in values if detail == "all" or value.key_with({}) in SHORT_KEYS]


def fit(values: Iterable[Value]) -> dict[str, Value]:
    """Finite values, under keys of letters, digits and underscores in one section.

    Most keys are like that already; those with a user's group name may contain any character. W&B treats a dot as the
    path into a nested value, and one NaN would spoil its minimum for the rest of the run. Two names that would become
    equal, such as ``dp-cp`` and ``dp.cp``, get a digest.
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
    """A part of a key: letters, digits and underscores. A long one is cut, and ends in a digest."""
    fitted = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return fitted if len(fitted) <= _MAX_NAME_LENGTH else f"{fitted[: _MAX_NAME_LENGTH - 9]}_{digest(name)[:8]}"
