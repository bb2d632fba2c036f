"""The frontier of the ranks: for each step and part, the latest rank's time from the step's start to the part's end.

The time up to the end of a part, of the rank that is last, is the frontier. By how much it moves on from part to part
adds up to the time of the slowest rank. A part of one rank that is longer than the mean over the ranks, by so much that
this rank is last, holds the others up: they wait later. Maxima merge, so a stretch of steps goes up the ranks' tree in
the same space whatever the number of ranks.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.rank_set import Run, joined
from overlap_callbacks.analysis.results.frontier import HeldUp, StepFrontier
from overlap_callbacks.analysis.step_vectors import PARTS, Ints, StepVectors

# Rows of ``held_up``; the others are added up without their ranks.
_MAX_NAMED = 16
# Longer than any step: 11 days.
_TOO_LONG_NS = 10**15
# A rank that holds the others up by less than this fraction of a step is not named.
LEAST_LATE = 0.02
# Stretches of a run; if there are more, each two become one.
MAX_STRETCHES = 256


class RankStretch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stretch of steps of a set of ranks: arrays of steps by parts, as bytes of 64-bit numbers.

    Attributes:
        heard: whose.
        first_step, num_steps: of the stretch.
        known: for how many ranks each step counts.
        last_ns: latest end of each part, from the step's beginning.
        last_rank: the rank with it, the lowest of equal ones.
        total_ns: sum of each part over the ranks.
    """

    heard: tuple[Run, ...]
    first_step: int
    num_steps: int
    known: bytes
    last_ns: bytes
    last_rank: bytes
    total_ns: bytes

    def __post_init__(self) -> None:
        cells = 8 * self.num_steps * len(PARTS)
        if len(self.known) != 8 * self.num_steps or {len(a) for a in self._cells} != {cells} or not self.heard:
            raise ValueError("a stretch of steps has arrays of other lengths")

    @property
    def _cells(self) -> tuple[bytes, bytes, bytes]:
        return self.last_ns, self.last_rank, self.total_ns

    def is_like(self, own: RankStretch, ranks: range) -> bool:
        """Whether it is of the same steps as ``own``, of some of these ranks alone, with times that are possible."""
        bounds = [rank for run in self.heard for rank in run]
        known, last_ns, last_rank, total_ns = self.arrays()
        prefix_ns = np.cumsum(total_ns, axis=1)
        return bool(
            (self.first_step, self.num_steps) == (own.first_step, own.num_steps)
            and bounds == sorted(bounds)
            and all([before < first for before, first in zip(bounds[1:-1:2], bounds[2::2], strict=True)])
            and bounds[0] in ranks
            and bounds[-1] in ranks
            and ((known >= 0) & (known <= sum([last - first + 1 for first, last in self.heard]))).all()
            and ((last_rank >= bounds[0]) & (last_rank <= bounds[-1])).all()
            and ((total_ns >= 0) & (total_ns < _TOO_LONG_NS)).all()
            and (np.diff(last_ns, axis=1, prepend=0) >= 0).all()
            and (last_ns <= prefix_ns).all()
        )

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        """``known``, and the others with a row for each step."""
        known, *cells = [np.frombuffer(content, dtype=np.int64) for content in (self.known, *self._cells)]
        last_ns, last_rank, total_ns = [content.reshape(self.num_steps, len(PARTS)) for content in cells]
        return known, last_ns, last_rank, total_ns

    @classmethod
    def of(cls, rank: int, vectors: StepVectors, first_step: int, num_steps: int) -> RankStretch:
        """The ordinary steps of one rank within a stretch."""
        places = vectors.steps - first_step
        counts = vectors.ordinary & (places >= 0) & (places < num_steps) & (vectors.parts_ns[:, 0] >= 0)
        known = np.zeros(num_steps, dtype=np.int64)
        total_ns = np.zeros((num_steps, len(PARTS)), dtype=np.int64)
        known[places[counts]] = 1
        total_ns[places[counts]] = vectors.parts_ns[counts]
        last_ns = np.cumsum(total_ns, axis=1)
        ranks = np.full_like(last_ns, rank)
        arrays = [array.tobytes() for array in (known, last_ns, ranks, total_ns)]
        return cls(((rank, rank),), first_step, num_steps, *arrays)


def merge(stretches: Sequence[RankStretch]) -> RankStretch:
    """The same stretch of disjoint sets of ranks. Raises ValueError if they are different ones."""
    ordered = sorted(stretches, key=lambda stretch: stretch.heard)
    first = ordered[0]
    if {(s.first_step, s.num_steps) for s in ordered} != {(first.first_step, first.num_steps)}:
        raise ValueError("these are not the same steps")
    known, last_ns, last_rank, total_ns = [array.copy() for array in first.arrays()]
    for other in ordered[1:]:
        other_known, other_ns, other_rank, other_total_ns = other.arrays()
        later = other_ns > last_ns
        last_ns[later], last_rank[later] = other_ns[later], other_rank[later]
        known += other_known
        total_ns += other_total_ns
    runs = tuple(joined([run for stretch in ordered for run in stretch.heard]))
    arrays = [array.tobytes() for array in (known, last_ns, last_rank, total_ns)]
    return RankStretch(runs, first.first_step, first.num_steps, *arrays)


def encode(stretch: RankStretch) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(stretch), 1)


def decode(message: bytes) -> RankStretch:
    """Raises msgspec.DecodeError or zlib.error."""
    return msgspec.msgpack.decode(zlib.decompress(message), type=RankStretch)


def frontier_of(stretch: RankStretch, silent: Sequence[int] = ()) -> StepFrontier:
    """Who holds whom up in a stretch. ``silent``: the ranks that were not heard."""
    known, last_ns, last_rank, total_ns = stretch.arrays()
    heard = np.flatnonzero(known)  # the job may end within a stretch
    num_ranks = sum(last - first + 1 for first, last in stretch.heard)
    counts = known == num_ranks
    moved_ns = np.diff(last_ns[counts], axis=1, prepend=0)
    late_ns = moved_ns - total_ns[counts] // num_ranks
    held_up: Counter[tuple[str, int]] = Counter()
    for part, name in enumerate(PARTS):
        late = late_ns[:, part] > 0
        ranks, places = np.unique(last_rank[counts][late, part], return_inverse=True)
        sums = np.bincount(places, weights=late_ns[late, part], minlength=len(ranks))
        held_up.update({(name, int(rank)): int(ns) for rank, ns in zip(ranks, sums, strict=True)})
    return StepFrontier(
        stretch.first_step,
        stretch.first_step + (int(heard[-1]) if len(heard) else stretch.num_steps - 1),
        int(counts.sum()),
        num_ranks,
        _by_part(moved_ns.sum(axis=0)),
        _by_part(total_ns[counts].sum(axis=0) // num_ranks),
        _bounded(held_up),
        tuple(silent[:_MAX_NAMED]),
    )


def add(first: StepFrontier, second: StepFrontier) -> StepFrontier:
    """Two stretches, one after the other, as one. Of different numbers of ranks, the smaller counts."""
    held_up = Counter({(row.part, row.rank): row.ns for row in first.held_up})
    held_up.update({(row.part, row.rank): row.ns for row in second.held_up})
    return StepFrontier(
        first.first_step,
        second.last_step,
        first.num_steps + second.num_steps,
        min(first.num_ranks, second.num_ranks),
        _sum(first.frontier_ns, second.frontier_ns),
        _sum(first.mean_ns, second.mean_ns),
        _bounded(held_up),
        tuple(sorted({*first.silent, *second.silent})[:_MAX_NAMED]),
    )


class RunFrontier:
    """The frontier of a whole run, in bounded space: all stretches at first, later pairs of them, pairs of pairs...

    ``stretches`` are in order; all have the same number of parts but the last.
    """

    def __init__(self) -> None:
        self.stretches: list[StepFrontier] = []
        self._per_row = 1
        self._in_last = 1

    @property
    def incomplete(self) -> StepFrontier | None:
        """The last row, if more stretches belong to it."""
        return self.stretches[-1] if self._in_last < self._per_row else None

    def append(self, stretch: StepFrontier) -> StepFrontier | None:
        """Add the next stretch. Returns the row that is now complete, if one is: rows grow with the run."""
        if self._in_last < self._per_row:
            self.stretches[-1] = add(self.stretches[-1], stretch)
            self._in_last += 1
        else:
            if len(self.stretches) == MAX_STRETCHES:
                pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
                self.stretches = [add(one, other) for one, other in pairs]
                self._per_row *= 2
            self.stretches.append(stretch)
            self._in_last = 1
        return self.stretches[-1] if self._in_last == self._per_row else None

    @property
    def whole(self) -> StepFrontier | None:
        """The run so far; None before the first stretch."""
        return total(self.stretches)


def total(stretches: Iterable[StepFrontier]) -> StepFrontier | None:
    """Consecutive stretches as one; None without any."""
    found: StepFrontier | None = None
    for stretch in stretches:
        found = stretch if found is None else add(found, stretch)
    return found


def part_name(part: str) -> str:
    return part.replace("_", " + ")


def sentence_of(whole: StepFrontier) -> str:
    """Which part takes longest, and who holds the others up. There must be a step."""
    step_ns = sum(whole.mean_ns.values()) or 1
    longest = max(whole.mean_ns, key=lambda part: whole.mean_ns[part])
    said = f"{part_name(longest).capitalize()} takes {whole.mean_ns[longest] / step_ns:.1%} of a step"
    late = next((row for row in whole.held_up if row.rank >= 0), None)
    if late is None or late.ns < LEAST_LATE * step_ns:
        return f"{said}."
    by = PLAIN.quantity(late.ns / 1e6 / whole.num_steps, "ms")
    return f"{said}; rank {late.rank} holds the others up in {part_name(late.part)}, by {by} a step."


def _by_part(sums_ns: Any) -> dict[str, int]:
    return {name: int(ns) for name, ns in zip(PARTS, sums_ns, strict=True) if ns}


def _sum(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in PARTS if name in first or name in second}


def _bounded(held_up: Counter[tuple[str, int]]) -> tuple[HeldUp, ...]:
    """The largest rows; the others of each part as one without a rank."""
    named = Counter({of: ns for of, ns in held_up.items() if of[1] >= 0 and ns > 0})
    rows = [HeldUp(*of, ns) for of, ns in named.most_common(_MAX_NAMED)]
    rest: Counter[str] = Counter({part: ns for (part, rank), ns in held_up.items() if rank < 0})
    for (part, _), ns in named.most_common()[_MAX_NAMED:]:
        rest[part] += ns
    return (*rows, *[HeldUp(part, -1, ns) for part, ns in rest.items()])
