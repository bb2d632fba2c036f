"""All-to-alls with split sizes: one transfer, bound by its largest share; how evenly they load the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report.views.trace_verdict import problems_of, verdict
from overlap_callbacks.traces import analyze, compare, read_trace
from overlap_callbacks.traces.figures import Analysis, SplitLoads
from tests import kineto
from tests.traces.events import MS, figures_of, gemm, overlap, said
from tests.traces.test_copies import copy

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
Rows = Sequence[int]


def args(
    sent: Rows | str, received: Rows | str, number: int | None = None, *, rows: tuple[int, int] | None = None,
    ranks: int = 2, width: int = 1_000, name: str = "all_to_allv", group: str = "ep",
) -> dict[str, Any]:  # fmt: skip
    """What torch says of an all-to-all of rows of ``width`` floats; ``rows`` are sent and received in all."""
    known = rows or (sum(map(int, sent)), sum(map(int, received)))
    found = {
        "Collective name": name, "In msg nelems": known[0] * width, "Out msg nelems": known[1] * width,
        "Group size": ranks, "dtype": "Float", "Process Group Name": "7", "Process Group Description": group,
        "In split size": sent if isinstance(sent, str) else str(list(sent)),
        "Out split size": received if isinstance(received, str) else str(list(received)),
        "Process Group Ranks": str(list(range(ranks))), "Seq": number,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def sends(start: float, end: float, correlation: int = 0, **about: Any) -> kineto.Event:
    return kineto.kernel(SEND_RECV, round(start * MS), round(end * MS), correlation, stream=20, **about)


def job(folder: Path, *ranks: list[kineto.Event], size: int | None = None) -> Analysis:
    return analyze([
        read_trace(kineto.write(folder / f"rank{i}.json", events, **kineto.job(i, size or len(ranks))))
        for i, events in enumerate(ranks)
    ])  # fmt: skip


def loads(found: Analysis) -> SplitLoads:
    assert found.splits is not None
    return found.splits


def uneven(found: Analysis) -> list[str]:
    return [sentence for sentence in verdict(found) if "uneven" in sentence]


# -- one transfer


@pytest.mark.parametrize("by", ["number", "range"])
def test_kernels_of_one_all_to_all_are_one_transfer_of_the_time_of_the_whole(tmp_path: Path, by: str) -> None:
    # 8 rows of 4,000 bytes are sent and 6 received, in two kernels from 1 ms to 4 ms, then in one of 1 ms.
    about = [args([6, 2], [5, 1], number if by == "number" else None) for number in (1, 2)]
    events = [
        sends(1, 2, 5, **about[0]), sends(2.5, 4, 6, **about[0]), sends(5, 6, 7, **about[1]),
        *[kineto.launch(number * 1_000, number) for number in (5, 6, 7)],
    ]  # fmt: skip
    if by == "range":
        events += [kineto.host_range("nccl:all_to_allv", *span) for span in ((4_500, 6_500), (6_800, 7_500))]
    found = figures_of(tmp_path, events)
    (row,) = found.collectives
    assert (row.collective, row.count, row.bytes, row.time_ms) == ("all_to_all", 2, 64_000, 3.5)
    assert row.algorithm_bandwidth_gb_s == pytest.approx(64_000 / 4e-3 / 1e9)
    assert row.bus_bandwidth_gb_s == pytest.approx(64_000 / 4e-3 / 1e9 / 2)
    assert found.total.comm_kernels_ms == 3.5


def test_an_all_to_all_of_several_kernels_has_its_bytes_once_in_a_comparison(tmp_path: Path) -> None:
    about = args([10, 10], [10, 10], 1)
    traces = [
        read_trace(kineto.write(tmp_path / f"{name}.json", [gemm(0, 5, 9), *events], **kineto.job()))
        for name, events in (
            ("one", [sends(5, 7, **about)]),
            ("two", [sends(5, 6, **about), sends(6, 7, **about)]),
        )
    ]
    for found in (compare(*traces), compare(*traces[::-1])):
        assert not said(found.problems, "different amounts")


def test_kernels_that_nothing_joins_are_a_transfer_each(tmp_path: Path) -> None:
    about = args([6, 2], [5, 1])
    (row,) = figures_of(tmp_path, [sends(1, 2, **about), sends(3, 4, **about)]).collectives
    assert (row.count, row.bytes) == (2, 64_000)
    # Another one of the group lies between, so the number is wrong.
    events = [sends(1, 2, **args([6, 2], [5, 1], 1)), sends(3, 4, **args([6, 2], [5, 1], 2))]
    (row,) = figures_of(tmp_path, [*events, sends(5, 6, **args([6, 2], [5, 1], 1))]).collectives
    assert (row.count, row.bytes) == (3, 96_000)
    # So it is where the other one has other splits.
    events = [sends(n, n + 1, **args([6 + n % 3, 2], [5, 1], 0)) for n in (0, 1, 3)]
    (row,) = figures_of(tmp_path, events).collectives
    assert (row.count, row.bytes, row.time_ms) == (3, 100_000, 3)
    # Each has a range of its own, though all have one number.
    events = [
        *[sends(n, n + 1, n, **args([6, 2], [5, 1], 0)) for n in (1, 2)],
        *[kineto.launch(n * 1_000, n) for n in (1, 2)],
        *[kineto.host_range("nccl:all_to_allv", n * 1_000 - 10, n * 1_000 + 10) for n in (1, 2)],
    ]
    (row,) = figures_of(tmp_path, events).collectives
    assert (row.count, row.bytes) == (2, 64_000)


@pytest.mark.parametrize(
    ("about", "num_bytes"),
    [
        (args([6, 2], [5, 7]), 48_000),  # more is received
        (args([6, 2], [5, 1]), 32_000),
        # Of lists of tensors the splits are elements, and torch says of both sides what is sent.
        (args([600, 200], [900, 100], rows=(800, 800), width=1, name="all_to_all"), 4_000),
        (args([0, 0], [0, 0]), 0),
        (args([0, 0], [5, 1]), 24_000),  # nothing is sent
        (args([6, 2], [0, 0]), 32_000),
        (args("[]", "[]", rows=(8, 8)), 32_000),
        (args("[1, 2, ...]", "[3, 4, ...]", rows=(8, 9)), 36_000),
        # Of lists of tensors that are cut off, what is received is not known, unless all seems even.
        (args("[1, 2, ...]", "[3, 4, ...]", rows=(8, 8), name="all_to_all"), None),
        (args("[1, 1, ...]", "[1, 1, ...]", rows=(8, 8), name="all_to_all"), 32_000),
        (args("[1, 2, ...]", "[3, 4, ...]", rows=(8, 9), name="all_to_all"), 36_000),
        (args([6, 2], [5, 7]) | {"Out msg nelems": None}, 32_000),
        (args([6, 2], [5, 7]) | {"In msg nelems": None}, None),
        (args("what?", [5, 7], rows=(8, 9)), 36_000),
        (args([6, 2], [5, 7]) | {"In split size": [6, 2], "Out split size": None}, 48_000),
    ],
)
def test_the_size_is_the_larger_of_what_is_sent_and_received(
    tmp_path: Path, about: dict[str, Any], num_bytes: int | None
) -> None:
    (row,) = figures_of(tmp_path, [sends(0, 1, **about)]).collectives
    assert (row.collective, row.bytes) == ("all_to_all", num_bytes)


def test_a_rank_with_a_larger_share_takes_longer_and_nobody_waits(tmp_path: Path) -> None:
    # Rank 0 sends 10 MB and receives 20, rank 1 sends 60 and receives 50: 60 MB in 6 ms, of which half pass a link.
    found = job(
        tmp_path,
        [sends(0, 2, **args([5, 5], [5, 15], 1, width=250_000))],
        [sends(0, 6, **args([15, 45], [5, 45], 1, width=250_000))],
    )
    (row,), (size,) = found.skew, found.sizes
    assert (row.transfer_ms, row.skew_ms) == (6, 0)
    assert [(rank.time_ms, rank.waiting_ms, rank.last) for rank in row.ranks] == [(2, 0, 0), (6, 0, 0)]
    assert (size.bytes, size.kernels, size.time_ms, size.matched, size.transfer_ms) == (60_000_000, 2, 4, 1, 6)
    assert size.transfer_bus_bandwidth_gb_s == pytest.approx(60e6 / 6e-3 / 1e9 / 2)


@pytest.mark.parametrize(
    ("times", "transfer_ms", "waited"),
    [
        ((7, 6), 6, (1, 0)),  # rank 1, with the larger share, comes later; how much later nothing proves
        ((2, 11), 6, (0, 5)),  # rank 0 does
        ((4, 4), 4, (0, 0)),  # so short that the share does not matter
        ((3, 6), 6, (0, 0)),
    ],
)
def test_waiting_is_what_a_larger_share_does_not_explain(
    tmp_path: Path, times: tuple[int, int], transfer_ms: int, waited: tuple[int, int]
) -> None:
    about = args([10, 10], [10, 10], 1), args([30, 30], [30, 30], 1)
    (row,) = job(tmp_path, *[[sends(0, time, **one)] for time, one in zip(times, about, strict=True)]).skew
    assert (row.transfer_ms, tuple(rank.waiting_ms for rank in row.ranks)) == (transfer_ms, waited)
    assert [rank.caused_ms for rank in row.ranks] == list(reversed(waited))


def test_a_rank_without_a_share_that_waits_long_is_charged_nothing(tmp_path: Path) -> None:
    about = args([0, 0], [0, 0], 1), args([250_000, 250_000], [250_000, 250_000], 1)
    (row,) = job(tmp_path, *[[sends(0, 12_000 + i, **one)] for i, one in enumerate(about)]).skew
    assert (row.transfer_ms, row.skew_ms) == (12_001, 0)


@pytest.mark.parametrize(
    "about",
    [
        args("[1, 2, ...]", "[3, 4, ...]", 1, rows=(8, 8), name="all_to_all"),
        args([6, 2], [5, 3], 1) | {"In msg nelems": None},
        args([6, 2], [5, 3], 1) | {"dtype": "unheard of"},
    ],
)
def test_where_shares_are_not_known_nobody_is_late(tmp_path: Path, about: dict[str, Any]) -> None:
    found = job(tmp_path, *[[sends(0, time, **about)] for time in (2, 6)])
    (row,) = found.skew
    assert (row.transfer_ms, row.skew_ms) == (6, 0)
    assert verdict(found)[0].endswith("they arrive together.")


def test_equal_shares_have_the_shortest_kernel_as_before(tmp_path: Path) -> None:
    about = args("[]", "[]", 1, rows=(8, 8))
    found = job(tmp_path, [sends(0, 5, **about)], [sends(0, 2, **about)])
    (row,), (size,) = found.skew, found.sizes
    assert (row.transfer_ms, row.ranks[0].waiting_ms, row.ranks[1].caused_ms) == (2, 3, 3)
    assert (size.kernels, size.matched, size.transfer_ms) == (2, 1, 2)
    assert found.splits is None


# -- split sizes that torch cuts off


@pytest.mark.parametrize("where", ["arguments", "range"])
def test_splits_that_are_cut_off_are_said_once_for_all_ranks(tmp_path: Path, where: str) -> None:
    about = args(f"[{', '.join(['7'] * 30)}, ...]", f"[{', '.join(['9'] * 30)}, ...]", 1, rows=(280, 360), ranks=40)
    events = [kineto.launch(1_000, 5), sends(1, 2, 5, **(about if where == "arguments" else {}))]
    if where == "range":
        events.append(kineto.host_range("record_param_comms", 500, 1_500, cat="cpu_op", **about))
        events.append(kineto.host_range("nccl:all_to_allv", 500, 1_500))
    found = job(tmp_path, events, events, size=40)
    assert found.splits is None
    notes = [note for note in problems_of(found) if "split sizes" in note]
    (why,) = [note.removeprefix("rank0.json, rank1.json: ") for note in notes]
    assert why == (
        "torch cuts off lists of more than 30 split sizes: how evenly such all-to-alls load the ranks is not known "
        "[OC730]"
    )
    shown = " ".join(overlap("analyze", *[str(tmp_path / f"rank{i}.json") for i in (0, 1)]).output.split())
    assert shown.count(why) == 1
    assert {row.bytes for row in found.traces[0].collectives} == {360 * 4_000 if where == "arguments" else None}


# -- how evenly


def test_a_rank_receives_what_all_ranks_send_to_it(tmp_path: Path) -> None:
    # 30 + 30 rows for rank 0 and 10 + 10 for rank 1: the mean is 40, the most 60. Step 2 is even.
    def events(first: list[int], second: list[int]) -> list[kineto.Event]:
        return [
            kineto.step(1, 0, 9 * MS), kineto.step(2, 10 * MS, 19 * MS), kineto.launch(10, 1),
            kineto.launch(10 * MS + 10, 2), sends(1, 2, 1, **args(first, [9, 9], 1)),
            sends(11, 12, 2, **args(second, [9, 9], 2)),
        ]  # fmt: skip

    found = job(tmp_path, events([30, 10], [10, 30]), events([30, 10], [30, 10]))
    assert loads(found) == SplitLoads(
        dimension="expert", group_size=2, senders=2, steps=2, load_max_over_mean=1.25, highest_rank=0
    )
    assert uneven(found) == [
        "All-to-alls are uneven: the most that a rank receives in a step is 1.25 times the mean; rank 0 receives most."
    ]
    for name in ("rank0.json", "rank1.json"):
        assert name in overlap("analyze", str(tmp_path / "rank0.json"), str(tmp_path / "rank1.json"), "--all").output


def test_what_returns_to_its_senders_does_not_even_the_loads_out(tmp_path: Path) -> None:
    # There and back, forward and backward, twice the rows in the second layer: 60 + 120 for rank 1 of 80 + 160.
    calls = [((10, 30), (10, 10)), ((10, 10), (10, 30)), ((20, 60), (20, 20)), ((20, 20), (20, 60))]
    ranks = [calls, [((10, 30), (30, 30)), ((30, 30), (10, 30)), ((20, 60), (60, 60)), ((60, 60), (20, 60))]]
    found = job(
        tmp_path,
        *[[sends(n, n + 1, **args(*call, n)) for n, call in enumerate([*of, *of])] for of in ranks],
    )
    assert (loads(found).load_max_over_mean, loads(found).highest_rank) == (1.5, 1)


def test_copies_to_each_peer_are_one_all_to_all(tmp_path: Path) -> None:
    # The first has three copies and sends evenly, the second has one: 10 + 40, 10 + 0 and 10 + 0 rows.
    about = [args(sent, [20] * 3, ranks=3) for sent in ([10, 10, 10], [40, 0, 0])]
    ranges = [
        kineto.host_range("record_param_comms", begin, begin + 40, cat="cpu_op", **of)
        for begin, of in zip((5, 105), about, strict=True)
    ]
    times = ((10, 1), (20, 2), (30, 3), (110, 4))
    copies = [copy(number, number + 1, number) for _, number in times]
    found = job(tmp_path, [*[kineto.launch(*of) for of in times], *ranges, gemm(0, 1, 9), *copies], size=3)
    assert found.traces[0].total.comm_ms == 4
    assert (loads(found).load_max_over_mean, loads(found).highest_rank) == (50 / (70 / 3), 0)


def test_a_rank_whose_splits_are_missing_is_said_to_be(tmp_path: Path) -> None:
    about = [args([10, 10, 60, 0], [20, 20, 20, 20], 1, ranks=4)] * 3 + [args("[]", "[]", 1, rows=(80, 80), ranks=4)]
    found = job(tmp_path, *[[sends(0, 1, **one)] for one in about])
    assert (loads(found).senders, loads(found).load_max_over_mean, loads(found).highest_rank) == (3, 3.0, 2)
    assert "3.00 times the mean, by what 3 of 4 ranks send; rank 2" in uneven(found)[0]
    alone = job(tmp_path, [sends(0, 1, **about[0])], size=4)
    assert "by what 1 of 4 ranks send" in uneven(alone)[0]
    assert "by what 1 of 4 ranks send" in overlap("analyze", str(tmp_path / "rank0.json")).output


def test_groups_are_compared_within_themselves(tmp_path: Path) -> None:
    # The other group has twice the rows: another stage of a pipeline, say. Each is even.
    other = args([20, 20], [20, 20], 1) | {"Process Group Ranks": "[2, 3]", "Process Group Name": "8"}
    about = [args([10, 10], [10, 10], 1)] * 2 + [other] * 2
    found = job(tmp_path, *[[sends(0, 1, **one)] for one in about])
    assert (loads(found).load_max_over_mean, uneven(found)) == (1.0, [])


def test_groups_of_experts_count_before_others(tmp_path: Path) -> None:
    events = [sends(0, 1, **args([10, 30], [9, 9], 1)), sends(2, 3, **args([900, 100], [9, 9], 1, group="context"))]
    assert loads(job(tmp_path, events)).load_max_over_mean == 1.5
    assert loads(job(tmp_path, events[1:])).load_max_over_mean == 1.8


@pytest.mark.parametrize(
    "about",
    [
        args([10, 10], [10, 10], 1), args([0, 0], [0, 0], 1), args("[]", "[]", 1, rows=(8, 8)),
        args("[1, 9, ...]", "[1, 9, ...]", 1, rows=(8, 8)), args([1, 2, 9], [1, 2, 3], 1, ranks=2),
        args([10, 30], [9, 9], 1) | {"Collective name": "allreduce"}, args([10, 30], [9, 9]) | {"In split size": None},
        args("[-1, 9]", "[1, 9]", 1, rows=(8, 8)), args([8], [8], 1, ranks=1),
    ],
)  # fmt: skip
def test_no_sentence_where_splits_are_even_or_say_nothing(tmp_path: Path, about: dict[str, Any]) -> None:
    found = job(tmp_path, [sends(0, 1, **about)], [sends(0, 1, **about)])
    assert uneven(found) == []
    assert found.splits is None or found.splits.load_max_over_mean == 1


def test_splits_of_steps_that_are_cut_do_not_count(tmp_path: Path) -> None:
    events = [sends(0, 1, **args([10, 30], [9, 9], 1)), kineto.step(1, 0, 9 * MS), kineto.step(2, 9 * MS, 10 * MS)]
    path = kineto.write(tmp_path / "cut.json", events, style="compact")
    assert loads(analyze([read_trace(path)])).steps == 1
    path.write_bytes(path.read_bytes()[:-60])
    assert analyze([read_trace(path)]).splits is None


@pytest.mark.parametrize(
    "odd",
    [
        {"In split size": 10**40, "Out split size": "[1]"}, {"In split size": "[" + "9" * 40 + ", 1]"},
        {"In split size": {"a": [1]}}, {"In split size": [[1], 2]}, {"In split size": True, "Out split size": 1.5},
        {"Process Group Ranks": "[0, 1, ...]"}, {"Process Group Ranks": None, "Process Group Name": None},
        {"Group size": "2"}, {"dtype": "What"}, {"In msg nelems": "many", "Out msg nelems": True}, {"Seq": "first"},
    ],
)  # fmt: skip
def test_odd_fields_are_no_error(tmp_path: Path, odd: dict[str, Any]) -> None:
    about = args([10, 30], [9, 9], 1) | odd
    found = job(tmp_path, [sends(0, 1, **about), sends(2, 3, **about)], [sends(0, 1, **about)])
    assert found.splits is None or found.splits.load_max_over_mean == 1.5
    assert [trace.total.comm_kernels_ms for trace in found.traces] == [2, 1]


def test_other_files_say_nothing_of_all_to_alls_or_repeated_reductions(tmp_path: Path) -> None:
    for overlapped in (False, True):
        path = kineto.write(tmp_path / "trace.json", kineto.training(overlapped=overlapped), **kineto.job())
        found = analyze([read_trace(path)])
        assert (found.splits, found.traces[0].reductions) == (None, None)
