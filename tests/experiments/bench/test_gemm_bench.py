"""One point in one round: a known slowdown is reported, and which products count."""

from __future__ import annotations

import statistics
import time

import msgspec
import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.bench.figures import gemm_figures
from overlap_callbacks.analysis.results.bench import BOTH, COMMUNICATION, COMPUTE, GemmPoint, GemmRound
from overlap_callbacks.experiments.bench.gemm_bench import Work, measure_gemm
from overlap_callbacks.experiments.bench.host_trials import HostTrials
from overlap_callbacks.experiments.bench.ranks import OneProcess
from overlap_callbacks.experiments.bench.sensors import Sensors
from overlap_callbacks.experiments.bench.trials import Range, Trial
from overlap_callbacks.experiments.loopback.job import open_job
from overlap_callbacks.experiments.loopback.settings import LoopSettings
from tests.distributed import run_alone

RANKS_LOAD = ("tests.experiments.bench.test_gemm_bench",)
ELEMENTS, ALL_REDUCE_MS, PRODUCT_MS = 4096, 25.0, 4.0
POINT = GemmPoint("fp32", 0, 4 * ELEMENTS, 64)


def _measure_known(factor: float) -> tuple[bytes, float]:
    """A point whose products take ``factor`` times as long while an all-reduce of known length is in flight."""
    busy = False
    factors: list[float] = []

    def product() -> None:
        start = now = time.perf_counter_ns()
        left_ns = 1e6 * PRODUCT_MS
        while left_ns > 0:
            rate = factor if busy else 1.0
            time.sleep(0)  # lets the threads of the link have the interpreter
            before, now = now, time.perf_counter_ns()
            left_ns -= (now - before) / rate
        if busy:
            factors.append((now - start) / 1e6 / PRODUCT_MS)

    message = torch.zeros(ELEMENTS)

    def transfer() -> None:
        nonlocal busy
        busy = True
        dist.all_reduce(message)
        busy = False

    with open_job(LoopSettings("cpu", gb_s=4 * ELEMENTS / (1e6 * ALL_REDUCE_MS))):
        work = Work(product, transfer, 2 * 64**3)
        rounds = [measure_gemm(POINT, i, work, HostTrials(), OneProcess(), Sensors(), 0.05) for i in range(2)]
    return msgspec.json.encode(rounds), statistics.median(factors)


@pytest.mark.alone
def test_a_known_slowdown_is_reported_on_the_loopback_link() -> None:
    factor = 1.5
    content, seen = run_alone(_measure_known, factor)
    rounds = msgspec.json.decode(content, type=list[GemmRound])
    assert [block.condition for block in rounds[0].blocks] == [
        COMPUTE, COMMUNICATION, BOTH, BOTH, COMMUNICATION, COMPUTE,
    ]  # fmt: skip
    (point,) = gemm_figures(rounds, 2)
    assert point.slowdown is not None
    assert point.slowdown.value == pytest.approx(factor - 1, abs=0.1)
    assert point.slowdown.value == pytest.approx(seen - 1, abs=0.1)
    assert point.all_reduce_alone_ms is not None
    assert point.all_reduce_alone_ms.value >= ALL_REDUCE_MS
    assert point.covered is not None
    assert point.covered > 0.9
    assert point.flop == 2 * 64**3
    # Without a sensor there is no power; with one there is some.
    assert point.both_w is None or point.both_w.value > 0


def test_products_count_by_their_beginning_and_only_if_they_end_beside_transfers() -> None:
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


def test_an_error_of_a_transfer_reaches_whoever_measures() -> None:
    def transfer() -> None:
        raise RuntimeError("the link is gone")

    with pytest.raises(RuntimeError, match="the link is gone"):
        HostTrials().both(lambda: time.sleep(0.001), transfer, 1, 3)
