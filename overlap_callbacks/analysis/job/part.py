"""What a set of ranks measured in one window, in bounded space; made from one rank's window, and merged."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from overlap_callbacks.analysis.communication.sums import MessageSums, add_sums, sums_of
from overlap_callbacks.analysis.environment.job import EnvironmentSums, add_environments, environment_of, host_of
from overlap_callbacks.analysis.environment.lint import Traits, add_traits, traits_of
from overlap_callbacks.analysis.experts import ExpertSums, add_experts
from overlap_callbacks.analysis.experts import sums_of as expert_sums
from overlap_callbacks.analysis.figures import FigureSums, add_figure_sums, figure_sums, spread_figures
from overlap_callbacks.analysis.job.arrivals import (
    ArrivalSums,
    Transfers,
    add_arrivals,
    add_transfers,
    arrivals_of,
    transfers_of,
)
from overlap_callbacks.analysis.job.stages import StageSum, add_stages, stages_of
from overlap_callbacks.analysis.job.tables import bounded
from overlap_callbacks.analysis.measuring_cost import LostTime
from overlap_callbacks.analysis.memory import add_peaks, peaks_of
from overlap_callbacks.analysis.power.sums import PowerSums, add_power, power_of
from overlap_callbacks.analysis.race import add_checks
from overlap_callbacks.analysis.rank_problems import Sentences, add_sentences, sentences_of
from overlap_callbacks.analysis.rank_set import RankSet, Run, joined
from overlap_callbacks.analysis.results.exposure import ExposureSums
from overlap_callbacks.analysis.results.messages import NO_STAGE
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.window import MemoryPeak, RankWindow
from overlap_callbacks.analysis.sums import Aggregate, add_aggregates, named_sum, struct_sum
from overlap_callbacks.analysis.validity import Measured, add_measured

# The figures that ranks are compared by.
SPREAD_OVER_RANKS = (
    "compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "exposed_comm_ms",
    "compute_busy_ms", "idle_ms",  # which tell a late rank: ``late_rank``
)  # fmt: skip

# Limit of ``JobPart.extra_ms``: nearly all ranks run equally many steps.
_MAX_EXTRA = 32


class JobPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a set of ranks measured in one window.

    Attributes:
        heard: all its ranks.
        measured: what all ranks must agree on, the lowest rank's first.
        num_steps: most steps of any rank.
        any_complete, all_complete: whether any rank, and each rank, ran the whole window.
        wall_ms: host time of the window, the longest.
        extra_ms: by number of steps, the longest host time of the window and CPU time after it together, of the ranks
            that do not know what they lost.
        report_cpu_ms: CPU time after the window, the longest of the same ranks.
        lost: most time that training lost to the window, of the ranks that know it.
        checked: whether any rank has a profile of sequential steps.
        figures: sums over their blocks, and their tables.
        spread: the figures of ``SPREAD_OVER_RANKS``.
        doubts, let_pass, problems: as in ``RankWindow``.
        transfers: times of collectives.
        traits: what the rules of the environment need of their windows.
        samples: what single ranks measured, compressed, by rank: the lowest, and those with the extremes of the spread;
            all, if few.
        messages: what the ranks send.
        experts: how evenly they spread tokens.
        arrivals: which ranks came last to collectives.
        stages: the bubbles of a pipeline's stages.
        race: what their repeated steps showed.
        lower_bound: whether any rank may have more communication than its profile shows.
        same_order: whether all ranks issue the same collectives with the arm, in the same order; None if not known.
    """

    heard: Annotated[tuple[Run, ...], _runs]
    measured: Annotated[tuple[Measured, ...], add_measured]
    num_steps: Annotated[int, max]
    any_complete: Annotated[bool, any]
    all_complete: Annotated[bool, all]
    wall_ms: Annotated[float, max]
    extra_ms: Annotated[dict[int, float], _longest]
    report_cpu_ms: Annotated[float, max]
    lost: Annotated[LostTime | None, _most_lost]
    checked: Annotated[bool, any]
    figures: Annotated[FigureSums, add_figure_sums]
    spread: Annotated[Aggregate, add_aggregates]
    doubts: Annotated[Sentences, add_sentences]
    let_pass: Annotated[Sentences, add_sentences]
    problems: Annotated[Sentences, add_sentences]
    transfers: Annotated[tuple[Transfers, ...], add_transfers]
    power: Annotated[PowerSums, add_power]
    memory: Annotated[tuple[MemoryPeak, ...], add_peaks]
    environment: Annotated[EnvironmentSums | None, _environments]
    traits: Annotated[Traits, add_traits]
    samples: Annotated[dict[int, bytes], _all_samples]
    messages: Annotated[MessageSums, add_sums]
    experts: Annotated[ExpertSums, add_experts]
    arrivals: Annotated[ArrivalSums, add_arrivals]
    stages: Annotated[tuple[StageSum, ...], add_stages]
    race: Annotated[RaceCheck | None, add_checks] = None
    lower_bound: Annotated[bool, any] = False
    same_order: Annotated[bool | None, _all_known] = None

    def __post_init__(self) -> None:
        if not self.heard or list(self.heard) != joined(self.heard) or any(last < first for first, last in self.heard):
            raise ValueError("a part does not say for which ranks it speaks")
        if self.spread.rows.size != 7 * len(SPREAD_OVER_RANKS):
            raise ValueError("a part's spread is of other figures")

    @property
    def ranks(self) -> RankSet:
        """The ranks, in bounded space."""
        return RankSet.of(*self.heard)


def _runs(parts: Sequence[Sequence[Run]]) -> tuple[Run, ...]:
    return tuple(joined(chain(*parts)))


def _longest(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    longest = sorted(named_sum(max)(parts).items(), key=lambda extra: -extra[1])
    return dict(longest[:_MAX_EXTRA])


def _all_known(parts: Sequence[bool | None]) -> bool | None:
    return False if False in parts else None if None in parts else True


def _environments(parts: Sequence[EnvironmentSums | None]) -> EnvironmentSums | None:
    known = [part for part in parts if part is not None]
    return add_environments(known) if known else None


def _most_lost(parts: Sequence[LostTime | None]) -> LostTime | None:
    return max([part for part in parts if part is not None], key=lambda lost: lost.ms, default=None)


def _all_samples(parts: Sequence[dict[int, bytes]]) -> dict[int, bytes]:
    return {rank: sample for part in parts for rank, sample in part.items()}


_add = struct_sum(JobPart)


def merge(parts: Sequence[JobPart]) -> JobPart:
    """Merge one or more parts, in any order, without common ranks."""
    if len(parts) == 1:
        return parts[0]
    added = _add(sorted(parts, key=lambda part: part.heard))
    lowest = added.ranks.lowest
    extremes = [(int(low), int(high)) for number, _, _, _, low, _, high in added.spread.columns if number]
    return msgspec.structs.replace(
        added,
        # A group whose ranks are all above the lowest one does not contain it.
        transfers=tuple([row for row in added.transfers if row.first_rank <= lowest]),
        figures=_with_bounded_kernels(added.figures),
        samples=chosen(added.samples, added.ranks.count, {lowest, *chain(*extremes)}),
    )


def _with_bounded_kernels(sums: FigureSums) -> FigureSums:
    groups = sums.profiled.groups
    kept = [msgspec.structs.replace(group, tables=bounded(group.tables, len(groups))) for group in groups]
    return msgspec.structs.replace(sums, profiled=msgspec.structs.replace(sums.profiled, groups=tuple(kept)))


def part_of(window: RankWindow) -> JobPart:
    """The part of one rank."""
    rank, environment = window.rank, window.environment
    figures = figure_sums(window)
    spread = spread_figures(figures, SPREAD_OVER_RANKS)
    # The length and number of steps of a window that was cut short mean nothing.
    is_told = window.lost_ms is not None or not window.complete
    lost = (
        None
        if window.lost_ms is None or window.usual_step_ms <= 0
        else LostTime(window.lost_ms, window.lost_low_ms, window.lost_high_ms, window.usual_step_ms)
    )
    host = "" if environment is None else host_of(environment)
    stage = NO_STAGE if window.messages is None else window.messages.stage
    return JobPart(
        heard=((rank, rank),),
        measured=(Measured(window.terms, window.window, window.first_step, RankSet.of((rank, rank))),),
        num_steps=window.num_steps,
        any_complete=window.complete,
        all_complete=window.complete,
        wall_ms=window.wall_ms,
        extra_ms={} if is_told else {window.num_steps: window.wall_ms + window.report_cpu_ms},
        report_cpu_ms=0.0 if is_told else window.report_cpu_ms,
        lost=lost,
        checked=any(block.mode is Mode.SEQUENTIAL for block in window.profiled),
        figures=figures,
        spread=Aggregate.of([rank], np.array([[spread.get(name, math.nan) for name in SPREAD_OVER_RANKS]])),
        doubts=sentences_of(rank, window.doubts),
        let_pass=sentences_of(rank, window.let_pass),
        problems=sentences_of(rank, window.problems),
        transfers=transfers_of(window.collectives),
        power=power_of(rank, window.power, elsewhere=window.power_elsewhere),
        memory=peaks_of(window.memory),
        environment=None if environment is None else environment_of(rank, environment),
        traits=traits_of(window),
        samples={rank: packed(window)},
        messages=sums_of(rank, window.messages, host),
        experts=expert_sums(rank, window.experts),
        arrivals=arrivals_of(rank, window.arrivals, host, stage),
        stages=stages_of(window),
        race=window.race,
        lower_bound=window.lower_bound,
        same_order=window.same_order,
    )


_ENCODER = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes)
_DECODER = msgspec.msgpack.Decoder(JobPart, dec_hook=lambda _, content: np.frombuffer(content))


def encode(part: JobPart) -> bytes:
    """A part as it is sent between ranks; arrays as their 64-bit numbers."""
    return _ENCODER.encode(part)


def decode(message: Any) -> JobPart:
    """Decode a rank's part; raises msgspec.DecodeError."""
    return _DECODER.decode(message)


# -- windows of single ranks, whole, for a bounded number of ranks

# Up to this many ranks, each is kept.
MAX_SAMPLES = 16
# Of more ranks, windows above this compressed size go without tables, except rank 0's.
_MAX_SAMPLE_BYTES = 7_000
_TABLES = ("kernels", "pairs", "dimension_pairs", "dimensions", "collectives", "power")

_WINDOW_DECODER = msgspec.msgpack.Decoder(RankWindow)


def packed(window: RankWindow) -> bytes:
    """One rank's window, compressed, without what other fields of the part hold."""
    return zlib.compress(
        _ENCODER.encode(
            msgspec.structs.replace(
                window,
                environment=None,
                messages=None,
                experts=None,
                arrivals=(),
                calls=(),
                race=None,
                exposure=ExposureSums(),
            )
        ),
        1,
    )


def unpacked(content: bytes) -> RankWindow:
    """The inverse of ``packed``."""
    return _WINDOW_DECODER.decode(zlib.decompress(content))


def without_tables(window: RankWindow) -> RankWindow:
    """The same window without its tables."""
    return msgspec.structs.replace(window, **dict.fromkeys(_TABLES, ()))


def chosen(samples: Mapping[int, bytes], num_ranks: int, wanted: Collection[int]) -> dict[int, bytes]:
    """The samples to keep in a part of ``num_ranks`` ranks: all if few, else those of the wanted ranks."""
    if num_ranks <= MAX_SAMPLES:
        return dict(sorted(samples.items()))
    return {rank: _small(rank, samples[rank]) for rank in sorted(wanted)}


def _small(rank: int, content: bytes) -> bytes:
    """The same sample, without tables if it is large."""
    if not rank or len(content) <= _MAX_SAMPLE_BYTES:
        return content
    return packed(without_tables(unpacked(content)))
