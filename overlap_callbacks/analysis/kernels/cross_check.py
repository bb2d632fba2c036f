"""Compares the gate's log with a device's profile, and names compute that overlaps in sequential steps.

A collective without a kernel makes the profile worthless: communication is too short, and overlapped steps look
sequential. A kernel without a collective only gets a note: graph replays, other threads and libraries communicate past
the gate, and the residual overlap shows whether that matters.

The gate does not order work on the user's own streams. A profile does not say which stream is the model's, but need
not: ordered work did not overlap. So each stream is judged by its own compute that overlapped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.formatting import one_digit
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.alignment import AlignedStep, Alignment
from overlap_callbacks.analysis.kernels.issued import Expected, IssuedCollective, is_of_host_library, runs_as
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, copies_of, within_device

# Above this share of all collectives, or if a kind of a group has no kernel at all, missing kernels are not accidental.
_MAX_LACKING = 0.1
# Collectives with less than this share of all bytes cannot change the figures: for example, a counter summed by Gloo on
# the host.
_MIN_BYTES = 0.01
# Below this share of the kernels of a kind, and this share of the time of all communication, kernels without a
# collective are not worth a note.
_MIN_SURPLUS, _MIN_SURPLUS_TIME = 0.1, 0.01
# Below this share of the compute, overlap is within the uncertainty of kernel times.
_MIN_OVERLAP = 0.002
# A stream with less than this share of the overlapping compute is not named.
_MIN_PART = 0.05
_MAX_NAMED, _MAX_NAME_LENGTH = 3, 80


class CrossCheck(NamedTuple):
    """The result of the comparison.

    Attributes:
        missing: why the profile must not be used: collectives without a kernel. Empty if it may be.
        notes: smaller differences, communication without a collective, and residual overlap.
        lower_bound: whether there may be more communication than the profile shows.
    """

    missing: str = ""
    notes: tuple[str, ...] = ()
    lower_bound: bool = False


def cross_check(
    aligned: Alignment,
    sequential: Sequence[int] = (),
    whole: Collection[int] | None = None,
    symmetric_groups: Collection[str] = (),
) -> CrossCheck:
    """Compare the communication of a device's profile with the collectives that the gate saw.

    Args:
        aligned: the whole profile and the log.
        sequential: the sequential steps that count.
        whole: the steps with a complete log, which are compared; None for all.
        symmetric_groups: groups for which torch's symmetric memory is enabled.
    """
    if not aligned.on_device:
        return CrossCheck()
    compared = {step: aligned.steps[step] for step in (aligned.steps if whole is None else whole)}
    lacking, is_worthless = _lacking(compared)
    if is_worthless:
        doubt = f"the profile does not show the job's communication: {lacking}; its kernel times are left out [OC373]"
        return CrossCheck(missing=doubt)
    unseen = _unseen(aligned.kernels, compared)
    # Another note counts what comes from graphs.
    replayed = _names(aligned.kernels, aligned.kernels.from_graph & np.isin(aligned.kernels.step, list(compared)))
    others = {name: number for name, number in unseen.items() if number * len(compared) > replayed[name] + 0.5}
    extra = _largest(others, lambda name, number: f"{_number(number)} {name}")
    bound = _lower_bound(aligned.kernels, unseen, list(aligned.steps), symmetric_groups)
    notes = (
        _of_host_libraries([collective for step in compared for collective in aligned.issued[step]]),
        lacking and f"{lacking} [OC374]",
        extra and f"the profile has communication of no collective that the gate saw, a step: {extra} [OC376]",
        residual_overlap(aligned.kernels, sequential, unseen),
        bound,
    )
    return CrossCheck(notes=tuple([note for note in notes if note]), lower_bound=bool(bound))


def _largest(numbers: Mapping[str, float], words: Callable[[str, float], str]) -> str:
    """The names with the largest numbers, as text of limited length."""
    names = sorted(numbers, key=lambda name: -numbers[name])
    shown = [words(name[:_MAX_NAME_LENGTH], numbers[name]) for name in names[:_MAX_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


# -- collectives without kernels


def _lacking(steps: Mapping[int, AlignedStep]) -> tuple[str, bool]:
    """The collectives without a kernel, as text, and whether they make the profile worthless."""
    expected = {step: [part for part in of.expected if part.kind != "barrier"] for step, of in steps.items()}
    lacking = {step: of.missing for step, of in steps.items()}
    missing, wanted = ([part for parts in of.values() for part in parts] for of in (lacking, expected))
    if not missing:
        return "", False
    of_kinds = {kind: count / len(steps) for kind, count in Counter(part.kind for part in missing).items()}
    named = _largest(of_kinds, lambda kind, number: f"{_number(number)} {kind}")
    numbers = [_number(len(parts) / len(steps)) for parts in (missing, wanted)]
    text = f"{' of '.join(numbers)} collectives a step have no kernel in the profile ({named})"
    missing_bytes, all_bytes = (sum(part.num_bytes for part in parts) for parts in (missing, wanted))
    are_many = len(missing) > _MAX_LACKING * len(wanted) and missing_bytes >= _MIN_BYTES * all_bytes
    return text, are_many or _lacks_a_group(expected, lacking)


def _lacks_a_group(expected: Mapping[int, Sequence[Expected]], lacking: Mapping[int, Sequence[Expected]]) -> bool:
    """Whether all collectives of one kind on one group lack a kernel, in every step that has any.

    Kernels do not show their group, so a group counts if that many kernels of its kind are missing.
    """
    whole: dict[tuple[str, str], bool] = {}
    num_bytes: Counter[tuple[str, str]] = Counter()
    for step, parts in expected.items():
        missing = Counter(part.kind for part in lacking[step])
        for (kind, group), count in Counter((part.kind, part.group) for part in parts).items():
            whole[kind, group] = whole.get((kind, group), True) and missing[kind] >= count
        for part in parts:
            num_bytes[part.kind, part.group] += part.num_bytes
    return any(whole[key] and num_bytes[key] >= _MIN_BYTES * num_bytes.total() for key in whole)


def _of_host_libraries(collectives: Iterable[IssuedCollective]) -> str:
    """A note, if collectives on device tensors launch no kernel and their bytes matter."""
    num_bytes: Counter[str] = Counter()
    for collective in collectives:
        if collective.on_device and collective.group_size > 1:
            backend = collective.group.backend if is_of_host_library(collective) else ""
            num_bytes[backend] += collective.bytes_in + collective.bytes_out
    least_bytes = _MIN_BYTES * num_bytes.total()
    named = ", ".join(sorted(backend for backend in num_bytes if backend and num_bytes[backend] > least_bytes))
    return f"collectives of {named} have no kernel of the device: their time is in no figure [OC375]" if named else ""


# -- communication without a collective


def _unseen(kernels: KernelTable, steps: Mapping[int, AlignedStep]) -> dict[str, float]:
    """Names of kernels and copies that communicate without a collective, and their number per step."""
    in_steps = (kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.step, list(steps))
    copy = copies_of(kernels)
    kinds = np.array([runs_as(kind, on_device=True) for kind in kernels.collectives])
    surplus: Counter[str] = Counter()
    for of in steps.values():
        surplus.update(of.surplus)
    found: Counter[str] = Counter()
    for kind, count in surplus.items():
        rows = in_steps & ~copy & np.isin(kernels.collective, np.flatnonzero(kinds == kind))
        if count > _MIN_SURPLUS * rows.sum() or _are_long(kernels, rows, count, in_steps):
            names = _names(kernels, rows)
            for name in sorted(names, key=_is_nccl):  # other libraries' first
                found[name] += min(count, names[name])
                count -= min(count, names[name])  # noqa: PLW2901
    unexplained = [step for step, of in steps.items() if not of.copies_explain]
    found.update(_names(kernels, in_steps & copy & np.isin(kernels.step, unexplained)))
    return {name: number / len(steps) for name, number in found.items() if number}


def _names(kernels: KernelTable, rows: npt.NDArray[np.bool_]) -> Counter[str]:
    return Counter([kernels.names[number] for number in kernels.name[rows].tolist()])


def _are_long(kernels: KernelTable, rows: npt.NDArray[np.bool_], count: int, all_rows: npt.NDArray[np.bool_]) -> bool:
    """Whether this many kernels take significant time: the longest of other libraries, or the shortest of NCCL's."""
    durations_ns = kernels.intervals.durations_ns
    longest_ns = np.sort(durations_ns[rows & ~kernels.named(_is_nccl)])[-count:]
    shortest_ns = np.sort(durations_ns[rows])[:count]
    return bool(max(longest_ns.sum(), shortest_ns.sum()) > _MIN_SURPLUS_TIME * durations_ns[all_rows].sum())


def _is_nccl(name: str) -> bool:
    return "nccl" in name[:12].lower()


def _lower_bound(
    kernels: KernelTable, unseen: Collection[str], steps: Sequence[int], symmetric_groups: Collection[str]
) -> str:
    """Why communication and residual overlap may exceed what the profile shows; empty if they cannot.

    Direct access to another rank's mapped memory may appear as a copy within the device, which is recognised as
    communication only if a collective explains it.
    """
    direct = [name for name in unseen if any(re.search(pattern, name) for pattern in name_rules.direct_communication)]
    used = ", ".join([name[:60] for name in sorted(direct)[:_MAX_NAMED]])
    if not direct and symmetric_groups and (within_device(kernels) & np.isin(kernels.step, steps)).any():
        used = f"symmetric memory of {len(symmetric_groups)} groups, and copies within the device"
    if not used:
        return ""
    return (
        f"communication that no collective explains ({used}) may be copies that no figure has: communication and "
        f"residual overlap are lower bounds [OC378]"
    )


# -- residual overlap


def residual_overlap(kernels: KernelTable, sequential: Sequence[int], unseen: Mapping[str, float]) -> str:
    """What overlapped with communication in sequential steps; empty if it is too little to matter.

    ``unseen``: communication without a collective: kernels or copies per step, by name.
    """
    communication = kernels.union_of(Kind.COMMUNICATION)
    rows = np.flatnonzero((kernels.kind == Kind.COMPUTE) & np.isin(kernels.step, sequential))
    compute, lanes, num_steps = kernels.intervals[rows], kernels.lane[rows], len(sequential)
    overlap_ns = compute.covered_ns(communication)
    total_ns = int(overlap_ns.sum())
    if not total_ns or total_ns < _MIN_OVERLAP * compute.sum_ns:
        return ""
    of_lane = [(int(overlap_ns[lanes == lane].sum()), lane) for lane in distinct_values(lanes).tolist()]
    largest = sorted([of for of in of_lane if of[0] >= _MIN_PART * total_ns], key=lambda of: -of[0])
    streams = []
    for time_ns, lane in largest[:_MAX_NAMED]:
        mine = lanes == lane
        names = _named(kernels, rows[mine], overlap_ns[mine], num_steps)
        share = one_digit(100 * time_ns / int(compute.durations_ns[mine].sum()))
        streams.append(f"{_ms(time_ns, num_steps)} on stream {lane} ({share} % of its compute): {names}")
    if len(largest) > _MAX_NAMED:
        streams.append(f"and on {len(largest) - _MAX_NAMED} more streams")
    text = f"in sequential steps compute ran during communication, {'; '.join(streams)}"
    escaped = _escaped(kernels, sequential, unseen)
    return f"{text}{escaped and f'; the gate did not see this communication: {escaped}'} [OC377]"


def _escaped(kernels: KernelTable, sequential: Sequence[int], unseen: Mapping[str, float]) -> str:
    """The overlapping communication that belongs to no collective; empty if there is none.

    A name that collectives also have counts only if its kernels without a collective may account for all of its
    overlap.
    """
    candidates = (kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.step, sequential)
    rows = np.flatnonzero(candidates & kernels.named(unseen.__contains__))
    hidden_ns = kernels.intervals[rows].covered_ns(kernels.union_of(Kind.COMPUTE))
    rows, hidden_ns = rows[hidden_ns > 0], hidden_ns[hidden_ns > 0]
    per_step = Counter(kernels.name[rows].tolist())
    explained = [n for n, count in per_step.items() if count <= round(unseen[kernels.names[n]] * len(sequential))]
    chosen = np.isin(kernels.name[rows], explained)
    return _named(kernels, rows[chosen], hidden_ns[chosen], len(sequential))


def _named(kernels: KernelTable, rows: Indices, times_ns: Indices, num_steps: int) -> str:
    """The kernels with the most time, as text of limited length."""
    names = kernels.name[rows]
    by_name = {kernels.names[n]: int(times_ns[names == n].sum()) for n in distinct_values(names).tolist()}
    return _largest(
        {name: time_ns for name, time_ns in by_name.items() if time_ns},
        lambda name, time_ns: f"{name} ({_ms(time_ns, num_steps)})",
    )


def _ms(time_ns: float, num_steps: int) -> str:
    """Time per step, rounded so that all ranks word it identically."""
    return f"{one_digit(time_ns / num_steps / 1e6)} ms"
