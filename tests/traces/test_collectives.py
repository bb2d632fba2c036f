from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.equations import bus_factor
from overlap_callbacks.traces.figures import CollectiveFigures
from tests import kineto
from tests.traces.events import collective, figures_of, gemm

GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"


def metadata(
    name: str, elements: Any, *, out: Any = None, size: Any = 2, dtype: Any = "Float", group: str = "0"
) -> dict[str, Any]:
    return {
        "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements if out is None else out,
        "Group size": size, "dtype": dtype, "Process Group Name": group, "Process Group Ranks": "[0, 1]",
    }  # fmt: skip


def only(rows: tuple[CollectiveFigures, ...]) -> CollectiveFigures:
    (row,) = rows
    return row


KINDS = [
    # name, in, out, ranks, bytes as NCCL's tests count them (float), bus bandwidth / algorithm bandwidth
    ("allreduce", 1_000, 1_000, 4, 4_000, 2 * 3 / 4),
    ("_allgather_base", 1_000, 4_000, 4, 16_000, 3 / 4),
    ("all_gather", 1_000, 8_000, 8, 32_000, 7 / 8),
    ("_reduce_scatter_base", 4_000, 1_000, 4, 16_000, 3 / 4),
    ("reduce_scatter_tensor_coalesced", 4_000, 1_000, 4, 16_000, 3 / 4),
    ("broadcast", 1_000, 1_000, 8, 4_000, 1),
    ("reduce", 1_000, 1_000, 8, 4_000, 1),
    ("all_to_all", 1_000, 1_000, 8, 4_000, 7 / 8),
    ("alltoallv", 1_000, 1_000, 4, 4_000, 3 / 4),
    ("send", 1_000, 1_000, 2, 4_000, 1),
    ("recv", 1_000, 1_000, 2, 4_000, 1),
]


@pytest.mark.parametrize(("name", "elements", "out", "ranks", "size", "factor"), KINDS, ids=[row[0] for row in KINDS])
def test_bytes_and_bandwidths_follow_nccl_s_tests(
    tmp_path: Path, name: str, elements: int, out: int, ranks: int, size: int, factor: float
) -> None:
    args = metadata(name, elements, out=out, size=ranks)
    row = only(figures_of(tmp_path, [collective(0, 1, **args), collective(2, 5, **args)]).collectives)
    assert (row.count, row.bytes, row.time_ms, row.group_size) == (2, 2 * size, 4, ranks)
    # Bytes in milliseconds: a thousand of them a second is a millionth of a GB/s.
    assert row.algorithm_bandwidth_gb_s == pytest.approx(2 * size / 4e-3 / 1e9)
    assert row.bus_bandwidth_gb_s == pytest.approx(factor * 2 * size / 4e-3 / 1e9)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("Float", 4), ("float", 4), ("Half", 2), ("BFloat16", 2), ("c10::BFloat16", 2), ("Double", 8), ("Long", 8),
        ("long int", 8), ("Int", 4), ("Short", 2), ("Byte", 1), ("unsigned char", 1), ("Char", 1), ("Bool", 1),
        ("Float8_e4m3fn", 1), ("Float8_e5m2", 1),
    ],
)  # fmt: skip
def test_bytes_are_elements_times_the_width_of_the_type(tmp_path: Path, dtype: str, width: int) -> None:
    row = only(figures_of(tmp_path, [collective(0, 1, **metadata("allreduce", 10, dtype=dtype))]).collectives)
    assert row.bytes == 10 * width


@pytest.mark.parametrize(
    "unknown", [{"dtype": "Opaque"}, {"dtype": None}, {"elements": None}, {"elements": "10"}, {"elements": -1}]
)
def test_what_is_unknown_of_the_size_leaves_bytes_and_bandwidths_undefined(
    tmp_path: Path, unknown: dict[str, Any]
) -> None:
    options = {"elements": 10, **unknown}
    row = only(figures_of(tmp_path, [collective(0, 1, **metadata("allreduce", **options))]).collectives)
    assert (row.bytes, row.algorithm_bandwidth_gb_s, row.bus_bandwidth_gb_s) == (None, None, None)
    assert (row.count, row.time_ms) == (1, 1)


def test_an_unknown_group_or_kind_leaves_the_bus_bandwidth_undefined(tmp_path: Path) -> None:
    row = only(figures_of(tmp_path, [collective(0, 1, **metadata("allreduce", 10, size=None))]).collectives)
    assert row.algorithm_bandwidth_gb_s is not None
    assert (row.group_size, row.bus_bandwidth_gb_s) == (None, None)
    row = only(figures_of(tmp_path, [collective(0, 1, **metadata("something_new", 10))]).collectives)
    assert (row.collective, row.bus_bandwidth_gb_s) == ("other", None)


def test_a_group_of_one_rank_sends_nothing_over_its_link() -> None:
    assert bus_factor("all_reduce", 1) == 0
    assert bus_factor("all_reduce", 0) is None
    assert bus_factor("other", 2) is None


def test_bandwidth_is_of_the_kernels_whose_size_is_known(tmp_path: Path) -> None:
    known, unknown = metadata("allreduce", 1_000_000), metadata("allreduce", None)
    row = only(figures_of(tmp_path, [collective(0, 1, **known), collective(2, 9, **unknown)]).collectives)
    assert (row.count, row.bytes, row.time_ms) == (2, 4_000_000, 8)
    assert row.algorithm_bandwidth_gb_s == pytest.approx(4e6 / 1e-3 / 1e9)


def test_kinds_and_groups_have_a_row_each_those_with_the_most_time_first(tmp_path: Path) -> None:
    tensor = {**metadata("allreduce", 10, group="7", size=4), "Process Group Description": "tensor_parallel"}
    events = [
        collective(0, 1, **metadata("allreduce", 10)), collective(1, 2, **metadata("allreduce", 10)),
        collective(2, 9, **tensor), collective(9, 12, **metadata("allgather", 10)), gemm(8, 10),
    ]  # fmt: skip
    rows = figures_of(tmp_path, events).collectives
    assert [(row.collective, row.group, row.description, row.group_size, row.count) for row in rows] == [
        ("all_reduce", "7", "tensor_parallel", 4, 1),
        ("all_gather", "0", "", 2, 1),
        ("all_reduce", "0", "", 2, 2),
    ]
    assert [row.time_ms for row in rows] == [7, 3, 2]
    assert [row.hidden_ms for row in rows] == [1, 1, 0]


def noted(name: str, *, thread: int = 100, **args: Any) -> list[kineto.Event]:
    """A range of torch's, and a call within it that launches kernel 5."""
    return [kineto.host_range(name, 1_000, 9_000, thread=thread, **args), kineto.launch(4_000, 5, thread=100)]


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        ("nccl:all_reduce", "all_reduce"), ("nccl:_all_gather_base", "all_gather"), ("nccl:broadcast", "broadcast"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"), ("nccl:all_to_all", "all_to_all"),
        ("nccl:send 0->1", "send_recv"), ("nccl:coalesced", "other"),
    ],
)  # fmt: skip
def test_without_metadata_the_range_of_the_launch_gives_the_kind(tmp_path: Path, note: str, kind: str) -> None:
    row = only(figures_of(tmp_path, [*noted(note), collective(1, 2, 5, GENERIC)]).collectives)
    assert row.collective == kind
    # Where it tells nothing the name decides.
    row = only(figures_of(tmp_path, [*noted("nccl:coalesced"), collective(1, 2, 5)]).collectives)
    assert row.collective == "all_reduce"


def test_the_range_gives_the_size_by_its_first_input(tmp_path: Path) -> None:
    inputs = {"Input Dims": [[1_000, 20], [3]], "Input type": ["float", "int"]}
    row = only(figures_of(tmp_path, [*noted("nccl:all_reduce", **inputs), collective(1, 2, 5)]).collectives)
    assert row.bytes == 1_000 * 20 * 4
    assert row.algorithm_bandwidth_gb_s == pytest.approx(80_000 / 1e-3 / 1e9)
    assert row.bus_bandwidth_gb_s is None  # the group is not known
    # Of a gather the input is not the size that counts.
    row = only(
        figures_of(tmp_path, [*noted("nccl:_all_gather_base", **inputs), collective(1, 2, 5, GENERIC)]).collectives
    )
    assert row.bytes is None


@pytest.mark.parametrize(
    "inputs",
    [
        {}, {"Input Dims": [[1_000]]}, {"Input Dims": [], "Input type": []}, {"Input Dims": [[]], "Input type": [""]},
        {"Input Dims": [["a"]], "Input type": ["float"]}, {"Input Dims": [[[5], [5]]], "Input type": ["TensorList"]},
        {"Input Dims": "[[5]]", "Input type": "float"}, {"Input Dims": {"a": 1}, "Input type": ["float"]},
        {"Input Dims": [[-5]], "Input type": ["float"]}, {"Input Dims": 7, "Input type": 7},
    ],
)  # fmt: skip
def test_inputs_without_a_size_leave_it_undefined(tmp_path: Path, inputs: dict[str, Any]) -> None:
    row = only(figures_of(tmp_path, [*noted("nccl:all_reduce", **inputs), collective(1, 2, 5)]).collectives)
    assert (row.collective, row.bytes) == ("all_reduce", None)


def test_a_range_of_another_thread_or_time_does_not_describe_a_kernel(tmp_path: Path) -> None:
    kernel = collective(1, 2, 5, GENERIC)
    assert only(figures_of(tmp_path, [*noted("nccl:broadcast"), kernel]).collectives).collective == "broadcast"
    assert only(figures_of(tmp_path, [*noted("nccl:broadcast", thread=7), kernel]).collectives).collective == "other"
    before = [kineto.host_range("nccl:broadcast", 0, 3_999), kineto.launch(4_000, 5)]
    assert only(figures_of(tmp_path, [*before, kernel]).collectives).collective == "other"


def test_metadata_goes_before_the_range_and_the_range_before_the_name(tmp_path: Path) -> None:
    misleading = "ncclDevKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)"
    kernel = collective(1, 2, 5, misleading)
    assert only(figures_of(tmp_path, [kernel]).collectives).collective == "broadcast"
    assert only(figures_of(tmp_path, [*noted("nccl:all_reduce"), kernel]).collectives).collective == "all_reduce"
    kernel["args"].update(metadata("_allgather_base", 1, out=2))
    row = only(figures_of(tmp_path, [*noted("nccl:all_reduce"), kernel]).collectives)
    assert (row.collective, row.bytes) == ("all_gather", 8)


def test_a_generic_kernel_s_kind_is_that_of_the_metadata_in_families_and_pairs_too(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [collective(0, 4, 0, GENERIC, **metadata("allreduce", 1)), gemm(1, 3)])
    assert only(found.collectives).collective == "all_reduce"
    assert found.families[0].beside == {"all_reduce": 2}


SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def test_metadata_tells_an_all_to_all_from_sends_and_receives_and_without_it_a_note_says_so(tmp_path: Path) -> None:
    told = figures_of(tmp_path, [{**collective(0, 1, **metadata("all_to_allv", 1_000)), "name": SEND_RECV}])
    assert only(told.collectives).collective == "all_to_all"
    assert told.problems == ()
    for name, kind in ((SEND_RECV, "send_recv"), (GENERIC, "other")):
        untold = figures_of(tmp_path, [{**collective(0, 1), "name": name}, collective(2, 3)])
        assert kind in [row.collective for row in untold.collectives]
        assert untold.problems == (
            "the names of 1 kernels fit several collectives, and nothing else tells which: "
            f"they count as {kind}: {name[:80]} [OC729]",
        )
