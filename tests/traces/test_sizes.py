"""Collectives by size, and the bandwidth of their transfer without waiting; names in narrow columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.formatting import cut
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import CollectiveSize
from tests import kineto
from tests.traces.events import MS, collective


def message(elements: int, sequence: int) -> dict[str, Any]:
    return {
        "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "Group size": 2,
        "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": sequence,
    }  # fmt: skip


def sizes(folder: Path, *ranks: list[kineto.Event]) -> tuple[CollectiveSize, ...]:
    paths = [kineto.write(folder / f"{i}.json", events, **kineto.job(i, 2)) for i, events in enumerate(ranks)]
    return analyze([read_trace(path) for path in paths]).sizes


def test_one_file_gives_the_time_of_each_size_and_no_transfer(tmp_path: Path) -> None:
    events = [collective(0, 4, **message(1_000_000, 1)), collective(5, 11, **message(1_000_000, 2))]
    large, small = sizes(tmp_path, [*events, collective(12, 13, **message(250_000, 3))])
    assert (large.collective, large.group_size, large.bytes, large.kernels) == ("all_reduce", 2, 4_000_000, 2)
    # 8 MB in 10 ms; the factor of an all-reduce on two ranks is 1.
    assert (large.time_ms, large.bus_bandwidth_gb_s) == (5, pytest.approx(0.8))
    assert (large.matched, large.transfer_ms, large.transfer_bus_bandwidth_gb_s) == (0, None, None)
    assert (small.bytes, small.kernels, small.time_ms) == (1_000_000, 1, 1)


def test_the_transfer_is_the_shortest_kernel_over_the_ranks(tmp_path: Path) -> None:
    first = [collective(0, 4, **message(1_000_000, 1)), collective(5, 7, **message(1_000_000, 2))]
    second = [collective(0, 1, **message(1_000_000, 1)), collective(5, 8, **message(1_000_000, 2))]
    (row,) = sizes(tmp_path, first, second)
    assert (row.kernels, row.time_ms, row.matched) == (4, 2.5, 2)
    assert (row.transfer_ms, row.transfer_bandwidth_gb_s) == (1.5, pytest.approx(8_000_000 / (3 * MS)))


def test_collectives_whose_ranks_give_different_sizes_have_no_transfer(tmp_path: Path) -> None:
    rows = sizes(tmp_path, [collective(0, 4, **message(10, 1))], [collective(0, 1, **message(20, 1))])
    assert [(row.bytes, row.matched, row.transfer_ms) for row in rows] == [(40, 0, None), (80, 0, None)]


def test_a_kernel_that_copies_a_collectives_tensors_is_no_message(tmp_path: Path) -> None:
    unpacking = kineto.kernel("CatArrayBatchedCopy<float>(float*)", 4 * MS, 6 * MS, 0, **message(1_000_000, 1))
    (row,) = sizes(tmp_path, [collective(0, 4, **message(1_000_000, 1)), unpacking])
    assert (row.kernels, row.time_ms) == (1, 4)


LONG = [f"vectorized_elementwise_kernel<4, {kind}Functor<float>, Array<char*, 3> >(int)" for kind in ("Add", "Mul")]


def test_names_of_a_narrow_column_keep_the_part_in_which_they_differ() -> None:
    for width in (12, 20, 30, 40):
        shown = [cut(name, LONG, width) for name in LONG]
        assert all(len(text) <= width for text in shown)
        assert shown[0] != shown[1]
        assert all(text[0] == "v" for text in shown)
    files = [f"job128_rank{rank}.json.gz" for rank in (0, 1)]
    assert [cut(name, files, 9) for name in files] == ["job…ank0…", "job…ank1…"]


def test_names_that_fit_and_names_that_differ_from_the_start_are_cut_at_their_end_alone() -> None:
    assert cut(LONG[0], LONG, len(LONG[0])) == LONG[0]
    assert cut(LONG[0], [LONG[0], "gemm"], 20) == LONG[0][:19] + "…"
