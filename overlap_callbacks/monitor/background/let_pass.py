"""What sequential steps let pass as it was, in words for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.let_pass import LetPass
from overlap_callbacks.monitor.window import MeasuredStep

_NOUN = {LetPass.SINGLE_MESSAGE: "messages"}


def what_was_let_pass(steps: Sequence[MeasuredStep]) -> tuple[str, ...]:
    """One sentence for each reason for which counted sequential steps did not serialise collectives."""
    sequential = [step for step in steps if step.counted and step.plan.mode is Mode.SEQUENTIAL]
    total: Counter[LetPass] = Counter()
    for step in sequential:
        total.update(step.log.let_pass)
    sentences = []
    for reason, number in sorted(total.items(), key=lambda item: item[0].name):
        what = f"{round(number / len(sequential), 1):g} {_NOUN.get(reason, 'collectives')}"
        sentences.append(f"{what} a step were not serialised: {reason.value}")
    return tuple(sentences)


def unchecked(sentence: str) -> str:
    """The same where no profile shows what ran beside them."""
    return f"{sentence}; no profile shows whether they ran beside compute"
