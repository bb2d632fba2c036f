"""How long the kernels of each collective take in a sequential step, where the profile can tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

# Operator and name of the group.
CollectiveKey = tuple[str, str]


class KeyedCollective(Protocol):
    """What this module needs of a collective as the gate saw it."""

    @property
    def key(self) -> CollectiveKey:
        """Its operator and the name of its group."""
        ...


def kernel_times_by_collective(
    kernels: KernelTable, issued: Mapping[int, Sequence[KeyedCollective]]
) -> dict[CollectiveKey, float]:
    """Time of the kernels of each collective, per step, in milliseconds.

    A kernel tells the kind of its collective, and no group. So only collectives are in the result whose kind one group
    and one operator alone have, with one kernel for each, in every step.

    Args:
        kernels: the whole profile.
        issued: what each sequential step issued, by its index.
    """
    counts = {step: Counter(collective.key for collective in calls) for step, calls in issued.items()}
    keys = {key for count in counts.values() for key in count}
    of_kind: dict[str, set[CollectiveKey]] = {}
    for key in keys:
        of_kind.setdefault(name_rules.collective_of(key[0]), set()).add(key)
    times = {}
    for kind, keys_of_kind in of_kind.items():
        if len(keys_of_kind) > 1 or kind not in kernels.collectives:
            continue
        (key,) = keys_of_kind
        rows = (kernels.kind == Kind.COMMUNICATION) & (kernels.collective == kernels.collectives.index(kind))
        in_steps = {step: rows & (kernels.step == step) for step in counts}
        if all(np.count_nonzero(in_steps[step]) == count[key] for step, count in counts.items()):
            total_ns = sum(int(kernels.intervals[in_step].sum_ns) for in_step in in_steps.values())
            times[key] = total_ns / len(counts) / 1e6
    return times
