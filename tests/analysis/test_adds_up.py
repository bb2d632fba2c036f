"""Figures that are sums or ratios of each other are shown consistently: in windows, their tables and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from overlap_callbacks.analysis.design import rank_weights
from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, Rhythm, TimedBlock
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.report.record import read
from tests.analysis.test_aggregate import rank_window, report_of

OV = Mode.OVERLAPPED
RECORDS = sorted((Path(__file__).parents[1] / "report" / "records").glob("*.jsonl"))


def assert_adds_up(figures: dict[str, Estimate]) -> None:
    value = {name: figure.value for name, figure in figures.items()}
    lost = value["compute_ms"] - value["compute_isolated_ms"]
    expected = {
        "compute_slowdown": value["compute_ms"] / value["compute_isolated_ms"] - 1,
        "e2e_ideal_ms": value["e2e_overlapped_ms"] - lost,
        "e2e_sequential_model_ms": value["e2e_ideal_ms"]
        + value["hidden_comm_ms"]
        - (value["waiting_ms"] - value["waiting_isolated_ms"] if "waiting_ms" in value else 0.0),
        "gap_to_ideal": value["e2e_overlapped_ms"] / value["e2e_ideal_ms"] - 1,
        "speedup_vs_sequential": value["e2e_sequential_ms"] / value["e2e_overlapped_ms"] - 1,
        "sequential_model_error": value["e2e_sequential_model_ms"] / value["e2e_sequential_ms"] - 1,
        "exposed_comm_ms": value["comm_ms"] - value["hidden_comm_ms"],
        "hidden_comm_fraction": value["hidden_comm_ms"] / value["comm_ms"],
    }
    if "attainable_ms" in value:  # not in the earliest records
        expected["attainable_ms"] = max(
            value.get("slowest_compute_ms", value["compute_busy_isolated_ms"]),
            value["comm_isolated_ms"] - value.get("waiting_isolated_ms", 0.0),
        )
    if "attained_fraction" in value and 0 < value["attained_fraction"] < 1:
        gain = value["e2e_sequential_ms"] - value["attainable_ms"]
        expected["attained_fraction"] = (value["e2e_sequential_ms"] - value["e2e_overlapped_ms"]) / gain
    assert {name: value[name] for name in expected} == pytest.approx(expected)
    for figure in figures.values():
        assert figure.ci_low is None or figure.ci_low <= figure.value <= figure.ci_high


def simulated(seed: int, rank: int = 0, window: int = 0) -> RankWindow:
    """A window with heavy tails, a rhythm, and steps and blocks that are missing on this rank."""
    chance = np.random.default_rng([seed, rank, window])
    rhythm = Rhythm(7, 3, 30.0, 100.0)
    timed, profiled = [], []

    def tail() -> float:
        return float(np.exp(chance.normal(0, 0.02)) + (chance.random() < 0.1) * chance.exponential(0.5))

    for number, letter in enumerate("OSOSOSOSSOSOSOSO"):
        steps = tuple(500 * window + 3 * number + place for place in (1, 2) if chance.random() < 0.9)
        slow = [1.3 if step % 7 == 3 else 1.0 for step in steps]
        arm = OV if letter == "O" else Mode.SEQUENTIAL
        base = 100.0 + 40 * rank + 15 * (arm is not OV)
        if steps:
            timed.append(TimedBlock(arm, number, tuple(base * each * tail() for each in slow), steps))
    lost = int(chance.integers(8))
    for number, letter in enumerate("OSOSSOSO"):
        arm = OV if letter == "O" else Mode.SEQUENTIAL
        step = 500 * window + 60 + 2 * number
        if number != lost:
            compute, comm = 70 * tail() * (1.08 if arm is OV else 1), 30 * tail()
            hidden = comm * (0.7 if arm is OV else 0.01)
            block = ProfiledBlock(
                arm, number, 1, compute, 0.9 * compute, 1.1 * comm, comm, hidden, hidden, 0.0,
                idle_ms=3 * tail(), step_ms=110 * tail(), steps=(step,),
            )  # fmt: skip
            profiled.append(block)
    return rank_window(rank, window=window, timed=tuple(timed), profiled=tuple(profiled), rhythms=(rhythm,))


@pytest.mark.parametrize("seed", range(8))
def test_figures_of_a_window_add_up(seed: int) -> None:
    assert_adds_up(figures_of([simulated(seed, rank) for rank in range(3)]))


@pytest.mark.parametrize("seed", range(8))
def test_figures_of_a_run_add_up(seed: int) -> None:
    summary = RunSummary(None, [report_of(simulated(seed, 0, w), simulated(seed, 1, w)) for w in range(5)])
    assert_adds_up(summary.pooled())


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_figures_of_the_windows_and_runs_of_real_records_add_up(path: Path) -> None:
    record = read(path)
    windows = [record.whole(window) for window in record.windows if window.samples]
    assert windows
    for window in windows:
        figures = figures_of(window.samples)
        if "e2e_ideal_ms" in figures:
            assert_adds_up(figures)
    pooled = record.pooled()
    if "e2e_ideal_ms" in pooled:
        assert_adds_up(pooled)


@pytest.mark.parametrize("seed", range(8))
def test_weights_of_profiled_blocks_give_the_kernel_time_that_is_shown(seed: int) -> None:
    """The tables of kernels take each step with these weights, so that their rows add up to it."""
    ranks = [simulated(seed, rank) for rank in range(3)]
    sums = {mode: 0.0 for mode in Mode}
    for rank in ranks:
        weights = rank_weights(rank.profiled, [1] * len(rank.profiled), rank.rhythms)
        for block, weight in zip(rank.profiled, weights, strict=True):
            sums[block.mode] += weight * block.compute_ms / len(ranks)
    figures = figures_of(ranks)
    assert figures["compute_ms"].value == pytest.approx(sums[OV])
    assert figures["compute_isolated_ms"].value == pytest.approx(sums[Mode.SEQUENTIAL])
