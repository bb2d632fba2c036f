"""What a record says of a model's prediction: effective bandwidths, and the messages that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.links import Link, fitted_links
from overlap_callbacks.analysis.communication.rows import wire_factor
from overlap_callbacks.analysis.communication.volumes import rank_rows
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime

# Jobs with data parallelism only use the default group.
_WORLD, _DATA, _PIPELINE = "world", "data", "pipeline"


class CheckedRow(msgspec.Struct, frozen=True):
    """One operator of one dimension on one rank, per step: what was predicted and what the gate recorded.

    Attributes:
        rank: global rank.
        dimension, operator: as in ``MessageRow``.
        messages, bytes: predicted; 0 where none was.
        measured_messages, measured_bytes: recorded; 0 where none was.
    """

    rank: int
    dimension: str
    operator: str
    messages: int
    bytes: int
    measured_messages: int
    measured_bytes: int

    @property
    def equal(self) -> bool:
        """Whether both numbers agree exactly."""
        return (self.messages, self.bytes) == (self.measured_messages, self.measured_bytes)


def effective_bandwidths(collectives: Iterable[CollectiveTime]) -> dict[str, float]:
    """Bytes on the wire a second, by dimension: from transfers (the least time over the ranks), never from waiting.

    Dimensions without a timed message of more than one rank are missing.
    """
    wire: dict[str, float] = {}
    time_ms: dict[str, float] = {}
    for row in collectives:
        if row.group_size < 2 or row.transfer is None:
            continue
        size, ms = row.transfer
        dimension = _DATA if row.dimension == _WORLD else row.dimension
        wire[dimension] = wire.get(dimension, 0.0) + size * wire_factor(row.operator, row.group_size)
        time_ms[dimension] = time_ms.get(dimension, 0.0) + ms
    return {name: wire[name] / time_ms[name] * 1e3 for name in wire if time_ms[name] > 0 and wire[name] > 0}


class RecordedRates(msgspec.Struct, frozen=True):
    """What a record tells of the machines on which its job ran.

    Attributes:
        links: by dimension of parallelism.
        compute_flop_per_s: of one device; None if it is not told.
    """

    links: dict[str, Link] = {}
    compute_flop_per_s: float | None = None

    def completed_by(self, other: RecordedRates) -> RecordedRates:
        """The same with what only the other has."""
        rate = other.compute_flop_per_s if self.compute_flop_per_s is None else self.compute_flop_per_s
        return RecordedRates({**other.links, **self.links}, rate)


def recorded_rates(windows: Sequence[OverlapReport]) -> RecordedRates:
    """Rates from windows of one run: links with a latency where messages of several sizes tell it.

    Args:
        windows: whole ones.
    """
    effective = effective_bandwidths([row for window in windows for row in window.collectives])
    fitted = fitted_links([row for window in windows if window.valid for row in window.transfers])
    # Mean of the times that a FLOP takes.
    rates = [rate for window in windows if (rate := compute_flop_per_s(window)) is not None]
    return RecordedRates(
        {**{name: Link(bandwidth) for name, bandwidth in effective.items()}, **fitted},
        len(rates) / sum([1 / rate for rate in rates]) if rates else None,
    )


def compute_flop_per_s(window: OverlapReport) -> float | None:
    """Model FLOP a second of one device in the time of a sequential step in which it sends nothing.

    That time is all that is left once the transfers are taken from the step: kernels, the optimizer, and the host's
    work that no kernel hides. None where the record does not tell the FLOP of a step (``flop_per_step`` and its like),
    where sequential steps were not measured, and with a pipeline, whose bubble is in that time too.
    """
    work = window.throughput
    if work is None or work.flop_per_step is None or work.num_devices < 1 or window.e2e_sequential_ms is None:
        return None
    if not window.valid or any([row.dimension == _PIPELINE for row in window.collectives]):
        return None
    rest_ms = window.e2e_sequential_ms.value - _transfer_ms(window.collectives)
    return work.flop_per_step / work.num_devices / rest_ms * 1e3 if rest_ms > 0 else None


def _transfer_ms(collectives: Iterable[CollectiveTime]) -> float:
    """Time of the transfers of a step; those that were not timed take as long for a byte as those of their kind."""
    found = 0.0
    for row in collectives:
        if row.group_size > 1 and row.transfer is not None:
            size, ms = row.transfer
            found += ms * max(1.0, row.size_bytes / size if size else 1.0)
    return found


def check_rank(job: JobShape, rank: int, collectives: Sequence[CollectiveTime]) -> tuple[CheckedRow, ...]:
    """Predicted messages of a rank beside those that a window recorded; groups of one rank are left out of both.

    Args:
        job: checked.
        rank: global rank.
        collectives: of the window's recorded step on that rank.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for row in rank_rows(job, rank):
        if row.group_size != 1:
            sums = found.setdefault((row.dimension, row.operator), [0, 0, 0, 0])
            sums[0] += row.messages
            sums[1] += row.bytes
    for measured in collectives:
        if measured.group_size != 1:
            plain = job.layout != "megatron" and measured.dimension == _WORLD
            key = (_DATA if plain else measured.dimension, measured.operator)
            sums = found.setdefault(key, [0, 0, 0, 0])
            sums[2] += measured.messages
            sums[3] += measured.size_bytes
    return tuple([CheckedRow(rank, *key, *sums) for key, sums in sorted(found.items())])
