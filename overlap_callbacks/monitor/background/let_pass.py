"""What sequential steps let pass as it was, in words for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.let_pass import LetPass
from overlap_callbacks.monitor.window import MeasuredStep

# A share of the bytes of a step. A heartbeat between the stages of a pipeline has some bytes.
_LITTLE = 0.01
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


def is_little(steps: Sequence[MeasuredStep]) -> bool:
    """Whether what counted sequential steps let pass is so few of their bytes that it cannot matter."""
    sequential = [step.log for step in steps if step.counted and step.plan.mode is Mode.SEQUENTIAL]
    # Nothing is sent within a group of one rank.
    issued = sum(max(c.bytes_in, c.bytes_out) for log in sequential for c in log.collectives if c.group_size != 1)
    let_pass = sum(log.let_pass_bytes for log in sequential)
    return not let_pass or let_pass < _LITTLE * issued
