"""Goodput: which share of a run is spent in steps, and which waits for input, evaluates, saves, restarts. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.step_vectors import CHECKPOINT, EVALUATION, FORWARD, INPUT, PAUSED, StepVectors

# Share of a step from which a job is called input-bound, and the steps that this takes.
INPUT_BOUND, _LEAST_STEPS = 0.2, 3
_PARTS = (INPUT, EVALUATION, CHECKPOINT, PAUSED)


class Spent:
    """Adds up the steps of rank 0."""

    def __init__(self) -> None:
        self._last_step = -1
        self._ns = np.zeros(len(_PARTS), dtype=np.int64)
        self._total_ns = 0
        self._tells_input = False

    def add(self, vectors: StepVectors) -> None:
        """Add the steps that are new. Where some are lost, their time is in none of the parts."""
        back = len(vectors) and vectors.steps[-1] < self._last_step
        new = vectors.where((vectors.steps > (-1 if back else self._last_step)) & (vectors.parts_ns[:, 0] >= 0))
        if len(new):
            self._last_step = int(new.steps[-1])
            self._ns += new.parts_ns[:, _PARTS].sum(axis=0)
            self._total_ns += int(new.step_ns.sum())
            self._tells_input |= bool(new.parts_ns[:, FORWARD].any())

    def goodput(self, now_s: float, measuring_s: float) -> Goodput:
        """Where the time went until now, given what windows cost."""
        input_s, evaluation_s, checkpoint_s, paused_s = (self._ns / 1e9).tolist()
        total_s = self._total_ns / 1e9
        measuring_s = min(measuring_s, total_s - input_s - evaluation_s - checkpoint_s - paused_s)
        return Goodput(
            begun_s=now_s - total_s,
            total_s=total_s,
            steps_s=total_s - input_s - evaluation_s - checkpoint_s - paused_s - measuring_s,
            input_s=input_s if self._tells_input else None,
            evaluation_s=evaluation_s,
            checkpoint_s=checkpoint_s,
            paused_s=paused_s,
            measuring_s=measuring_s,
        )


def shares(starts: Sequence[Goodput]) -> dict[str, float]:
    """By name, the shares of a run of several starts. Between two of them it waits for a restart."""
    between_s = [max(0.0, b.begun_s - a.begun_s - a.total_s) for a, b in itertools.pairwise(starts)]
    times_s = {
        "steps": math.fsum([start.steps_s for start in starts]),
        "input": math.fsum([start.input_s or 0.0 for start in starts]),
        "evaluation": math.fsum([start.evaluation_s for start in starts]),
        "checkpoint": math.fsum([start.checkpoint_s for start in starts]),
        "paused": math.fsum([start.paused_s for start in starts]),
        "restart": math.fsum(between_s),
        "measuring": math.fsum([start.measuring_s for start in starts]),
    }
    total_s = math.fsum(times_s.values())
    return {name: time_s / total_s for name, time_s in times_s.items()} if total_s > 0 else {}


_NAMES = {
    "input": "input", "evaluation": "evaluation", "checkpoint": "checkpoints", "paused": "pauses",
    "restart": "waiting for a restart", "measuring": "measuring as charged to max_overhead",
}  # fmt: skip


def goodput_in_words(starts: Sequence[Goodput], style: Style = PLAIN) -> str:
    """E.g. ``91.2% of 3 h in steps; input 5.1%, evaluation 2%``; empty if nothing is known."""
    of_run = shares(starts)
    if not of_run:
        return ""
    others = [f"{name} {style.percent(of_run[key])}" for key, name in _NAMES.items() if of_run[key] > 0]
    text = f"{style.percent(of_run['steps'])} in steps" + "".join([f", {other}" for other in others])
    return text if all(start.input_s is not None for start in starts) else f"{text}; input is within the steps"


def goodput_sentence(starts: Sequence[Goodput], style: Style = PLAIN) -> str:
    """As a sentence; empty if nothing is known."""
    words = goodput_in_words(starts, style)
    return f"Goodput, of all time since the first step: {words}." if words else ""


def input_bound(vectors: StepVectors) -> str:
    """Whether a job waits for input, from its first steps, as a sentence; empty if it does not, or is not known."""
    known = vectors.where(vectors.parts_ns[:, 0] >= 0)
    known = known.where(slice(len(known) // 2, None))  # the first ones build what later ones reuse
    if len(known) < _LEAST_STEPS or not known.parts_ns[:, FORWARD].any():
        return ""
    input_ms, step_ms = (float(np.median(ns)) / 1e6 for ns in (known.parts_ns[:, INPUT], known.step_ns))
    if step_ms <= 0 or input_ms < INPUT_BOUND * step_ms:
        return ""
    share = PLAIN.percent(input_ms / step_ms)
    return (
        f"the job waits for input: {PLAIN.quantity(input_ms, 'ms')} of a step of {PLAIN.quantity(step_ms, 'ms')} "
        f"({share}) on rank 0, median of {len(known)} steps; try more loader workers or prefetching"
    )
