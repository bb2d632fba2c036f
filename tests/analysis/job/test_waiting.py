"""Collectives and messages that wait for each other, as NCCL's do: what is true follows from the schedule alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.aggregate import aggregate_windows
from overlap_callbacks.analysis.job.merging import merge, part_of
from overlap_callbacks.analysis.job.part import decode, encode
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.job.waiting import MAX_MESSAGE_BYTES, WaitingSums, without_waiting
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.collective_calls import MAX_BINS, collective_calls
from overlap_callbacks.analysis.kernels.matching import matched
from overlap_callbacks.analysis.kernels.receives import Transfers, transfer_starts
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.times import KernelSums, profiled_block
from overlap_callbacks.analysis.results.collective_calls import ProfiledStep
from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.analysis.results.messages import RankMessages, RankRow
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime, RankWindow, TimedBlock
from overlap_callbacks.analysis.run_summary import RunSummary
from tests.analysis.test_adds_up import assert_adds_up
from tests.analysis.test_aggregate import rank_window
from tests.columns import GEMM, P2P, REDUCE, columns
from tests.issued import FakeGroup, issue

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
TRANSFER = 21.0
NO_MESSAGES = Transfers(None, {})
ORDER = "OSSOSOOS"
EVEN, LATE = [20.0] * 6, [22.0] * 6
COMPUTE = 18 * 22.0


def schedule(
    layers: Sequence[Sequence[float]], mode: Mode, transfer: float
) -> tuple[list[list[tuple[float, float]]], float]:
    """When each rank's all-reduces run in a step, and its end. Each layer computes once forward, twice backward."""
    calls: list[list[tuple[float, float]]] = [[] for _ in layers]
    now = [sum(of_rank) for of_rank in layers]
    end = 0.0
    for place in range(len(layers[0])):
        now = [time + 2 * of_rank[place] for time, of_rank in zip(now, layers, strict=True)]
        starts = [max(time, end) for time in now]
        end = max(starts) + transfer
        for of_rank, start in zip(calls, starts, strict=True):
            of_rank.append((start, end))
        if mode is SEQ:
            now = [end for _ in now]
    return calls, max(end, *now)


def windows(layers: Sequence[Sequence[float]], factor: float = 1.0) -> list[RankWindow]:
    """What the ranks measure if transfers take longer by a factor in overlapped steps."""
    found = []
    steps = {mode: schedule(layers, mode, TRANSFER * (factor if mode is OV else 1)) for mode in Mode}
    modes = [OV if letter == "O" else SEQ for letter in ORDER]
    for rank, of_rank in enumerate(layers):
        rows = []
        for number, mode in enumerate(modes):
            base, calls = 1000.0 * number, steps[mode][0][rank]
            ends = np.cumsum(of_rank)
            computes = [*zip([0, *ends[:-1]], ends, strict=True)]
            start = ends[-1]
            for call, length in zip(calls, of_rank, strict=True):
                computes += [(start, start + length), (start + length, start + 2 * length)]
                start = start + 2 * length if mode is OV else call[1]
            rows += [(GEMM, Kind.COMPUTE, number, base + a, base + b) for a, b in computes]
            rows += [(REDUCE, Kind.COMMUNICATION, number, base + a, base + b) for a, b in calls]
        kernels = columns(rows)
        issued = {
            number: [issue("allreduce_", "data", group_size=len(layers))] * len(of_rank) for number in range(len(modes))
        }
        numbered = {n: ProfiledStep(100 + n, n, mode is SEQ) for n, mode in enumerate(modes)}
        sums = KernelSums(kernels)
        of = {mode: np.array([n for n, own in enumerate(modes) if own is mode]) for mode in Mode}
        found.append(
            rank_window(
                rank,
                timed=tuple([TimedBlock(mode, n, (steps[mode][1],) * 2) for n, mode in enumerate(modes)]),
                profiled=tuple([profiled_block(mode, n, sums, [n], steps[mode][1]) for n, mode in enumerate(modes)]),
                pairs=pair_times_of(kernels, of[OV], of[SEQ]).by_kind,
                calls=collective_calls(
                    kernels, matched(kernels, issued, of[SEQ].tolist()), issued, numbered, rank, NO_MESSAGES
                ),
            )
        )
    return found


def report(*windows_of_ranks: RankWindow) -> OverlapReport:
    return aggregate_windows(windows_of_ranks, world_size=len(windows_of_ranks), every_n_steps=500)


def values(found: OverlapReport) -> dict[str, float]:
    return {name: figure.value for name, figure in found.figures().items()}


def beside_compute(found: OverlapReport) -> float | None:
    (pair,) = [pair for pair in found.pairs if pair.victim == "all_reduce" and pair.beside == "gemm"]
    return pair.slowdown


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_late_rank_makes_waiting_and_no_slowness(factor: float) -> None:
    found = report(*windows([EVEN, LATE], factor))
    value = values(found)
    assert found.valid
    assert found.comm_slowdown is not None
    assert (found.comm_slowdown.ci_low, found.comm_slowdown.ci_high) == pytest.approx((factor - 1,) * 2, abs=1e-6)
    assert beside_compute(found) == pytest.approx(factor - 1, abs=1e-6)
    calls, step = schedule([EVEN, LATE], OV, TRANSFER * factor)
    in_flight = [sum(end - start for start, end in of_rank) for of_rank in calls]
    assert value["waiting_ms"] == pytest.approx((in_flight[0] - in_flight[1]) / 2, rel=1e-6)
    # Sequential steps meet after each layer: of 2 ms a product, the late rank has 6 more forward, 12 more backward.
    assert value["waiting_isolated_ms"] == pytest.approx((6 + 12) * 2.0 / 2, rel=1e-6)
    # The late rank's compute, its transfers, and what is hidden there.
    hidden = sum(max(0.0, min(end, COMPUTE) - start) for start, end in calls[1])
    assert value["e2e_sequential_model_ms"] == pytest.approx(step + hidden, rel=1e-6)
    if factor == 1.0:
        assert value["sequential_model_error"] == pytest.approx(0.0, abs=1e-6)


def test_the_share_of_the_attainable_gain_is_bounded_by_the_slowest_rank_s_compute() -> None:
    value = values(report(*windows([EVEN, LATE])))
    step, sequential = (schedule([EVEN, LATE], mode, TRANSFER)[1] for mode in (OV, SEQ))
    assert value["slowest_compute_ms"] == value["attainable_ms"] == pytest.approx(COMPUTE)
    assert value["attained_fraction"] == pytest.approx((sequential - step) / (sequential - COMPUTE))


def test_of_each_collective_another_rank_may_be_the_last() -> None:
    ranks = windows([[20.0, 25.0] * 3, [25.0, 20.0] * 3])
    kernels_ms = [next(block.comm_ms for block in rank.profiled if block.arm is SEQ) for rank in ranks]
    row = CollectiveTime("allreduce_", "layers (data)", 2, "nccl", 6, 48, 48, None, first_rank=0)
    rows = [(msgspec.structs.replace(row, kernels_ms=ms),) for ms in kernels_ms]
    found = report(*[msgspec.structs.replace(rank, collectives=own) for rank, own in zip(ranks, rows, strict=True)])
    assert min(kernels_ms) > 6 * TRANSFER + 1
    assert found.collectives[0].transfer_ms == pytest.approx(6 * TRANSFER, rel=1e-5)
    assert found.comm_slowdown is not None
    assert found.comm_slowdown.value == pytest.approx(0.0, abs=1e-6)
    assert beside_compute(found) == pytest.approx(0.0, abs=1e-6)


def test_the_model_of_a_sequential_step_holds_where_ranks_are_late_in_turn() -> None:
    value = values(report(*windows([[20.0, 25.0] * 3, [25.0, 20.0] * 3])))
    assert value["waiting_isolated_ms"] > 0
    assert value["sequential_model_error"] == pytest.approx(0.0, abs=1e-6)


def test_figures_of_a_run_are_those_of_its_windows() -> None:
    one = report(*windows([EVEN, LATE]))
    other = report(*windows([EVEN, [23.0] * 6], 1.1))
    pooled = RunSummary(None, [one, other]).pooled()
    assert pooled["comm_slowdown"].value == pytest.approx(0.05, abs=0.002)
    for figures in (one.figures(), other.figures(), pooled):
        assert_adds_up(figures)


def test_any_order_of_ranks_and_any_way_gives_the_same() -> None:
    parts = [part_of(window) for window in windows([EVEN, LATE, [21.0] * 6])]
    reports = [
        report_of(merge([merge([decode(encode(parts[place])) for place in order[:2]]), parts[order[2]]]),
                  world_size=3, every_n_steps=500)
        for order in ((0, 1, 2), (2, 1, 0), (2, 0, 1))
    ]  # fmt: skip
    assert all(values(one) == pytest.approx(values(other)) for one, other in pairwise(reports))


def test_what_ranks_cannot_compare_counts_whole_and_has_no_waiting() -> None:
    own = windows([EVEN, LATE])
    found = report(*[rank_window(w.rank, timed=w.timed, profiled=w.profiled, pairs=w.pairs) for w in own])
    assert found.waiting_ms is None
    assert found.comm_slowdown is not None
    assert found.comm_slowdown.value > 0.05


def test_many_collectives_of_a_step_are_added_up_to_a_bounded_number() -> None:
    (calls,) = windows([[20.0] * 100, [22.0] * 100])[0].calls
    assert (calls.calls, len(calls.time_us)) == (100, len(ORDER) * MAX_BINS * 4)
    found = report(*windows([[20.0] * 100, [22.0] * 100]))
    assert found.comm_slowdown is not None
    assert found.comm_slowdown.value == pytest.approx(0.0, abs=1e-6)


def test_sends_and_receives_are_no_victims() -> None:
    pairs = [PairTime("send_recv", True, "gemm", 1, 1, 2, 1), PairTime("gemm", False, "send_recv", 1, 1, 2, 1)]
    assert without_waiting(pairs, WaitingSums(), 2) == (pairs[1],)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_a_dimension_of_which_a_rank_is_late_is_not_slow(factor: float) -> None:
    ranks = windows([EVEN, LATE], factor)
    told = []
    for rank in ranks:
        kernels_ms = [next(block.comm_ms for block in rank.profiled if block.arm is mode) for mode in (OV, SEQ)]
        row = DimensionTime("data", 6, 6, 1.0, 1.0, *kernels_ms)
        calls = tuple([msgspec.structs.replace(own, dimension="data") for own in rank.calls])
        told.append(msgspec.structs.replace(rank, calls=calls, dimensions=(row,)))
    before = [msgspec.structs.replace(rank, calls=()) for rank in told]
    (slow,), (right,) = report(*before).dimensions, report(*told).dimensions
    assert slow.slowdown is not None
    assert slow.slowdown > factor - 1 + 0.01
    assert right.slowdown == pytest.approx(factor - 1, abs=1e-4)
    assert right.kernels_isolated_ms == pytest.approx(6 * TRANSFER, rel=1e-4)


# -- messages of a pipeline

MESSAGE_MS, BATCHES = 2.0, 4
GROUP = FakeGroup("stages", ranks=(3, 5))
# Of each rank: what it computes between messages; forward passes, then backward passes.
FIRST = [item for _ in range(BATCHES) for item in (10.0, "send")] + [x for _ in range(BATCHES) for x in ("recv_", 20.0)]
LAST = [item for _ in range(BATCHES) for item in ("recv_", 14.0)] + [x for _ in range(BATCHES) for x in (28.0, "send")]


class Stage(NamedTuple):
    """What a stage does in a step: in milliseconds."""

    computes: list[tuple[float, float]]
    messages: list[tuple[float, float, float]]
    """Launched, begun to move, ended."""

    @property
    def bubble_ms(self) -> float:
        moving = sorted([*self.computes, *[(met, end) for _, met, end in self.messages]])
        start = min(self.computes[0][0], self.messages[0][0])
        busy, until = 0.0, start
        for begin, end in moving:
            busy, until = busy + max(0.0, end - max(begin, until)), max(until, end)
        return until - start - busy


def pipeline(*plans: list[float | str]) -> list[Stage]:
    """Messages wait for each other; a receive holds up the compute after it, a send does not."""
    stages, plans = [Stage([], []) for _ in plans], [list(plan) for plan in plans]
    now, stream = [0.0] * len(plans), 0.0
    while any(plans):
        for rank, plan in enumerate(plans):
            while plan and isinstance(plan[0], float):
                start, now[rank] = now[rank], now[rank] + plan.pop(0)
                stages[rank].computes.append((start, now[rank]))
        if any(plans):
            begun = [max(time, stream) for time in now]
            stream = max(begun) + MESSAGE_MS
            for rank, plan in enumerate(plans):
                stages[rank].messages.append((begun[rank], max(begun), stream))
                now[rank] = stream if plan.pop(0) == "recv_" else now[rank]
    return stages


def stage_windows(*plans: list[float | str], **odd: Any) -> list[RankWindow]:
    """What the ranks of a pipeline measure.

    Args:
        plans: of the stages.
        odd: fields of the messages that rank 5 issues.
    """
    modes = [OV if letter == "O" else SEQ for letter in ORDER]
    found = []
    for place, (plan, stage) in enumerate(zip(plans, pipeline(*plans), strict=True)):
        rank, peer = GROUP.ranks[place], 1 - place
        rows = []
        for number in range(len(modes)):
            base = 1000.0 * number
            rows += [(GEMM, Kind.COMPUTE, number, base + a, base + b) for a, b in stage.computes]
            rows += [(P2P, Kind.COMMUNICATION, number, base + a, base + b) for a, _, b in stage.messages]
        operators = [item for item in plan if isinstance(item, str)]
        sizes = {"send": {"bytes_in": 100, "bytes_out": 0}, "recv_": {"bytes_in": 0, "bytes_out": 100}}
        calls = [
            issue(name, "pipeline", **{**sizes[name], "peer": peer, "of": GROUP, **(odd if place else {})})
            for name in operators
        ]
        kernels, issued = columns(rows), dict.fromkeys(range(len(modes)), calls)
        numbered = {n: ProfiledStep(100 + n, n, mode is SEQ) for n, mode in enumerate(modes)}
        transfers = transfer_starts(kernels, issued)
        sums = KernelSums(kernels, transfers.start_ns)
        row = RankRow("send", "pipeline", 2, GROUP.ranks, BATCHES, 100, 100 * BATCHES, ((6, BATCHES, 100 * BATCHES),))
        found.append(
            rank_window(
                rank,
                timed=tuple([TimedBlock(mode, n, (500.0,) * 2) for n, mode in enumerate(modes)]),
                profiled=tuple([profiled_block(mode, n, sums, [n], 500.0) for n, mode in enumerate(modes)]),
                calls=collective_calls(kernels, matched(kernels, issued), issued, numbered, rank, transfers),
                messages=RankMessages((row,), place),
            )
        )
    return found


def bubbles(found: OverlapReport) -> list[float]:
    assert found.pipeline is not None
    return [stage.bubble_ms for stage in found.pipeline.stages]


@pytest.mark.parametrize("last", [LAST, [4.0 if item == 14.0 else item for item in LAST]], ids=["slow", "fast"])
def test_the_bubble_is_all_that_a_stage_waits_for_its_peer(last: list[float | str]) -> None:
    found = report(*stage_windows(FIRST, last))
    true = [stage.bubble_ms for stage in pipeline(FIRST, last)]
    assert bubbles(found) == pytest.approx(true, rel=1e-5)
    assert values(found)["bubble_ms"] == pytest.approx(np.mean(true), rel=1e-5)
    # The shortest receive waited too: so one rank alone knows less.
    alone = report(*[msgspec.structs.replace(window, calls=()) for window in stage_windows(FIRST, last)])
    assert sum(bubbles(alone)) < 0.9 * sum(true)


def test_messages_that_wait_for_each_other_are_not_slow() -> None:
    found = report(*stage_windows(FIRST, LAST))
    waited = [sum(met - start for start, met, _ in stage.messages) for stage in pipeline(FIRST, LAST)]
    assert values(found)["waiting_ms"] == pytest.approx(np.mean(waited), rel=1e-5)
    assert found.comm_slowdown is not None
    assert found.comm_slowdown.value == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("odd", [{"bytes_in": 96}, {"peer": 1}], ids=["other sizes", "with itself"])
def test_messages_that_cannot_be_compared_leave_the_bubble_a_lower_bound(odd: dict[str, Any]) -> None:
    found = report(*stage_windows(FIRST, LAST, **odd))
    alone = report(*[msgspec.structs.replace(window, calls=()) for window in stage_windows(FIRST, LAST)])
    assert bubbles(found) == pytest.approx(bubbles(alone))
    assert found.comm_slowdown is None


def test_of_many_messages_some_are_drawn_and_the_rest_is_as_they_are() -> None:
    windows_of_pairs, two = [], stage_windows(FIRST, LAST)
    for pair in range(400):
        for own in two:
            calls = [msgspec.structs.replace(row, group=f"{row.group} {pair}") for row in own.calls]
            windows_of_pairs.append(msgspec.structs.replace(own, rank=2 * pair + (own.rank == 5), calls=tuple(calls)))
    parts = [part_of(window) for window in windows_of_pairs[::2] + windows_of_pairs[1::2]]
    merged = merge([merge(parts[start : start + 50]) for start in range(0, len(parts), 50)])
    assert len(encode(merged)) < 5 * MAX_MESSAGE_BYTES
    found = report_of(merged, world_size=len(parts), every_n_steps=500)
    assert bubbles(found) == pytest.approx([stage.bubble_ms for stage in pipeline(FIRST, LAST)], rel=1e-5)


@pytest.mark.parametrize(
    "damage",
    [
        {"time_us": b"\0" * 7},
        {"time_us": b""},
        {"time_us": b"\xff" * 4 * len(ORDER)},
        {"hidden_us": b"\0" * 8},
        {"open_us": b"\0" * 4},
        {"shares": b"\0"},
        {"steps": ()},
    ],
)
def test_calls_of_another_rank_that_cannot_be_are_left_out(damage: dict[str, Any]) -> None:
    first, last = stage_windows(FIRST, LAST)
    own, other = part_of(first), part_of(last)
    rows = [
        msgspec.structs.replace(row, calls=msgspec.structs.replace(row.calls, **damage))
        for row in other.figures.waiting.open
    ]
    waiting = msgspec.structs.replace(other.figures.waiting, open=tuple(rows))
    other = msgspec.structs.replace(other, figures=msgspec.structs.replace(other.figures, waiting=waiting))
    found = report_of(merge([own, decode(encode(other))]), world_size=2, every_n_steps=500)
    alone = report(*[msgspec.structs.replace(window, calls=()) for window in (first, last)])
    assert bubbles(found) == pytest.approx(bubbles(alone))
