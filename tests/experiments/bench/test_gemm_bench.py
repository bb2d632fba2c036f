"""One point in one round: a known slowdown is reported, and which products count."""

from __future__ import annotations

import bisect
import math
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.bench import gemm_figures
from overlap_callbacks.analysis.results.bench import BOTH, COMMUNICATION, COMPUTE, GemmPoint, GemmRound
from overlap_callbacks.experiments.bench.gemm_bench import Work, measure_gemm
from overlap_callbacks.experiments.bench.site import Call, HostTrials, Range, Ranks, Sensors, Trial
from overlap_callbacks.experiments.loopback.collectives import LoopSettings
from overlap_callbacks.experiments.loopback.job import open_job
from tests.distributed import run_alone
from tests.margins import near

RANKS_LOAD = ("tests.experiments.bench.test_gemm_bench",)
ELEMENTS, ALL_REDUCE_MS, PRODUCT_MS = 4096, 25.0, 4.0
POINT = GemmPoint("fp32", 0, 4 * ELEMENTS, 64)


class _Product:
    """Spins for a time by the clock, ``factor`` times as long while an all-reduce is in flight.

    Attributes:
        ranges: of all products so far, as they see it.
        slowed_ms: by how much the all-reduce made each longer.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.busy = False
        self.ranges: list[Range] = []
        self.slowed_ms: list[float] = []

    def __call__(self) -> None:
        start = now = time.perf_counter_ns()
        left_ns, lost_ns = 1e6 * PRODUCT_MS, 0.0
        while left_ns > 0:
            rate = self._factor if self.busy else 1.0
            time.sleep(0)  # lets the threads of the link have the interpreter
            before, now = now, time.perf_counter_ns()
            left_ns -= (now - before) / rate
            lost_ns += (now - before) * (1 - 1 / rate)
        self.ranges.append(Range(start, now))
        self.slowed_ms.append(lost_ns / 1e6)


class _KeptTrials(HostTrials):
    """Keeps the calls that count, since the block before."""

    def __init__(self) -> None:
        self.calls: list[Range] = []

    def run(self, call: Call | None, calls: int, transfer: Call | None, transfers: int) -> Trial:
        found = super().run(call, calls, transfer, transfers)
        self.calls += found.covered()
        return found


class _KeptBlocks(Ranks):
    """Keeps the calls of each block."""

    def __init__(self, trials: _KeptTrials) -> None:
        self._trials = trials
        self.blocks: list[list[Range]] = []

    def agree(self, value: Any) -> Any:
        self._trials.calls = []  # these were a look at how long a product takes, before the blocks
        return super().agree(value)

    def gather(self, own: Any) -> Any:
        self.blocks.append(self._trials.calls)
        self._trials.calls = []
        return super().gather(own)


@dataclass(frozen=True)
class _Known:
    """Data on a block's products besides the measurements.

    Attributes:
        log_least, log_most: mean logarithms of their times in ms, by the product itself and by its caller.
        slowed_ms: by how much the all-reduce made them longer, on average.
    """

    log_least: float
    log_most: float
    slowed_ms: float


def _measure_known(factor: float) -> tuple[bytes, list[_Known | None]]:
    """A point whose products take ``factor`` times as long while an all-reduce of known length is in flight."""
    product, trials = _Product(factor), _KeptTrials()
    ranks = _KeptBlocks(trials)
    message = torch.zeros(ELEMENTS)

    def transfer() -> None:
        product.busy = True
        dist.all_reduce(message)
        product.busy = False

    with open_job(LoopSettings("cpu", gb_s=4 * ELEMENTS / (1e6 * ALL_REDUCE_MS))):
        work = Work(product, transfer, 2 * 64**3)
        site: Any = SimpleNamespace(trials=trials, ranks=ranks, sensors=Sensors())
        rounds = [measure_gemm(POINT, number, work, site, 0.05) for number in range(2)]
    return msgspec.json.encode(rounds), [_known(product, calls) for calls in ranks.blocks]


def _known(product: _Product, calls: list[Range]) -> _Known | None:
    if not calls:
        return None
    # Each call has one product, which lies within it.
    places = [bisect.bisect_left(product.ranges, Range(call.start_ns, 0)) for call in calls]
    within = [product.ranges[place] for place in places]
    assert all(
        call.start_ns <= own.start_ns <= own.end_ns <= call.end_ns for call, own in zip(calls, within, strict=True)
    )
    return _Known(
        statistics.fmean(math.log(own.ms) for own in within),
        statistics.fmean(math.log(call.ms) for call in calls),
        statistics.fmean(product.slowed_ms[place] for place in places),
    )


def test_a_known_slowdown_is_reported_on_the_loopback_link() -> None:
    """By hand products are known from both sides: what they see themselves, and what their caller sees."""
    factor = 1.5
    content, blocks = run_alone(_measure_known, factor)
    rounds = msgspec.json.decode(content, type=list[GemmRound])
    conditions = [COMPUTE, COMMUNICATION, BOTH, BOTH, COMMUNICATION, COMPUTE]
    assert [block.condition for block in rounds[0].blocks] == conditions
    assert [measured.gemms_per_call for measured in rounds] == [1, 1]
    known = {
        condition: [own for own, of in zip(blocks, 2 * conditions, strict=True) if of == condition and own is not None]
        for condition in (COMPUTE, BOTH)
    }
    (point,) = gemm_figures(rounds, 2)
    assert point.slowdown is not None
    least, most = (
        {condition: statistics.fmean(getattr(own, side) for own in known[condition]) for condition in known}
        for side in ("log_least", "log_most")
    )
    assert near(math.expm1(least[BOTH] - most[COMPUTE]), point.slowdown.value)
    assert near(point.slowdown.value, math.expm1(most[BOTH] - least[COMPUTE]))
    # All-reduces are in flight for nearly all of the time.
    assert max(own.slowed_ms for own in known[COMPUTE]) == 0
    assert near(0.5 * (factor - 1) * PRODUCT_MS, min(own.slowed_ms for own in known[BOTH]))
    assert point.all_reduce_alone_ms is not None
    assert point.all_reduce_alone_ms.value >= ALL_REDUCE_MS
    assert point.covered is not None
    assert 0 < point.covered <= 1
    assert point.flop == 2 * 64**3
    # Without a sensor there is no power; with one there is some.
    assert point.both_w is None or point.both_w.value > 0


def test_products_count_by_their_start_and_only_if_they_end_during_transfers() -> None:
    transfers = (Range(100, 200), Range(200, 300))
    early, first, straddling, late, after = (
        Range(90, 110),
        Range(110, 150),
        Range(190, 310),
        Range(210, 250),
        Range(290, 350),
    )
    trial = Trial((early, first, straddling, late, after), transfers)
    assert trial.begun_beside() == [first, straddling]
    assert trial.covered() == [first]
    assert trial.transfers_ms == pytest.approx(200 / 1e6)


def test_an_error_of_a_transfer_reaches_the_caller() -> None:
    def transfer() -> None:
        raise RuntimeError("the link is gone")

    with pytest.raises(RuntimeError, match="the link is gone"):
        HostTrials().run(lambda: time.sleep(0.001), 1, transfer, 3)
