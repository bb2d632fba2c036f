"""Any tree of merges gives the same report as all samples at once, and merged parts stay small."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.job.part import MAX_SAMPLES, JobPart, decode, encode, merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.job.tables import MAX_KERNEL_ROWS, OTHER_KERNELS
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.report import MAX_RANKS_NAMED, OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, RankWindow
from tests.analysis.job.reference import reference_report
from tests.analysis.job.reference_environment import job_environment
from tests.analysis.job.reference_parts import pool
from tests.analysis.job.windows import copies, some_windows
from tests.samples import window
from tests.toggling import at_night

OPTIONS: dict[str, Any] = {"every_n_steps": 500, "problems": ("late",), "tokens_per_step": 4096}


def tree(windows: list[RankWindow], chance: np.random.Generator) -> JobPart:
    """The windows merged in a tree of any shape, in any order, and sent at each level."""
    parts = [part_of(own) for own in windows]
    while len(parts) > 1:
        parts = [parts[at] for at in chance.permutation(len(parts))]
        parts = [decode(encode(part)) for part in parts]
        sizes = chance.integers(1, 8, size=len(parts))
        bounds = [0, *[bound for bound in np.cumsum(sizes).tolist() if bound < len(parts)], len(parts)]
        parts = [merge(parts[low:high]) for low, high in itertools.pairwise(bounds)]
    return parts[0]


def assert_alike(found: Any, expected: Any, where: str = "report") -> None:
    """Equal, and numbers to 1e-9."""
    if isinstance(expected, bool) or not isinstance(expected, (dict, list, tuple, float, int)):
        assert found == expected, where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_alike(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (where, found, expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{where}[{place}]")
    else:
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9), (where, found, expected)


def plain(report: OverlapReport) -> dict[str, Any]:
    """A report without data of single ranks."""
    fields = msgspec.to_builtins(report)
    for name in ("samples", "ranks", "num_ranks"):
        fields.pop(name, None)
    if fields["power"]:
        fields["power"]["ranks"] = fields["power"]["ranks"][:MAX_RANKS_NAMED]
    assert isinstance(fields, dict)
    return fields


@pytest.mark.parametrize(
    ("seed", "number", "odd"),
    [(1, 1, True), (2, 2, True), (3, 7, True), (4, 16, True), (5, 17, False), (6, 40, True),
     *[pytest.param(*large, marks=pytest.mark.nightly) for large in ((7, 63, False), (8, 120, True))]],
)  # fmt: skip
@pytest.mark.parametrize("control", [False, True])
def test_any_tree_gives_the_report_of_all_samples_at_once(seed: int, number: int, odd: bool, control: bool) -> None:
    windows = some_windows(seed, number, odd=odd)
    options = {**OPTIONS, "world_size": number + odd, "control": control}
    expected = reference_report(windows, **options)
    flat = report_of(merge([part_of(own) for own in windows]), **options)
    grown = report_of(tree(windows, np.random.default_rng(seed)), **options)
    assert expected.compute_slowdown is not None
    assert_alike(plain(flat), plain(expected))
    assert_alike(plain(grown), plain(expected))
    assert (grown.num_reporting, grown.ranks) == (number, tuple(range(min(number, MAX_RANKS_NAMED))))


def test_ranks_that_lack_many_blocks_are_left_out_however_they_are_merged() -> None:
    """Rank 0 alone has enough blocks; what each node has alone looks whole there."""
    whole = window(0)
    half = [
        window(rank, timed=whole.timed[:8], profiled=whole.profiled[:4], wall_ms=7500.0 + rank) for rank in range(1, 20)
    ]
    expected = reference_report([whole, *half], world_size=20, every_n_steps=500)
    node = merge([part_of(own) for own in half])
    found = report_of(merge([node, part_of(whole)]), world_size=20, every_n_steps=500)
    assert [text for text in found.problems if "left out" in text] == [
        "kernel times of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... are left out: half or more of the blocks of a mode are "
        "missing there [OC329]",
        "step times of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... are left out: half or more of the blocks of a mode are "
        "missing there [OC329]",
    ]
    assert_alike(plain(found), plain(expected))


def test_means_that_differ_little_keep_their_standard_deviation() -> None:
    windows = [
        window(rank, timed=tuple(msgspec.structs.replace(b, step_ms=(1e6 + rank % 5 * 1e-3,)) for b in window().timed))
        for rank in range(100)
    ]
    expected = reference_report(windows, world_size=100, every_n_steps=500).spread["e2e_overlapped_ms"]
    found = report_of(tree(windows, np.random.default_rng(0)), world_size=100, every_n_steps=500)
    assert found.spread["e2e_overlapped_ms"].std == pytest.approx(expected.std, rel=1e-4)


def test_of_few_ranks_all_samples_are_kept_and_of_many_the_lowest_and_the_extremes() -> None:
    few = report_of(
        tree(some_windows(1, MAX_SAMPLES), np.random.default_rng(1)), world_size=MAX_SAMPLES, every_n_steps=500
    )
    assert [sample.rank for sample in few.samples] == list(range(MAX_SAMPLES))
    windows = some_windows(1, 50, odd=False)
    many = report_of(tree(windows, np.random.default_rng(1)), world_size=50, every_n_steps=500)
    wanted = {0, *[rank for s in many.spread.values() for rank in (s.low_rank, s.high_rank)]}
    assert [sample.rank for sample in many.samples] == sorted(wanted)
    recorded = tuple(msgspec.structs.replace(row, first_rank=msgspec.UNSET) for row in windows[0].collectives)
    assert many.samples[0] == msgspec.structs.replace(windows[0], environment=None, collectives=recorded)


def test_the_ranks_of_a_large_job_are_counted_and_a_report_of_an_earlier_version_counts_those_that_it_lists() -> None:
    found = report_of(merge([part_of(window(rank)) for rank in range(100)]), world_size=128, every_n_steps=500)
    assert (found.num_reporting, found.ranks) == (100, tuple(range(64)))
    assert found.metrics()["overlap/ranks_heard"] == 100
    line = msgspec.json.encode(msgspec.structs.replace(found, ranks=tuple(range(100)), num_ranks=msgspec.UNSET))
    assert b"num_ranks" not in line
    assert msgspec.json.decode(line, type=OverlapReport).num_reporting == 100


def test_the_line_of_a_small_job_is_no_larger_than_one_with_all_samples() -> None:
    windows = [msgspec.json.decode(msgspec.json.encode(own), type=RankWindow) for own in some_windows(4, 8)]
    found = report_of(merge([part_of(own) for own in windows]), world_size=8, every_n_steps=500)
    without = [
        msgspec.structs.replace(
            own, collectives=tuple(msgspec.structs.replace(row, first_rank=msgspec.UNSET) for row in own.collectives)
        )
        for own in windows
    ]
    expected = reference_report(without, world_size=8, every_n_steps=500)
    # The last digits of sums differ, and so does how many are written.
    assert len(msgspec.json.encode(found)) <= len(msgspec.json.encode(expected)) + 40


def test_kernels_beyond_the_bound_are_in_one_row_and_no_time_is_lost() -> None:
    windows = [
        window(rank, kernels=tuple(KernelTime(f"k{rank}_{n}", False, 1, 1, 2.0 + n, 1.0) for n in range(50)))
        for rank in range(20)
    ]
    found = report_of(tree(windows, np.random.default_rng(2)), world_size=20, every_n_steps=500).kernels
    assert len(found) == MAX_KERNEL_ROWS + 1
    assert OTHER_KERNELS in {kernel.name for kernel in found}
    total = sum(kernel.overlapped_ms for own in windows for kernel in own.kernels) / 20
    assert sum(kernel.overlapped_ms for kernel in found) == pytest.approx(total)


def test_one_ranks_kernels_with_long_names_are_all_kept() -> None:
    kernels = tuple(KernelTime(f"{n:0920}", False, 1, 1, 2.0 + n, 1.0) for n in range(50))
    found = report_of(part_of(window(0, kernels=kernels)), world_size=1, every_n_steps=500).kernels
    assert {kernel.name for kernel in found} == {kernel.name for kernel in kernels}


def test_ranks_of_unequal_numbers_of_blocks_with_long_names_of_kernels_fit_into_one_message() -> None:
    windows = []
    for rank, own in enumerate(realistic(64)):
        # A rank lacks none, a block of one mode, of the other, or of both.
        blocks = tuple(block for block in own.profiled if block.block >= 2 or not rank >> block.block & 1)
        kernels = tuple(KernelTime(f"{rank % 8}_{n:0918}", False, 1, 1, 2.0 + n, 1.0) for n in range(50))
        windows.append(msgspec.structs.replace(own, profiled=blocks, kernels=kernels))
    node = merge([part_of(own) for own in windows])
    assert [group.ranks.count for group in node.figures.profiled.groups] == [16] * 4
    assert len(encode(node)) < 150_000
    found = report_of(decode(encode(node)), world_size=64, every_n_steps=500).kernels
    assert OTHER_KERNELS in {kernel.name for kernel in found}
    total = sum(kernel.overlapped_ms for own in windows for kernel in own.kernels) / 64
    assert sum(kernel.overlapped_ms for kernel in found) == pytest.approx(total)


def collective(group: str, first: int, ms: float) -> CollectiveTime:
    return CollectiveTime("allreduce_", group, 8, "nccl", 1, 8, 8, ms, "", 8.0, None, None, first)


@pytest.mark.parametrize(("group_of", "lasts"), [(lambda rank: rank - rank % 4, 3), (lambda rank: rank % 4, 8)])
@pytest.mark.parametrize("cuts", [[], [4, 8], [1, 6], [2, 3, 11]])
def test_a_group_has_its_own_least_time_though_others_have_its_label(
    group_of: Callable[[int], int], lasts: int, cuts: list[int]
) -> None:
    windows = [window(rank, collectives=(collective("dp", group_of(rank), 20.0 - rank),)) for rank in range(12)]
    nodes = [merge([part_of(own) for own in windows[a:b]]) for a, b in itertools.pairwise([0, *cuts, 12])]
    (found,) = report_of(merge(nodes), world_size=12, every_n_steps=500).collectives
    assert found.transfer_ms == 20.0 - lasts


def test_of_many_groups_the_collectives_of_the_lowest_rank_keep_their_least_time() -> None:
    windows = [
        window(
            rank,
            collectives=(
                *[collective(f"own {rank} {n}", rank, 1.0) for n in range(20)],
                collective(f"zz {rank % 64}", rank % 64, 500.0 - rank),
            ),
        )
        for rank in range(400)
    ]
    part = tree(windows, np.random.default_rng(3))
    found = report_of(part, world_size=400, every_n_steps=500).collectives
    assert found[-1].transfer_ms == 500.0 - 384
    assert {row.first_rank for row in part.transfers} == {0}


def test_environment_and_power_are_those_of_all_ranks_at_once_also_over_many_hosts() -> None:
    windows = some_windows(9, 576, odd=False, shared=False)
    leaves = [encode(merge([part_of(own) for own in windows[at : at + 64]])) for at in range(0, 576, 64)]
    part = merge([decode(leaf) for leaf in leaves])
    found = report_of(part, world_size=576, every_n_steps=500)
    assert part.environment is not None
    assert found.environment is not None
    assert found.power is not None
    assert not part.environment.hosts
    assert not part.power.devices
    assert found.environment.num_hosts == 72
    assert_alike(msgspec.to_builtins(found.environment), msgspec.to_builtins(job_environment(windows)))
    expected = pool({own.rank: own.power for own in windows}, whole=False)
    assert_alike(msgspec.to_builtins(found.power.modes), msgspec.to_builtins(expected.modes))


def realistic(number: int) -> list[RankWindow]:
    """Windows as those of a job with long names of kernels, and device power."""
    name = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8_%d>(Params)"
    kernels = tuple(KernelTime(name % n, False, 4.0, 4.0, 3.1234567 + n, 2.7654321 + n, 264) for n in range(50))
    (one,) = some_windows(1, 2, odd=False)[1:]
    return copies(msgspec.structs.replace(one, kernels=kernels), number)


@pytest.mark.parametrize("number", at_night([64, 256, 1024], [64, 1024]))
def test_a_part_and_a_line_of_the_record_stay_small_however_many_ranks_there_are(number: int) -> None:
    windows = realistic(number)
    leaves = [merge([part_of(own) for own in windows[at : at + 64]]) for at in range(0, number, 64)]
    messages = [encode(leaf) for leaf in leaves]
    root = merge([decode(message) for message in messages])
    report = report_of(root, world_size=number, every_n_steps=500)
    assert max(map(len, [*messages, encode(root)])) < 150_000
    assert len(msgspec.json.encode(report)) < 200_000
    assert encode(decode(encode(root))) == encode(root)


def test_the_work_of_merging_does_not_grow_with_the_ranks() -> None:
    """Merging 64 parts of 64 ranks takes no more than three times what merging 64 parts of 4 ranks does."""
    windows = realistic(64)
    took = {}
    for size in (4, 64):
        leaf = encode(merge([part_of(own) for own in windows[:size]]))
        parts = [decode(leaf) for _ in range(64)]
        times = []
        for _ in range(3):
            began = time.thread_time()
            merge(parts)
            times.append(time.thread_time() - began)
        took[size] = min(times)
    assert took[64] < 3 * took[4]


def structs(value: Any) -> Iterator[msgspec.Struct]:
    """All structs within a value."""
    if isinstance(value, msgspec.Struct):
        yield value
        value = [getattr(value, name) for name in value.__struct_fields__]
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from structs(each)


def test_the_garbage_collector_does_not_follow_what_ranks_send() -> None:
    """Some tens of thousands of followed objects set off a search of all of Python's objects, while training waits."""
    part = decode(encode(tree(some_windows(3, 20), np.random.default_rng(0))))
    found = list(structs(part))
    assert len(found) > 100
    assert {type(each).__name__ for each in found if gc.is_tracked(each)} == set()
