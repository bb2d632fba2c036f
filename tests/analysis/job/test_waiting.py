"""Collectives and messages that wait for each other, as NCCL's do: what is true follows from the schedule alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.job.part import JobPart, decode, encode, merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.job.stages import ENOUGH
from overlap_callbacks.analysis.job.waiting import (
    MAX_MESSAGE_BYTES,
    OpenGroup,
    WaitingSums,
    reported_waiting,
    without_waiting,
)
from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.by_collective import collective_calls
from overlap_callbacks.analysis.kernels.receives import transfer_starts
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.times import KernelSums, profiled_block
from overlap_callbacks.analysis.results.arrivals import MAX_BINS, ProfiledStep, name_code
from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.analysis.results.messages import RankMessages, RankRow
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime, RankWindow, TimedBlock
from overlap_callbacks.analysis.run_summary import RunSummary
from tests.analysis.job.windows import MODES, ORDER, measured, report, values, values_in_any_order
from tests.analysis.test_adds_up import assert_adds_up
from tests.analysis.test_aggregate import rank_window
from tests.columns import GEMM, P2P, REDUCE, columns
from tests.issued import FakeGroup, issue

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
TRANSFER = 21.0
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
    for rank, of_rank in enumerate(layers):
        rows = []
        for number, mode in enumerate(MODES):
            base, calls = 1000.0 * number, steps[mode][0][rank]
            ends = np.cumsum(of_rank)
            computes = [*zip([0, *ends[:-1]], ends, strict=True)]
            start = ends[-1]
            for call, length in zip(calls, of_rank, strict=True):
                computes += [(start, start + length), (start + length, start + 2 * length)]
                start = start + 2 * length if mode is OV else call[1]
            rows += [(GEMM, Kind.COMPUTE, number, base + a, base + b) for a, b in computes]
            rows += [(REDUCE, Kind.COMMUNICATION, number, base + a, base + b) for a, b in calls]
        reductions = [
            issue("allreduce_", "data", group_size=len(layers), name=f"layer {place}") for place in range(len(of_rank))
        ]
        issued = dict.fromkeys(range(len(MODES)), reductions)
        found.append(measured(rank, rows, issued, {mode: step_ms for mode, (_, step_ms) in steps.items()}))
    return found


def beside_compute(found: OverlapReport) -> float | None:
    (pair,) = [pair for pair in found.pairs if pair.kernel_family == "all_reduce" and pair.concurrent_with == "gemm"]
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
    kernels_ms = [next(block.comm_ms for block in rank.profiled if block.mode is SEQ) for rank in ranks]
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


def test_waiting_by_name_is_of_all_overlapped_steps_and_ranks() -> None:
    layers = [EVEN, [20.0, 20.0, 29.0, 20.0, 20.0, 20.0]]
    found = reported_waiting(merge(list(map(part_of, windows(layers)))).figures.waiting).names_us
    calls, _ = schedule(layers, OV, TRANSFER)
    times = np.diff(np.array(calls)).squeeze(-1)
    expected = MODES.count(OV) * 1e3 * (times.sum(axis=0) - 2 * times.min(axis=0))
    assert expected[2] > 1.0
    for layer, waited_us in enumerate(expected):
        assert found[name_code("all_reduce", f"layer {layer}")] == pytest.approx(waited_us, rel=1e-5, abs=1e-2)


def test_any_order_of_ranks_and_any_way_gives_the_same() -> None:
    assert values_in_any_order(windows([EVEN, LATE, [21.0] * 6]))["waiting_ms"] > 0


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
        kernels_ms = [next(block.comm_ms for block in rank.profiled if block.mode is mode) for mode in (OV, SEQ)]
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
    """What the ranks of a pipeline measure, whose steps are alike.

    Args:
        plans: of the stages.
        odd: fields of the messages that rank 5 issues.
    """
    return stage_windows_of([list(plans)] * len(ORDER), [100] * len(ORDER), odd)


def stage_windows_of(
    steps: Sequence[list[list[float | str]]], sizes: Sequence[int], odd: dict[str, Any] | None = None
) -> list[RankWindow]:
    """The same of steps that differ.

    Args:
        steps: the plans of the stages in each step; as many steps in each block.
        sizes: of the messages in each step.
        odd: fields of the messages that rank 5 issues.
    """
    in_block = len(steps) // len(ORDER)
    modes = [OV if letter == "O" else SEQ for letter in ORDER for _ in range(in_block)]
    ran = [pipeline(*plans) for plans in steps]
    found = []
    for place, rank in enumerate(GROUP.ranks):
        rows, issued = [], {}
        for number, (plans, stages, size) in enumerate(zip(steps, ran, sizes, strict=True)):
            base, stage = 1000.0 * number, stages[place]
            rows += [(GEMM, Kind.COMPUTE, number, base + a, base + b) for a, b in stage.computes]
            rows += [(P2P, Kind.COMMUNICATION, number, base + a, base + b) for a, _, b in stage.messages]
            of = {"send": {"bytes_in": size, "bytes_out": 0}, "recv_": {"bytes_in": 0, "bytes_out": size}}
            more = {"peer": 1 - place, "of": GROUP, **((odd or {}) if place else {})}
            names = [item for item in plans[place] if isinstance(item, str)]
            issued[number] = [issue(name, "pipeline", **{**of[name], **more}) for name in names]
        kernels = columns(rows)
        numbered = {n: ProfiledStep(100 + n, n // in_block, mode is SEQ) for n, mode in enumerate(modes)}
        aligned = align(kernels, issued)
        transfers = transfer_starts(aligned)
        sums = KernelSums(kernels, transfers.start_ns)
        blocks = [(block, modes[block * in_block]) for block in range(len(ORDER))]
        of_block = {block: range(block * in_block, (block + 1) * in_block) for block, _ in blocks}
        row = RankRow("send", "pipeline", 2, GROUP.ranks, BATCHES, 100, 100 * BATCHES, ((6, BATCHES, 100 * BATCHES),))
        found.append(
            rank_window(
                rank,
                timed=tuple([TimedBlock(mode, block, (500.0,) * 2) for block, mode in blocks]),
                profiled=tuple([profiled_block(mode, n, sums, list(of_block[n]), 500.0) for n, mode in blocks]),
                calls=collective_calls(aligned, numbered, rank, transfers),
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


def test_waiting_of_messages_is_known_and_their_slowdown_is_not() -> None:
    found = report(*stage_windows(FIRST, LAST))
    waited = [sum(met - start for start, met, _ in stage.messages) for stage in pipeline(FIRST, LAST)]
    assert values(found)["waiting_ms"] == pytest.approx(np.mean(waited), rel=1e-5)
    assert found.comm_slowdown is None


@pytest.mark.parametrize("odd", [{"bytes_in": 96}, {"peer": 1}], ids=["other sizes", "with itself"])
def test_messages_that_cannot_be_compared_leave_the_bubble_a_lower_bound(odd: dict[str, Any]) -> None:
    found = report(*stage_windows(FIRST, LAST, **odd))
    alone = report(*[msgspec.structs.replace(window, calls=()) for window in stage_windows(FIRST, LAST)])
    assert bubbles(found) == pytest.approx(bubbles(alone))


SHORT_FIRST = [10.0, "send", 10.0, "send", "recv_", 20.0, "recv_", 20.0]
SHORT_LAST = ["recv_", 14.0, "recv_", 14.0, 28.0, "send", 28.0, "send"]


@pytest.mark.parametrize(
    ("plans", "sizes"),
    [
        ([[FIRST, LAST]] * 2, [100, 300]),
        ([[FIRST, LAST], [SHORT_FIRST, SHORT_LAST]], [100, 100]),
        ([[FIRST, LAST], [SHORT_FIRST, SHORT_LAST]], [100, 300]),
    ],
    ids=["sizes", "numbers", "both"],
)
def test_steps_of_a_block_may_differ_in_their_messages(plans: list[list[list[float | str]]], sizes: list[int]) -> None:
    found = report(*stage_windows_of(plans * len(ORDER), sizes * len(ORDER)))
    ran = [pipeline(*of_step) for of_step in plans]
    true = [np.mean([stages[place].bubble_ms for stages in ran]) for place in (0, 1)]
    waited = [met - start for stages in ran for stage in stages for start, met, _ in stage.messages]
    assert bubbles(found) == pytest.approx(true, rel=1e-5)
    assert values(found)["bubble_ms"] == pytest.approx(np.mean(true), rel=1e-5)
    assert values(found)["waiting_ms"] == pytest.approx(sum(waited) / 4, rel=1e-5)


def test_blocks_may_differ_in_their_messages() -> None:
    plans = [[FIRST, LAST], [SHORT_FIRST, SHORT_LAST]]
    steps = [plans[number % 2] for number in range(len(ORDER))]
    found = report(*stage_windows_of(steps, [100] * len(ORDER)))
    of_mode = [plan for plan, letter in zip(steps, ORDER, strict=True) if letter == "O"]
    ran = [pipeline(*plan) for plan in of_mode]
    assert bubbles(found) == pytest.approx([np.mean([s[place].bubble_ms for s in ran]) for place in (0, 1)], rel=1e-5)


def many(pairs: int) -> JobPart:
    """Pairs of ranks whose first stages are far from their last ones, so that their messages stay open for long."""
    first, last = stage_windows(FIRST, LAST)
    parts = []
    for place, own in enumerate((first, last)):
        for pair in range(pairs):
            calls = tuple([msgspec.structs.replace(row, group=f"{row.group} {pair}") for row in own.calls])
            parts.append(part_of(msgspec.structs.replace(own, rank=place * pairs + pair, calls=calls)))
    while len(parts) > 1:
        parts = [merge(parts[start : start + 8]) for start in range(0, len(parts), 8)]
        assert max(len(encode(part)) for part in parts) < 5 * MAX_MESSAGE_BYTES
    return parts[0]


def test_many_messages_are_sampled_without_bias() -> None:
    part = many(1024)
    assert all(row.dropped > 100 and row.compared > 100 for row in part.figures.waiting.stages)
    found = report_of(part, world_size=part.ranks.count, every_n_steps=500)
    ran = pipeline(FIRST, LAST)
    assert bubbles(found) == pytest.approx([stage.bubble_ms for stage in ran], rel=1e-5)
    waited = [met - start for stage in ran for start, met, _ in stage.messages]
    assert values(found)["waiting_ms"] == pytest.approx(sum(waited) / 2, rel=1e-5)


def test_where_too_few_were_drawn_of_some_all_stages_are_a_lower_bound() -> None:
    part = many(8)
    waiting = part.figures.waiting
    rows = [msgspec.structs.replace(row, compared=ENOUGH - 1, dropped=5) for row in waiting.stages[:1]]
    waiting = msgspec.structs.replace(waiting, stages=(*rows, *waiting.stages[1:]))
    part = msgspec.structs.replace(part, figures=msgspec.structs.replace(part.figures, waiting=waiting))
    alone = report(*[msgspec.structs.replace(window, calls=()) for window in stage_windows(FIRST, LAST)])
    assert bubbles(report_of(part, world_size=16, every_n_steps=500)) == pytest.approx(bubbles(alone))


NAN, HUGE = np.float32(np.nan).tobytes(), np.float32(np.inf).tobytes()


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        ("calls", {"time_us": b"\0" * 7}),
        ("calls", {"time_us": b""}),
        ("calls", {"time_us": NAN * BATCHES * len(ORDER)}),
        ("calls", {"hidden_us": b"\0" * 8}),
        ("calls", {"shares": b"\0"}),
        ("calls", {"steps": ()}),
        ("calls", {"calls": 2 * BATCHES}),
        ("calls", {"calls": 0}),
        ("sides", {"open_us": NAN * BATCHES * len(ORDER)}),
        ("sides", {"open_us": HUGE * BATCHES * len(ORDER)}),
        ("sides", {"open_us": b"\0" * 4}),
        ("sides", {"time_us": (float("nan"),) * len(ORDER)}),
        ("row", {"time_us": (float("inf"),) * len(ORDER)}),
        ("row", {"heard": 7}),
        ("row", {"heard": 0}),
        ("row", {"sides": ()}),
    ],
)
def test_calls_of_another_rank_that_cannot_be_are_left_out(what: str, damage: dict[str, Any]) -> None:
    def damaged(row: OpenGroup) -> OpenGroup:
        if what == "calls":
            return msgspec.structs.replace(row, calls=msgspec.structs.replace(row.calls, **damage))
        if what == "sides":
            sides = [msgspec.structs.replace(side, **damage) for side in row.sides]
            return msgspec.structs.replace(row, sides=tuple(sides))
        return msgspec.structs.replace(row, **damage)

    first, last = stage_windows(FIRST, LAST)
    own, other = part_of(first), part_of(last)
    waiting = other.figures.waiting
    waiting = msgspec.structs.replace(waiting, open=tuple([damaged(row) for row in waiting.open]))
    other = msgspec.structs.replace(other, figures=msgspec.structs.replace(other.figures, waiting=waiting))
    found = report_of(merge([own, decode(encode(other))]), world_size=2, every_n_steps=500)
    alone = report(*[msgspec.structs.replace(window, calls=()) for window in (first, last)])
    assert bubbles(found) == pytest.approx(bubbles(alone))
