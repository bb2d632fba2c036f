"""How to read traffic, in words for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import NO_STAGE, SEVERAL_STAGES, MessageGroup, Sizes

SENT = (
    "Bytes are messages times size: the larger of what a call reads and writes on a rank. Sent "
    "is what ranks put on the "
    "wire if collectives run as rings: of an all-reduce of S bytes on n ranks, each rank sends 2(n-1)/n S."
)


def regularity(num_steps: int, num_alike: int) -> str:
    """Whether the counted steps send what the recorded step sends."""
    if not num_steps:
        return "Whether steps send the same was not measured."
    if num_alike == num_steps:
        return "Every counted step sent the same messages as the recorded step, on every rank."
    return (
        f"Of the counted steps, summed over ranks, {PLAIN.percent(num_alike / num_steps)} sent the same messages as "
        "the recorded step: the figures here are of the recorded step."
    )


def stage_in_words(stage: int) -> str:
    """A stage of a pipeline."""
    return {NO_STAGE: "", SEVERAL_STAGES: "several"}.get(stage, str(stage))


def size_in_words(exponent: int) -> str:
    """The sizes of an entry of a histogram, by their lower bound, e.g. ``64 kiB``."""
    if exponent < 0:
        return "0 B"
    for unit, power in (("GiB", 30), ("MiB", 20), ("kiB", 10)):
        if exponent >= power:
            return f"{2 ** (exponent - power)} {unit}"
    return f"{2**exponent} B"


def kinds_of(groups: Sequence[MessageGroup]) -> list[tuple[str, str, Sizes]]:
    """Sizes of messages by dimension and kind of collective, those with most bytes first.

    Sends and receives tell the same messages: sends count.
    """
    sums: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
    for group in groups:
        if group.operator.startswith("recv"):
            continue
        of_kind = sums.setdefault((group.dimension, collective_of(group.operator)), {})
        for size, number, total in group.sizes:
            known = of_kind.get(size, (0, 0))
            of_kind[size] = known[0] + number, known[1] + total
    found = [
        (dimension, kind, tuple([(size, *amounts) for size, amounts in sorted(sizes.items())]))
        for (dimension, kind), sizes in sums.items()
    ]
    return sorted(found, key=lambda item: (-sum([total for _, _, total in item[2]]), item[0], item[1]))


def crossing_in_words(between: float | None, sent: float, num_hosts: int | None) -> str:
    """How much crosses hosts."""
    if between is None or num_hosts is None:
        return "Which of it crosses hosts is not known."
    if num_hosts == 1:
        return "All of it stays on one host."
    return f"{bytes_in_words(between)} of it, {PLAIN.percent(between / sent if sent else 0.0)}, crosses hosts."
