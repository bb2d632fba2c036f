"""Exposed time of collectives by size and place: against a plain count, by the gate's log, over ranks and windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.exposure import (
    MAX_ROWS,
    MAX_SIZES,
    add_exposures,
    exposure_sentence,
    of_rank,
    over_windows,
    reported,
    with_blocking,
)
from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.by_collective import exposed_collectives
from overlap_callbacks.analysis.kernels.exposure import exposure_of
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from overlap_callbacks.analysis.results.exposure import (
    FIRST,
    LAST,
    MIDDLE,
    ExposedCollective,
    Exposure,
    ExposureSums,
    Label,
)
from tests.columns import GATHER, GEMM, MS, REDUCE, columns
from tests.issued import FakeCollective, issue

C, M = Kind.COMPUTE, Kind.COMMUNICATION


def sums(kernels: KernelTable, sizes: list[int], numbers: dict[int, int]) -> ExposureSums:
    """Of all collectives, each of one kind and group."""
    rows = np.flatnonzero(kernels.kind == M)
    compute, label = kernels.of(C).union(), np.zeros(len(rows), dtype=np.int64)
    return exposure_of(kernels, compute, rows, label, [Label("all_reduce", "", 2)], np.array(sizes), numbers)


def by_chance(seed: int) -> tuple[KernelTable, list[int]]:
    """Some steps of kernels on several streams, in whole milliseconds."""
    chance = np.random.default_rng(seed)
    rows: list[Any] = []
    for step in range(int(chance.integers(1, 5))):
        for kind, name in ((C, GEMM), (M, REDUCE)):
            for _ in range(int(chance.integers(0, 6))):
                start = int(chance.integers(0, 40)) + 50 * step
                rows.append((name, kind, step, start, start + int(chance.integers(0, 9))))
    rows.sort(key=lambda row: row[3])
    return columns(rows), [int(chance.integers(2, 6)) * 1000 for row in rows if row[1] == M]


@pytest.mark.parametrize("seed", range(60))
def test_times_equal_a_count_of_each_millisecond_and_add_up_to_those_of_the_steps(seed: int) -> None:
    kernels, sizes = by_chance(seed)
    steps = {step: 7 + step for step in set(kernels.step.tolist())}
    found = sums(kernels, sizes, steps)
    start, end = kernels.intervals.start_ns // MS, kernels.intervals.end_ns // MS
    computes = {ms for row in np.flatnonzero(kernels.kind == C) for ms in range(start[row], end[row])}
    expected: dict[int, list[int]] = {size: [0, 0, 0] for size in sizes}
    for step in steps:
        taken: set[int] = set()
        mine = [(i, row) for i, row in enumerate(np.flatnonzero(kernels.kind == M)) if kernels.step[row] == step]
        for i, row in sorted(mine, key=lambda of: start[of[1]]):
            own = set(range(start[row], end[row])) - taken
            taken |= own
            expected[sizes[i]][0] += len(own - computes)
            expected[sizes[i]][1] += len(own & computes)
            expected[sizes[i]][2] += 1
    by_size: dict[int, list[float]] = {size: [0, 0, 0] for size in sizes}
    for of in found.rows:
        for place, value in enumerate((of.exposed_ns / MS, of.hidden_ns / MS, of.calls)):
            by_size[of.size][place] += value
        assert of.by_step.keys() <= set(steps.values())
        assert sum(of.by_step.values()) == of.exposed_ns
    assert sum(of.queued_ns for of in found.rows) == pytest.approx(sum(of.exposed_ns for of in found.rows), abs=10)
    assert by_size == expected
    whole = KernelSums(kernels).of_each_step(sorted(steps))
    assert sum(of.hidden_ns for of in found.rows) == sum(each.hidden_comm_ns for each in whole)
    assert sum(of.exposed_ns for of in found.rows) == sum(each.comm_busy_ns - each.hidden_comm_ns for each in whole)


def profile() -> tuple[KernelTable, dict[int, list[FakeCollective]]]:
    """Two steps of FSDP: an all-gather before all compute, one beside it, a reduction behind it, and a barrier."""
    rows: list[Any] = []
    for step, at in enumerate((0, 100)):
        rows += [(GATHER, M, step, at, at + 4), (GEMM, C, step, at + 4, at + 40), (GATHER, M, step, at + 5, at + 9),
                 (REDUCE, M, step, at + 38, at + 46), (REDUCE, M, step, at + 46, at + 47)]  # fmt: skip
    gather = issue("_allgather_base_", "data", bytes_in=1_000_000, bytes_out=8_000_000)
    issued = [gather, gather, issue("allreduce_", "data", 2_000_000), issue("barrier", "data", 0, bytes_out=0)]
    return columns(rows), {step: issued for step in (0, 1)}


def test_the_log_gives_sizes_groups_and_kinds() -> None:
    kernels, issued = profile()
    found = reported(of_rank(exposed_collectives(align(kernels, issued), {0: 40, 1: 44}), 3))
    assert found is not None
    rows = {(row.collective, row.place): (row.most_bytes, row.exposed_ms, row.hidden_ms) for row in found.rows}
    assert rows == {
        ("all_gather", FIRST): (8_000_000, 8, 0), ("all_gather", MIDDLE): (8_000_000, 0, 8),
        ("all_reduce", LAST): (2_000_000, 12, 4), ("barrier", LAST): (0, 2, 0),
    }  # fmt: skip
    assert [row.exposed_ms for row in found.rows] == [12, 8, 2, 0]
    assert {(row.dimension, row.group_size, row.worst_rank) for row in found.rows} == {("data", 2, 3)}
    assert exposure_sentence(found) == (
        "Of 22.0 ms exposed 12.0 ms are the 1.91 MiB all-reduce that ends the step, in 2 of 2 steps; "
        "8.00 ms are the 7.63 MiB all-gather that begins the step, in 2 of 2 steps."
    )


def named(rows: list[Any], names: list[str]) -> Exposure:
    """Of all-reduces of one step, with these names in their order."""
    kernels = columns(rows)
    of = np.flatnonzero(kernels.kind == M)
    label, sizes = np.zeros(len(of), dtype=np.int64), np.full(len(of), 1000)
    labels = [Label("all_reduce", "", 2)]
    found = reported(of_rank(exposure_of(kernels, kernels.of(C).union(), of, label, labels, sizes, {0: 40}, names), 0))
    assert found is not None
    return found


# Buckets of a backward pass until 20 ms. The second is long, and hidden; those behind it come too late.
QUEUE = [
    (GEMM, C, 0, 0, 20),
    (REDUCE, M, 0, 2, 3),
    (REDUCE, M, 0, 8, 20),
    (REDUCE, M, 0, 20, 22),
    (REDUCE, M, 0, 22, 24),
]


def test_a_long_collective_that_is_hidden_answers_for_those_that_it_makes_late() -> None:
    found = named(QUEUE, ["a", "long", "b", "last"])
    rows = {row.name: row for row in found.names}
    assert found.names[0].name == "long"
    assert rows["long"].exposed_ms == 0
    # 2 ms behind a queue of 12 + 2, then 2 behind 12 + 2 + 2.
    assert rows["long"].queued_ms == pytest.approx(12 * (2 / 14 + 2 / 16), abs=1e-5)
    assert rows["last"].queued_ms == pytest.approx(2 * 2 / 16, abs=1e-5)
    assert rows["a"].queued_ms == 0  # compute came between
    assert exposure_sentence(found).endswith(
        " First by name is the all-reduce of long, for 3.21 ms a step, with what queues behind it."
    )
    sentence = exposure_sentence(found, late_rank=3)
    assert sentence.endswith(" What holds steps up most is waiting for rank 3, not a layer.")


def test_what_compute_has_waited_for_already_answers_for_nothing_more() -> None:
    # Each layer's compute waits for its all-gather, beside which the next one is fetched.
    rows = [(GATHER, M, 0, 0, 10), (GEMM, C, 0, 10, 14), (GATHER, M, 0, 10, 17), (GEMM, C, 0, 17, 21),
            (GATHER, M, 0, 17, 24)]  # fmt: skip
    held = {row.name: row.queued_ms for row in named(rows, ["long", "b", "c"]).names}
    assert held == {"long": 10, "b": 3, "c": 3}


def test_waiting_for_a_rank_does_not_make_a_layer_first_and_what_delays_show_comes_before_guesses() -> None:
    found = named(QUEUE, ["a", "long", "b", "last"])
    waited = msgspec.structs.replace(found.names[0], waiting_ms=12.0)
    assert waited.held_ms == 0
    shown = with_blocking(found, {("all_reduce", "long"): 0.02, ("all_reduce", "b"): 1.0, ("all_gather", "last"): 1.0})
    assert [row.name for row in shown.names][:2] == ["b", "last"]
    assert {row.name: row.blocking for row in shown.names} == {"b": 1.0, "long": 0.02, "a": None, "last": None}
    assert "First by name is the all-reduce of b, for 2.00 ms a step." in exposure_sentence(shown)


def test_what_has_slack_is_never_first_and_of_slack_alone_none_is() -> None:
    found = named(QUEUE, ["a", "long", "b", "last"])
    slack = {(row.collective, row.name): 0.0 for row in found.names}
    assert exposure_sentence(with_blocking(found, slack), late_rank=3).endswith(
        " No collective holds steps up: delays show slack of each."
    )
    (reduced,) = [key for key in slack if key[1] == "last"]
    some = with_blocking(found, {key: slope for key, slope in slack.items() if key != reduced})
    assert " First by name is the all-reduce of last, for " in exposure_sentence(some)
    assert some.names[0].blocking is None


def test_only_the_steps_that_are_asked_for_count_and_kernels_without_a_collective_have_no_size() -> None:
    kernels, issued = profile()
    found = reported(of_rank(exposed_collectives(align(kernels, {0: issued[0], 1: []}), {1: 44}), 0))
    assert found is not None
    assert (found.num_steps, {row.most_bytes for row in found.rows}) == (1, {None})
    assert found.exposed_ms == 11
    assert reported(exposed_collectives(align(kernels, issued), {})) is None


def of_ranks() -> list[ExposureSums]:
    return [of_rank(sums(*by_chance(seed), {step: step for step in range(5)}), seed) for seed in range(12)]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_merging_gives_the_same(seed: int) -> None:
    at_once = add_exposures([ExposureSums(), *of_ranks()])
    parts, chance = of_ranks(), np.random.default_rng(seed)
    while len(parts) > 1:
        parts = [parts[place] for place in chance.permutation(len(parts))]
        sent = msgspec.msgpack.encode(add_exposures(parts[:3]))
        parts = [msgspec.msgpack.decode(sent, type=ExposureSums), *parts[3:]]
    assert (parts[0].steps, parts[0].num_ranks) == (at_once.steps, 12)
    assert {row.size: row.calls for row in parts[0].rows} == {row.size: row.calls for row in at_once.rows}
    assert sum(row.exposed_ns for row in parts[0].rows) == sum(row.exposed_ns for row in at_once.rows)
    assert all(len(row.by_rank) <= 8 for row in parts[0].rows)


def test_what_is_kept_is_bounded_and_time_stays_whole() -> None:
    rows = [(REDUCE, M, step, 10 * step + 2, 10 * step + 5) for step in range(300)]
    compute = [(GEMM, C, step, 10 * step, 10 * step + 3) for step in range(300)]
    kernels = columns(sorted([*rows, *compute], key=lambda row: row[3]))
    ranks = [
        of_rank(sums(kernels, [10_000 + 300 * rank + step for step in range(300)], {s: s for s in range(300)}), rank)
        for rank in range(40)
    ]
    found = add_exposures(ranks)
    (row,) = found.rows
    assert len(found.rows) <= min(MAX_SIZES, MAX_ROWS)
    assert (row.least_bytes, row.most_bytes, row.calls) == (10_000, 10_000 + 300 * 40 - 1, 300 * 40)
    assert row.exposed_ns == 2 * MS * 300 * 40
    assert len(row.by_rank) == 8


def test_more_rows_than_are_kept_share_those_of_their_kind_and_place() -> None:
    rows = [(REDUCE, M, 0, 10 * i, 10 * i + 2) for i in range(12 * MAX_SIZES)]
    kernels, labels = columns(rows), [Label("all_reduce", f"group {i}", 2) for i in range(12)]
    place = np.arange(len(rows))
    found = exposure_of(kernels, kernels.of(C).union(), place, place % 12, labels, 2000 + place // 12, {})
    assert {(row.least_bytes, row.most_bytes, row.calls) for row in found.rows} == {(2000, 1999 + MAX_SIZES, MAX_SIZES)}
    assert (len(found.rows), sum(row.exposed_ns for row in found.rows)) == (12, 2 * MS * len(rows))
    assert add_exposures([found, found]).rows[0].calls == 2 * MAX_SIZES


def test_ranks_of_which_each_has_other_sizes_lose_no_time() -> None:
    rows = [(REDUCE, M, step, 10 * step, 10 * step + 2) for step in range(10)]
    numbers = {step: step for step in range(10)}
    ranks = [of_rank(sums(columns(rows), [2_000 * (10 * rank + i) for i in range(10)], numbers), rank)
             for rank in range(1, 30)]  # fmt: skip
    (row,) = add_exposures(ranks).rows
    assert (row.calls, row.exposed_ns) == (290, 290 * 2 * MS)


def test_windows_add_up() -> None:
    kernels, issued = profile()
    one = reported(of_rank(exposed_collectives(align(kernels, issued), {0: 40, 1: 44}), 3))
    assert one is not None
    found = over_windows([one, one, one])
    assert found is not None
    assert (found.num_steps, found.num_ranks, found.exposed_ms) == (6, 1, 66)
    assert [row.exposed_steps for row in found.rows] == [6, 6, 6, 0]
    assert [row.worst_ms for row in found.rows] == [36, 24, 6, 0]
    assert over_windows([]) is None


def in_window(exposed_ms: float, steps: int, rank: int) -> Exposure:
    row = ExposedCollective("barrier", "data", 8, LAST, 0, 0, 4, exposed_ms, 1.0, steps, 0.0, rank, exposed_ms)
    return Exposure(4, 2, (row,))


def test_over_windows_a_moment_in_each_step_does_not_count_and_the_worst_rank_is_that_of_all() -> None:
    found = over_windows([in_window(10, 1, rank=0), in_window(7, 1, rank=1), in_window(6, 2, rank=1),
                          in_window(0.004, 4, rank=0)])  # fmt: skip
    assert found is not None
    (row,) = found.rows
    assert (found.num_steps, row.exposed_steps, row.worst_rank, row.worst_ms) == (16, 4, 1, 13)
    assert "all are the barrier that ends the step, in 4 of 16 steps" in exposure_sentence(found)


def test_nothing_exposed_is_no_sentence() -> None:
    assert exposure_sentence(Exposure(4, 2, ())) == ""


def test_time_on_the_critical_path_is_by_name_where_all_ranks_know_it() -> None:
    kernels, issued = profile()
    names = ("layers.0", "layers.1", "bucket 0", "")
    named = {
        step: [replace(one, name=name) for one, name in zip(of, names, strict=True)] for step, of in issued.items()
    }
    # The reduction is launched early and held up by what ran before it; nothing waits for the second gather.
    launched = replace(kernels, launched_ns=np.where(kernels.step == 0, 0, 100 * MS))

    def of(table: KernelTable, rank: int) -> ExposureSums:
        return of_rank(exposed_collectives(align(table, named), {0: 40, 1: 44}), rank)

    found = reported(add_exposures([of(launched, 0), of(launched, 1)]))
    assert found is not None
    path_ms = {row.name: row.path_ms for row in found.names}
    assert path_ms["bucket 0"] == pytest.approx(2 * 2 * 8)
    unknown = reported(add_exposures([of(launched, 0), of(kernels, 1)]))
    assert unknown is not None
    assert {row.path_ms for row in unknown.names} == {None}
    both = over_windows([found, found])
    assert both is not None
    assert {row.name: row.path_ms for row in both.names} == {name: 2 * (ms or 0.0) for name, ms in path_ms.items()}
