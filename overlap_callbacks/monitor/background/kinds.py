"""Kinds of steps: those that issue the same collectives in the same order, over equally many micro-batches.

A generator that trains in every fourth step, a policy that is updated after four steps, local SGD that synchronises now
and then: such jobs have several kinds of steps, whose mix must not differ between the modes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from overlap_callbacks.analysis.design import MAX_KINDS
from overlap_callbacks.analysis.formatting import PLAIN, bytes_in_words, count, listed
from overlap_callbacks.analysis.kernels.step_counts import kernels_of_steps, kinds_by_number
from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.rhythms import every_nth_step
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.schedule import Part
from overlap_callbacks.monitor.window import MeasuredStep

# A step joins a kind that both modes have if its number of collectives differs by at most this share: logging adds a
# few.
_MAX_DEVIATION = 0.25
# Sizes distinguish kinds only if there are at most this many, each with this many steps in both modes: data-dependent
# sizes make many more.
_MOST_SIZES, _LEAST_STEPS = 4, 2
# A kind recurs if at least this many of its steps lie at multiples of one distance.
_LEAST_RECURRENCES = 4


@dataclass(frozen=True)
class StepKinds:
    """The kinds of a window's counted steps."""

    of_steps: Mapping[int, int]  # kind of each counted step that is kept, by step index; 0 is the most common
    left_out: frozenset[int] = frozenset()  # indices of counted steps whose kind occurs in one mode only, or is rare
    notes: tuple[str, ...] = ()  # which kinds there are and which were measured; empty if all steps are of one kind
    names: Mapping[int, str] = field(default_factory=dict)  # what distinguishes each kind, by its number

    def costs(self, timed: Sequence[tuple[int, Mode, float]]) -> tuple[str, ...]:
        """How much longer each other kind takes than the commonest, in words, by kind, mode and ms of each step."""
        times: dict[tuple[int, Mode], list[float]] = defaultdict(list)
        for kind, mode, time_ms in timed:
            times[kind, mode].append(time_ms)
        sentences = []
        for kind in sorted({kind for kind, _ in times} - {0}):
            if all((of, mode) in times for of in (0, kind) for mode in Mode):
                longer_ms = fmean([fmean(times[kind, mode]) - fmean(times[0, mode]) for mode in Mode])
                more = "longer" if longer_ms >= 0 else "less"
                sentences.append(
                    f"a step with {self.names[kind]} takes {PLAIN.quantity(abs(longer_ms), 'ms')} {more} than one with "
                    f"{self.names[0]} [OC339]"
                )
        return tuple(sentences)


def kinds_of(steps: Sequence[MeasuredStep]) -> StepKinds:
    """Classify a window's counted steps by what the measured threads issue.

    A communication hook may issue collectives where an earlier one ends (PowerSGD does): on the training thread if it
    has ended already, as in sequential steps, and else on a thread of the backend's, unseen. So steps are of one kind
    too if all threads together issued as many collectives, and in some of them not all were seen.
    """
    counted = {index: step for index, step in enumerate(steps) if step.counted}
    labels = _by_size(counted, _by_sequence({index: step.log for index, step in counted.items()}))
    kinds = _Labels(counted, labels)
    if _both(counted, labels, Part.TIMED) == set():
        kinds.match_sides()
    left_out: set[int] = set()
    for part in (Part.TIMED, Part.PROFILED):
        left_out |= kinds.without_partner(part)
    stay = {index: label for index, label in kinds.labels.items() if index not in left_out}
    numbers = {label: number for number, (label, _) in enumerate(Counter(stay.values()).most_common())}
    # A window's least squares has columns for this many kinds besides the commonest; rarer ones would count as it.
    rare = {index for index, label in stay.items() if numbers[label] > MAX_KINDS}
    of_steps = {index: numbers[label] for index, label in stay.items() if index not in rare}
    # Steps of a kind that was not checked are not serialised, however many there are.
    unchecked = any(step.log.divergence is not None for step in steps)
    advice = "" if unchecked else "; with more repeats or steps_per_block a window has every kind in both modes"
    described = kinds.described()
    notes = kinds.notes(left_out, described, advice)
    if rare:
        left = f"{count(len(rare), 'step')} of the rarer kinds {'is' if len(rare) == 1 else 'are'} left out"
        notes += (f"{left}: a window tells {1 + MAX_KINDS} kinds of steps apart [OC338]",)
    names = {number: described[label] for label, number in numbers.items()}
    return StepKinds(of_steps, frozenset(left_out | rare), notes, names)


def _by_sequence(logs: Mapping[int, StepLog]) -> dict[int, int]:
    """A label for each step, equal for steps of one sequence."""
    hidden = {log.issued for log in logs.values() if log.issued is not None and log.issued > len(log.collectives)}
    labels: dict[int, int] = {}
    of_signature: dict[object, int] = {}
    of_number: dict[object, int] = {}
    for index, log in logs.items():
        label = of_signature.setdefault((log.signature, log.micro_batches), len(of_signature))
        labels[index] = label
        if log.issued in hidden:
            other = of_number.setdefault((log.issued, log.micro_batches), label)
            if other != label:  # from here on, both are the same
                of_signature = {of: other if known == label else known for of, known in of_signature.items()}
                of_number = {of: other if known == label else known for of, known in of_number.items()}
                labels = {step: other if known == label else known for step, known in labels.items()}
    return labels


def _by_size(steps: Mapping[int, MeasuredStep], labels: dict[int, int]) -> dict[int, int]:
    """The labels, with those parted whose steps are of few sizes that both modes have."""
    found = dict(labels)
    for label in set(labels.values()):
        sizes: dict[int, tuple[Any, ...]] = {}
        for index, of_step in labels.items():
            if of_step == label:
                log = steps[index].log
                sizes[index] = (log.signature, *[(c.bytes_in, c.bytes_out) for c in log.collectives])
        variants = list(dict.fromkeys(sizes.values()))
        if len(variants) > _MOST_SIZES or len({signature for signature, *_ in variants}) > 1:
            continue
        timed = Counter(
            (size, steps[index].plan.arm) for index, size in sizes.items() if steps[index].plan.part is Part.TIMED
        )
        if all(timed[size, mode] >= _LEAST_STEPS for size in variants for mode in Mode):
            first = max(found.values()) + 1
            found |= {index: first + variants.index(size) for index, size in sizes.items()}
    return found


def _both(steps: Mapping[int, MeasuredStep], labels: Mapping[int, int], part: Part) -> set[int] | None:
    """The labels that both modes have; None where a mode has no step at all."""
    of_mode: dict[Mode, set[int]] = defaultdict(set)
    for index, step in steps.items():
        if step.plan.part is part:
            of_mode[step.plan.arm].add(labels[index])
    return set.intersection(*of_mode.values()) if len(of_mode) == len(Mode) else None


class _Labels:
    """Labels of the counted steps while they are matched between the modes."""

    def __init__(self, steps: Mapping[int, MeasuredStep], labels: Mapping[int, int]) -> None:
        self.labels = dict(labels)
        self._steps = steps
        self._seen = dict(labels)  # as the job has them
        self._example = {label: steps[index].log for index, label in reversed(list(labels.items()))}

    def match_sides(self) -> None:
        """Match the modes' kinds if they have none in common: an arm may issue different collectives.

        Kinds are paired in order of their collectives; if their numbers differ, only the most common of each mode.
        """
        sides: dict[Mode, Counter[int]] = {mode: Counter() for mode in Mode}
        for index, step in self._steps.items():
            sides[step.plan.arm][self.labels[index]] += 1
        ours, theirs = (
            sorted(side, key=lambda label: (len(self._example[label].collectives), _bytes_of(self._example[label])))
            for side in sides.values()
        )
        if len(ours) != len(theirs):
            ours, theirs = ([side.most_common(1)[0][0]] for side in sides.values())
        same = dict(zip(theirs, ours, strict=True))
        self.labels = {index: same.get(label, label) for index, label in self.labels.items()}
        self._seen = dict(self.labels)

    def without_partner(self, part: Part) -> set[int]:
        """Steps whose kind the other mode lacks in this part. A step that is nearly of another kind joins that kind."""
        both = _both(self._steps, self.labels, part)
        if both is None:
            return set()
        alone = set()
        for index, step in self._steps.items():
            if step.plan.part is not part or self.labels[index] in both:
                continue
            near = [label for label in both if _is_near(step.log, self._example[label])]
            if near:
                number = len(step.log.collectives)
                self.labels[index] = min(near, key=lambda of: abs(len(self._example[of].collectives) - number))
            else:
                alone.add(index)
        return alone

    def described(self) -> dict[int, str]:
        """What distinguishes each kind, and its period if it recurs at every n-th step."""
        used = set(self.labels.values()) | set(self._seen.values())
        logs = {label: log for label, log in self._example.items() if label in used}
        numbers = Counter(len(log.collectives) for log in logs.values())
        counted = len({log.micro_batches for log in logs.values()}) > 1
        seen: set[tuple[int, int, int]] = set()
        found = {}
        for label, log in logs.items():
            number, size = len(log.collectives), _bytes_of(log)
            text = count(number, "collective")
            if numbers[number] > 1:
                text += f" of {bytes_in_words(size)}"
            if counted:
                text += f" in {count(log.micro_batches, 'micro-batch').replace('batchs', 'batches')}"
            if (number, size, log.micro_batches) in seen:
                text += " in another order"
            seen.add((number, size, log.micro_batches))
            period = self._period(label)
            found[label] = text if period is None else f"{text} ({every_nth_step(period)})"
        return found

    def _period(self, label: int) -> int | None:
        """The period of a kind: None unless all its steps, and no others, recur at it."""
        mine = {step.number for index, step in self._steps.items() if self._seen[index] == label}
        others = {step.number for index, step in self._steps.items() if self._seen[index] != label}
        if len(mine) < _LEAST_RECURRENCES or not others or min(mine) < 0:
            return None
        period = math.gcd(*[number - min(mine) for number in mine])
        recurs = period > 1 and all((number - min(mine)) % period for number in others)
        return period if recurs else None

    def notes(self, left_out: Iterable[int], described: Mapping[int, str], advice: str) -> tuple[str, ...]:
        """A note on which kinds of steps there are and which were measured."""
        part = Part.TIMED if any(step.plan.part is Part.TIMED for step in self._steps.values()) else Part.PROFILED
        shown = Counter(
            label
            for index, label in (self.labels | {index: self._seen[index] for index in left_out}).items()
            if self._steps[index].plan.part is part
        )
        alone = Counter((self._steps[index].plan.part, self._steps[index].plan.arm) for index in left_out)
        if len(shown) <= 1 and not alone:
            return ()
        each = ", ".join(f"{number} with {described[label]}" for label, number in shown.most_common())
        kinds = count(len(shown), "kind")
        if not alone:
            which = "both" if len(shown) == 2 else "all"
            return (
                f"the job has {kinds} of steps: {each}; {which} were measured in both modes and compared like with "
                f"like [OC336]",
            )
        what = [f"{count(number, f'{arm.value} step')} of the {of.value} part" for (of, arm), number in alone.items()]
        return (
            f"the job has {kinds} of steps: {each}; left out, because the other mode had none of their kind: "
            f"{listed(what)}{advice} [OC337]",
        )


def _bytes_of(log: StepLog) -> int:
    return sum(max(c.bytes_in, c.bytes_out) for c in log.collectives)


def _is_near(log: StepLog, other: StepLog) -> bool:
    """Whether one of two steps issued all collectives of the other and only a few more."""
    if log.micro_batches != other.micro_batches:
        return False
    if (
        log.issued is not None
        and log.issued == other.issued
        and log.issued > min(len(log.collectives), len(other.collectives))
    ):
        return True
    shorter, longer = sorted((log.signature, other.signature), key=len)
    if len(longer) - len(shorter) > _MAX_DEVIATION * len(shorter):
        return False
    rest = iter(longer)
    return all(call in rest for call in shorter)


# -- kinds by the number of kernels


def with_kinds_by_kernels(
    kernels: KernelTable, steps: Sequence[MeasuredStep]
) -> tuple[list[MeasuredStep], tuple[str, ...]]:
    """Split kinds of equal communication whose steps launch different numbers of kernels; with a note if any do."""
    by_arm, kinds = counted_steps(steps)
    counts = kernels_of_steps(kernels, list(kinds))
    found = kinds_by_number(counts, by_arm, kinds)
    if found == kinds:
        return list(steps), ()
    listed = " and ".join(f"{number:,}" for number in sorted({min(counts.values()), max(counts.values())}))
    note = (
        f"profiled steps with the same communication called different kernels ({listed}): they are compared by kind, "
        f"but timed steps cannot be distinguished by their communication [OC340]"
    )
    return [replace(step, kind=found.get(step.profile_index, step.kind)) for step in steps], (note,)


def counted_steps(steps: Sequence[MeasuredStep]) -> tuple[dict[Mode, list[int]], dict[int, int]]:
    """Indices of the counted profiled steps of each mode, and the kind of each."""
    by_arm: dict[Mode, list[int]] = {Mode.OVERLAPPED: [], Mode.SEQUENTIAL: []}
    counted = [step for step in steps if step.counted and step.profile_index >= 0]
    for step in counted:
        by_arm[step.plan.arm].append(step.profile_index)
    return by_arm, {step.profile_index: step.kind for step in counted}
