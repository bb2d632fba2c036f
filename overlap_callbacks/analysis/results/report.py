"""The report of one window over all ranks: plain data."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.catalogue import _COMPARES, FIGURES
from overlap_callbacks.analysis.results.power import JobPower, PowerTrace, SlowdownCause
from overlap_callbacks.analysis.results.power_metrics import power_metrics
from overlap_callbacks.analysis.results.window import (
    CollectiveTime,
    DimensionTime,
    KernelTime,
    PairTime,
    RankWindow,
    StepTimeline,
)


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95 % confidence interval.

    Attributes:
        value: the figure.
        ci_low, ci_high: bounds of the interval; None where there are too few blocks for one.
        num_steps: counted steps that the figure rests on.
        num_blocks: blocks (or, for a run, windows) that it rests on.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    num_steps: int
    num_blocks: int


class Spread(msgspec.Struct, frozen=True):
    """One figure over the ranks.

    Attributes:
        low, high: the smallest and largest of the ranks' values.
        low_rank, high_rank: the ranks that have them.
        std: standard deviation over ranks; None for one rank.
    """

    low: float
    high: float
    low_rank: int
    high_rank: int
    std: float | None


class OverlapReport(msgspec.Struct, frozen=True, kw_only=True):
    """One window, all ranks. A figure that was not measured is None, never zero and never NaN.

    The figures (``FIGURES`` gives unit and meaning of each) are means over the ranks heard; each carries its confidence
    interval and number of steps.

    Attributes:
        window, first_step, num_steps: which window.
        complete: False where it was cut short.
        control: an A/A run: both sides overlapped.
        world_size: ranks of the job.
        ranks: the ranks that the report speaks for.
        backend, device: of the lowest rank heard.
        valid: False where the sequential steps were not sequential; ``problems`` says why.
        problems: what is missing or doubtful, in words.
        measurement_overhead: extra time that the window cost, as a fraction of the time from one window to the next.
        wall_ms: host time of the window, the longest over ranks.
        spread: by figure, over the ranks.
        kernels: means over ranks, those that lose most time first.
        pairs: kernel families beside collectives and the other way round, means over ranks, the dearest first.
        dimensions: communication by dimension of parallelism, means over the ranks that have it.
        pictures: a profiled step of each mode, of rank 0.
        collectives: of the lowest rank heard.
        power: over the devices of the ranks heard; None where no rank reads any.
        power_trace: power against time, of rank 0's device.
        power_verdict: what the compute slowdown is due to, as far as clocks and the device's counters tell.
        tokens_per_step: that one step of the job trains on; None where not known.
        samples: what each rank measured.
    """

    window: int
    first_step: int
    num_steps: int
    complete: bool
    control: bool
    world_size: int
    ranks: tuple[int, ...]
    backend: str
    device: str
    valid: bool
    problems: tuple[str, ...]
    measurement_overhead: float | None
    wall_ms: float
    compute_slowdown: Estimate | None = None
    overlap_ratio: Estimate | None = None
    e2e_overlapped_ms: Estimate | None = None
    e2e_ideal_ms: Estimate | None = None
    e2e_sequential_model_ms: Estimate | None = None
    e2e_sequential_ms: Estimate | None = None
    speedup_vs_sequential: Estimate | None = None
    gap_to_ideal: Estimate | None = None
    sequential_model_error: Estimate | None = None
    compute_ms: Estimate | None = None
    compute_isolated_ms: Estimate | None = None
    compute_busy_ms: Estimate | None = None
    compute_busy_isolated_ms: Estimate | None = None
    comm_ms: Estimate | None = None
    comm_isolated_ms: Estimate | None = None
    hidden_comm_ms: Estimate | None = None
    exposed_comm_ms: Estimate | None = None
    hidden_comm_fraction: Estimate | None = None
    comm_slowdown: Estimate | None = None
    comm_ratio: Estimate | None = None
    p2p_ms: Estimate | None = None
    idle_ms: Estimate | None = None
    residual_overlap: Estimate | None = None
    spread: dict[str, Spread] = {}
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    pictures: tuple[StepTimeline, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    power: JobPower | None = None
    power_trace: PowerTrace | None = None
    power_verdict: SlowdownCause | None = None
    tokens_per_step: int | None = None
    samples: tuple[RankWindow, ...] = ()

    def figures(self) -> dict[str, Estimate]:
        """The figures that were measured, by name, in the order of ``FIGURES``."""
        found = ((figure.name, getattr(self, figure.name)) for figure in FIGURES)
        return {name: value for name, value in found if value is not None}

    def metrics(self) -> dict[str, float]:
        """The report as flat metrics, under the names that every sink uses; absent figures have no key.

        An invalid window gives no figure that rests on its sequential steps.
        """
        flat: dict[str, float] = {}
        for name, value in self.figures().items():
            if not self.valid and name in _COMPARES:
                continue
            flat[f"overlap/{name}"] = value.value
            if value.ci_low is not None and value.ci_high is not None:
                flat[f"overlap/{name}_ci_low"] = value.ci_low
                flat[f"overlap/{name}_ci_high"] = value.ci_high
        for name, spread in self.spread.items():
            if not self.valid and name in _COMPARES:
                continue
            flat[f"overlap/{name}_rank_low"] = spread.low
            flat[f"overlap/{name}_rank_high"] = spread.high
        if self.measurement_overhead is not None:
            flat["overlap/measurement_overhead"] = self.measurement_overhead
        flat["overlap/ranks_heard"] = len(self.ranks)
        flat["overlap/valid"] = float(self.valid)
        flat["overlap/complete"] = float(self.complete)
        flat["overlap/control"] = float(self.control)
        totals = self._traffic_metrics()
        power = power_metrics(self.power, self.power_verdict, tokens_per_step=self.tokens_per_step, valid=self.valid)
        return {**flat, **totals, **self._dimension_metrics(), **power}

    def _traffic_metrics(self) -> dict[str, float]:
        """Bytes and messages of each collective, and its bus bandwidth alone, in sequential steps."""
        flat: dict[str, float] = {}
        sent: dict[str, tuple[float, float]] = {}  # bytes over a link, and the time they took
        for row in self.collectives:
            key = f"comm/{row.operator.strip('_').replace('.', '_')}"
            for suffix, amount in (("bytes", row.bytes_in), ("messages", row.messages)):
                flat[f"{key}_{suffix}"] = flat.get(f"{key}_{suffix}", 0) + amount
            factor = bus_factor(collective_of(row.operator), row.group_size)
            if self.valid and factor and row.isolated_ms:
                size, time_ms = sent.get(key, (0.0, 0.0))
                # The size of a gather is that of its result, of a reduce-scatter that of its input.
                sent[key] = (size + factor * max(row.bytes_in, row.bytes_out), time_ms + row.isolated_ms)
        return {**flat, **{f"{key}_busbw_gb_s": size / time_ms / 1e6 for key, (size, time_ms) in sent.items()}}

    def _dimension_metrics(self) -> dict[str, float]:
        flat: dict[str, float] = {}
        for row in self.dimensions:
            key = f"dimension/{row.dimension.replace('+', '_')}"
            flat[f"{key}_comm_ms"] = row.comm_ms
            flat[f"{key}_exposed_ms"] = row.exposed_ms
            flat[f"{key}_bytes"] = row.bytes_in
            if self.valid and row.slowdown is not None:
                flat[f"{key}_comm_slowdown"] = row.slowdown
        return flat
