"""Adds up the kernels of one device of a trace, by name and by family, over the pieces of its time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.traces.device_time import TopKernel
from overlap_callbacks.traces.figures import FamilyFigures
from overlap_callbacks.traces.trace import Trace

# Kernels of the table of a device. There may be thousands of names.
MAX_KERNELS = 100


class NameSums:
    """The kernels of one device by their names.

    Args:
        head: the trace, with any rows or none.
    """

    def __init__(self, head: Trace) -> None:
        self._names = head.kernels.names
        # A name may stand for kernels of both kinds: those that compute come first.
        size = 2 * len(self._names)
        self._count, self._longest_ns = (np.zeros(size, dtype=np.int64) for _ in range(2))
        self._time_ns, self._beside_ns = (np.zeros(size) for _ in range(2))

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._count)
        calls = Calls.of(kernels)
        communicates = calls.kind == Kind.COMMUNICATION
        rows = np.flatnonzero(communicates | (calls.kind == Kind.COMPUTE))
        beside = np.where(
            communicates, calls.covered_ns(kernels.of(Kind.COMPUTE)), calls.covered_ns(kernels.of(Kind.COMMUNICATION))
        )
        key = kernels.name[calls.row[rows]] * 2 + communicates[rows]
        self._count += np.bincount(key, minlength=size)
        self._time_ns += np.bincount(key, weights=calls.duration_ns[rows], minlength=size)
        self._beside_ns += np.bincount(key, weights=beside[rows], minlength=size)
        np.maximum.at(self._longest_ns, key, calls.duration_ns[rows])

    @property
    def top(self) -> tuple[TopKernel, ...]:
        """The kernels and collectives with the most time first; ``MAX_KERNELS`` at most."""
        total_ns = float(self._time_ns.sum())
        order = np.argsort(-self._time_ns, kind="stable")[:MAX_KERNELS]
        return tuple([self._kernel(i, total_ns) for i in order[self._count[order] > 0].tolist()])

    def _kernel(self, number: int, total_ns: float) -> TopKernel:
        name, communication = self._names[number // 2], bool(number % 2)
        time_ns = float(self._time_ns[number])
        return TopKernel(
            name=name,
            family=name_rules.collective_of(name) if communication else name_rules.family_of(name),
            communication=communication,
            calls=int(self._count[number]),
            time_ms=time_ns / 1e6,
            share=time_ns / total_ns if total_ns else 0.0,
            longest_ms=int(self._longest_ns[number]) / 1e6,
            beside_ms=float(self._beside_ns[number]) / 1e6,
        )


class FamilySums:
    """The kernels of one device that compute, by their families.

    Args:
        head: the trace, with any rows or none.
    """

    def __init__(self, head: Trace) -> None:
        _, self._families = labels_of(head.kernels)
        self._kinds = head.kernels.collectives
        size = len(self._families)
        self._count, self._time_ns = np.zeros(size, dtype=np.int64), np.zeros(size)
        self._beside_ns: npt.NDArray[np.float64] = np.zeros((len(self._kinds), size))

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._families)
        calls = Calls.of(kernels)
        label, _ = labels_of(kernels)
        compute = np.flatnonzero(calls.kind == Kind.COMPUTE)
        group = label[calls.row[compute]]
        self._count += np.bincount(group, minlength=size)
        self._time_ns += np.bincount(group, weights=calls.duration_ns[compute], minlength=size)
        for number in range(len(self._kinds)):
            covered = calls.covered_ns(kernels.intervals[kernels.collective == number])[compute]
            self._beside_ns[number] += np.bincount(group, weights=covered, minlength=size)

    @property
    def figures(self) -> tuple[FamilyFigures, ...]:
        """The figures, those with the most time first."""
        order = np.argsort(-self._time_ns, kind="stable")
        return tuple([self._figures(i) for i in order[self._count[order] > 0].tolist()])

    def _figures(self, number: int) -> FamilyFigures:
        beside_ns = zip(self._kinds, self._beside_ns[:, number].tolist(), strict=True)
        return FamilyFigures(
            family=self._families[number],
            calls=int(self._count[number]),
            time_ms=float(self._time_ns[number]) / 1e6,
            beside={kind: ns / 1e6 for kind, ns in beside_ns if ns},
        )
