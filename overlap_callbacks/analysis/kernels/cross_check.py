"""Holds the gate's log against the profile: collectives without kernels, and communication without collectives.

A profile that does not know the job's communication gives a communication time that is too short, and takes overlapped
steps for sequential ones. So collectives that have no kernel make the profile worthless. The other way round is a note:
graph replays, other threads and other libraries communicate past the gate, and the residual overlap tells whether that
matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.accounting import Account, accounts, copies_of
from overlap_callbacks.analysis.kernels.issued import (
    Expected,
    Issued,
    is_device_profile,
    is_of_host_library,
    runs_as,
)
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

# Above this share of all collectives, or where a kind of a group has no kernel at all, missing kernels are no accident.
_MAX_LACKING = 0.1
# Collectives with less than this share of all bytes cannot change the figures: a counter that Gloo sums on the host.
_MIN_BYTES = 0.01
# Below this share of the kernels of a kind, and this share of the time of all communication, kernels without a
# collective are not worth a note.
_MIN_SURPLUS = 0.1
_MIN_SURPLUS_TIME = 0.01
_MAX_NAMED = 3
_MAX_NAME_LENGTH = 80


@dataclass(frozen=True)
class CrossCheck:
    """What the comparison found.

    Attributes:
        missing: collectives without a kernel, in words: the profile must not be used. Empty if there are none.
        notes: smaller differences, and communication without a collective, in words.
        unseen: communication without a collective: how many kernels or copies of each name a step has.
    """

    missing: str = ""
    notes: tuple[str, ...] = ()
    unseen: Mapping[str, float] = field(default_factory=dict)


def cross_check(kernels: KernelTable, issued: Issued) -> CrossCheck:
    """Compare the communication kernels of a device's profile with the collectives that the gate saw.

    Args:
        kernels: the whole profile. That of a CPU job is not compared: Gloo splits and renames its ranges.
        issued: the collectives of each step, by its index. Leave out steps of which the log is not whole.
    """
    if not issued or not is_device_profile(kernels, issued):
        return CrossCheck()
    by_step = accounts(kernels, issued)
    lacking = {step: _not_copied(account) for step, account in by_step.items()}
    expected = [part for account in by_step.values() for part in account.expected]
    missing = [part for parts in lacking.values() for part in parts]
    notes = _of_host_libraries(issued)
    if missing:
        kinds = Counter(part.kind for part in missing)
        named = _named({kind: count / len(by_step) for kind, count in kinds.items()})
        numbers = [_number(len(parts) / len(by_step)) for parts in (missing, expected)]
        text = f"{' of '.join(numbers)} collectives a step have no kernel in the profile ({named})"
        least_bytes = _MIN_BYTES * sum(part.num_bytes for part in expected)
        are_many = len(missing) > _MAX_LACKING * len(expected) and sum(p.num_bytes for p in missing) >= least_bytes
        if are_many or _lacks_a_group(by_step, lacking, least_bytes):
            return CrossCheck(missing=text)
        notes.append(text)
    extra = _extra(kernels, by_step)
    if extra:
        notes.append(f"the profile has communication of no collective that the gate saw, a step: {_named(extra)}")
    return CrossCheck(notes=tuple(notes), unseen=extra)


def _of_host_libraries(issued: Issued) -> list[str]:
    """A note, if collectives on tensors of the device launch no kernel and have bytes that matter."""
    num_bytes: Counter[str] = Counter()
    for collectives in issued.values():
        for collective in collectives:
            if collective.on_device and collective.group_size > 1:
                backend = collective.group.backend if is_of_host_library(collective) else ""
                num_bytes[backend] += collective.bytes_in + collective.bytes_out
    least_bytes = _MIN_BYTES * sum(num_bytes.values())
    named = ", ".join(sorted(backend for backend in num_bytes if backend and num_bytes[backend] > least_bytes))
    return [f"collectives of {named} have no kernel of the device: their time is in no figure"] if named else []


def _not_copied(account: Account) -> tuple[Expected, ...]:
    """What lacks a kernel and is no copy engine's work."""
    if not account.copies_explain:
        return account.lacking
    return tuple([part for part in account.lacking if part not in account.lacking_copied])


def _lacks_a_group(
    by_step: Mapping[int, Account], lacking: Mapping[int, Iterable[Expected]], least_bytes: float
) -> bool:
    """Whether all collectives of one kind on one group lack a kernel, in every step that has any.

    Kernels do not tell their group, so a group counts if as many kernels of its kind are missing as it has collectives.
    """
    whole: dict[tuple[str, str], bool] = {}
    num_bytes: Counter[tuple[str, str]] = Counter()
    for step, account in by_step.items():
        missing = Counter(part.kind for part in lacking[step])
        of_group = Counter((part.kind, part.group) for part in account.expected)
        for key, count in of_group.items():
            whole[key] = whole.get(key, True) and missing[key[0]] >= count
        for part in account.expected:
            num_bytes[part.kind, part.group] += part.num_bytes
    return any(whole[key] and num_bytes[key] >= least_bytes for key in whole)


def _extra(kernels: KernelTable, by_step: Mapping[int, Account]) -> dict[str, float]:
    """Names of kernels and copies that communicate without a collective, and how many there are a step."""
    in_steps = (kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.step, list(by_step))
    copy = copies_of(kernels)
    surplus: Counter[str] = Counter()
    for account in by_step.values():
        surplus.update(account.surplus)
    found: dict[str, float] = {}
    kinds = [runs_as(kind, on_device=True) for kind in kernels.collectives]
    for kind, count in surplus.items():
        of_kind = np.isin(kernels.collective, [number for number, name in enumerate(kinds) if name == kind])
        rows = in_steps & of_kind & ~copy
        if count > _MIN_SURPLUS * rows.sum() or _are_long(kernels, rows, count, in_steps):
            names = Counter(kernels.names[number] for number in kernels.name[rows].tolist())
            for name in sorted(names, key=_is_nccl):  # those of other libraries first
                taken = min(count, names[name])
                count -= taken  # noqa: PLW2901
                if taken:
                    found[name] = found.get(name, 0.0) + taken / len(by_step)
    unexplained = [step for step, account in by_step.items() if account.copies and not account.copies_explain]
    copies = in_steps & copy & np.isin(kernels.step, unexplained)
    for name, number in Counter(kernels.names[number] for number in kernels.name[copies].tolist()).items():
        found[name] = number / len(by_step)
    return found


def _are_long(kernels: KernelTable, rows: npt.NDArray[np.bool_], count: int, all_rows: npt.NDArray[np.bool_]) -> bool:
    """Whether so many of these kernels take time that matters.

    If some are of other libraries than NCCL, they may be the longest of those. If all are NCCL's own, nothing tells
    which of them belong to no collective: they take as long as the shortest at least.
    """
    of_others = np.array([not _is_nccl(name) for name in kernels.names], dtype=bool)
    durations_ns = kernels.intervals.durations_ns
    longest_ns = np.sort(durations_ns[rows & of_others[kernels.name]])[-count:]
    shortest_ns = np.sort(durations_ns[rows])[:count]
    return bool(max(longest_ns.sum(), shortest_ns.sum()) > _MIN_SURPLUS_TIME * durations_ns[all_rows].sum())


def _is_nccl(name: str) -> bool:
    return "nccl" in name[:12].lower()


def _named(numbers: Mapping[str, float]) -> str:
    """The largest numbers with their names, as text of bounded length."""
    largest = sorted(numbers, key=lambda name: -numbers[name])
    shown = [f"{_number(numbers[name])} {name[:_MAX_NAME_LENGTH]}" for name in largest[:_MAX_NAMED]]
    more = len(largest) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
