"""Figures of points whose times are known."""

from __future__ import annotations

import math

import msgspec
import pytest

from overlap_callbacks.analysis.bench import gemm_figures, transfer_figures
from overlap_callbacks.analysis.results.bench import BOTH, Block, GemmRound
from tests.analysis.bench_results import MIB, gemm_results, transfer_results


def test_a_known_slowdown_gives_every_figure() -> None:
    point = gemm_figures(gemm_results().rounds, 2)[0]
    assert point.flop == 2 * 256**3
    assert point.slowdown is not None
    assert point.slowdown.value == pytest.approx(0.25)
    assert point.slowdown.ci_low is not None
    assert point.all_reduce_slowdown is not None
    assert point.all_reduce_slowdown.value == pytest.approx(0.5)
    # Beside each other products run at 1/1.25 of their rate and all-reduces at 1/1.5 of theirs.
    assert point.speedup is not None
    assert point.speedup.value == pytest.approx(1 / 1.25 + 1 / 1.5 - 1)
    alone_ms = 2.0 * math.sqrt(1.0 * 1.01)
    assert point.gemm_alone_ms is not None
    assert point.gemm_alone_ms.value == pytest.approx(alone_ms)
    assert point.alone_tflop_s is not None
    assert point.alone_tflop_s.value == pytest.approx(2 * 256**3 / (alone_ms * 1e-3) / 1e12)
    assert point.beside_tflop_s is not None
    assert point.beside_tflop_s.value == pytest.approx(point.alone_tflop_s.value / 1.25)
    # Of two ranks, what passes a link is the message itself.
    assert point.alone_busbw_gb_s is not None
    assert point.alone_busbw_gb_s.value == pytest.approx(MIB / 4e-3 / 1e9)


def test_bus_bandwidth_counts_what_passes_a_link() -> None:
    of_four = gemm_figures(gemm_results().rounds, 4)[0].alone_busbw_gb_s
    assert of_four is not None
    assert of_four.value == pytest.approx(1.5 * MIB / 4e-3 / 1e9)


def test_unmeasured_figures_are_absent() -> None:
    rounds = []
    for found in gemm_results().rounds:
        blocks = tuple([_without_products(block) if block.condition == BOTH else block for block in found.blocks])
        rounds.append(msgspec.structs.replace(found, blocks=blocks))
    point = gemm_figures(rounds, 2)[0]
    assert point.slowdown is None
    assert point.beside_tflop_s is None
    assert point.speedup is None
    assert point.compute_w is None
    assert point.alone_tflop_s is not None
    assert point.all_reduce_slowdown is not None


def _without_products(block: Block) -> Block:
    return msgspec.structs.replace(block, gemm_ms=None, gemms=0)


def test_one_round_gives_figures_without_intervals() -> None:
    one = [found for found in gemm_results().rounds if isinstance(found, GemmRound) and found.round == 0]
    slowdown = gemm_figures(one, 2)[0].slowdown
    assert slowdown is not None
    assert (slowdown.ci_low, slowdown.ci_high) == (None, None)


def test_bandwidths_of_collectives_are_those_of_the_link() -> None:
    points = transfer_figures(transfer_results(latency_ms=0.0).rounds)
    assert [(point.point.kind, point.point.message_bytes) for point in points] == [
        ("all_reduce", 1024), ("all_reduce", MIB), ("send_recv", 1024), ("send_recv", MIB),
    ]  # fmt: skip
    for point in points:
        assert point.busbw_gb_s.value == pytest.approx(2.0, rel=0.01)
        assert point.busbw_gb_s.ci_low is not None
        assert point.algbw_gb_s.value == pytest.approx(point.point.message_bytes / point.time_ms.value / 1e6)
