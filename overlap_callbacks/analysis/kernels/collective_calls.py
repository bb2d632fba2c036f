"""The kernels of single collectives in the profiled steps of a rank, for the comparison with other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Issued
from overlap_callbacks.analysis.kernels.matching import Match
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.collective_calls import CollectiveCalls, ProfiledStep

# What is sent: kinds of collectives on groups, and times of each in a step.
MAX_ROWS, MAX_BINS = 32, 24

_Key = tuple[str, str]


def collective_calls(
    kernels: KernelTable, matches: Mapping[int, Match], issued: Issued, steps: Mapping[int, ProfiledStep]
) -> tuple[CollectiveCalls, ...]:
    """The kernels of each kind of collective on each group; all ranks of a group choose and divide them alike.

    Args:
        kernels: the whole profile.
        matches: what the gate's log tells of its communication kernels, by row.
        issued: the collectives of each step, by its index, in the order of issue.
        steps: the profiled steps that count, by their index.
    """
    known = {collective.group.name: collective for step in steps for collective in issued.get(step, ())}
    groups = {name: collective.group for name, collective in known.items()}
    rows: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, match in matches.items():
        step = int(kernels.step[row])
        if match.group in groups and match.kind not in (None, SEND_RECV, "barrier") and step in steps:
            rows[match.kind or "", match.group or ""][step].append(row)
    label, labels = labels_of(kernels)
    is_compute = kernels.kind == Kind.COMPUTE
    compute = kernels.of(Kind.COMPUTE).union()
    found = []
    chosen = sorted(rows, key=lambda key: (min(groups[key[1]].ranks, default=-1), key[1], key[0]))[:MAX_ROWS]
    for kind, name in chosen:
        ranks = groups[name].ranks
        number = Counter(len(of_step) for of_step in rows[kind, name].values()).most_common(1)[0][0]
        whole = {step: of_step for step, of_step in rows[kind, name].items() if len(of_step) == number}
        if len(ranks) < 2:
            continue
        order = sorted(whole, key=lambda step: steps[step].number)
        of_steps = np.array([sorted(whole[step], key=lambda row: kernels.intervals.start_ns[row]) for step in order])
        calls = kernels.intervals[of_steps.ravel()]

        def binned(values: npt.NDArray[np.int64], shape: tuple[int, int] = of_steps.shape) -> npt.NDArray[np.float64]:
            num_bins = min(shape[1], MAX_BINS)
            starts = -(-np.arange(num_bins) * shape[1] // num_bins)
            return np.asarray(np.add.reduceat(values.reshape(shape).astype(float), starts, axis=1))

        hidden = binned(calls.covered_ns(compute))
        by_family = {
            labels[code]: binned(calls.covered_ns(kernels.intervals[is_compute & (label == code)].union()))
            for code in np.unique(label[is_compute]).tolist()
        }
        by_family = {family: covered for family, covered in by_family.items() if covered.any()}
        beside = np.stack([*by_family.values()], axis=2) if by_family else np.empty((*hidden.shape, 0))
        total = beside.sum(axis=2, keepdims=True)
        found.append(
            CollectiveCalls(
                kind,
                name,
                min(ranks),
                len(ranks),
                number,
                tuple([steps[step] for step in order]),
                tuple(by_family),
                (binned(calls.durations_ns) / 1e3).astype(np.float32).tobytes(),
                (hidden / 1e3).astype(np.float32).tobytes(),
                np.rint(255 * beside / np.where(total > 0, total, 1)).astype(np.uint8).tobytes(),
                known[name].dimension,
            )
        )
    return tuple(found)
