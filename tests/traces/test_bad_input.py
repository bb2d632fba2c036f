from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.traces import TraceError, analyze, read_trace, stream
from overlap_callbacks.traces.figures import Analysis
from overlap_callbacks.traces.files import PIECE_BYTES
from tests import kineto
from tests.kineto import Nanoseconds
from tests.toggling import SAMPLE_OR_ALL, places
from tests.traces.events import MS, all_reduce, error_of, figures_of, gemm, overlap, said, short_trace

# -- files that end too early, or are damaged


@pytest.mark.parametrize("every", SAMPLE_OR_ALL)
@pytest.mark.parametrize("args", [{}, {"objects": [{"a": 1}, {"b": "}]"}]}], ids=["flat", "nested"])
@pytest.mark.parametrize("style", ["pretty", "line", "compact"])
def test_of_a_file_cut_off_anywhere_the_whole_events_are_read_and_the_rest_is_said_to_be_missing(
    tmp_path: Path, style: str, args: dict[str, Any], every: bool
) -> None:
    content = kineto.text(short_trace(**args), style=style)
    begin = content.index(b"[", content.index(b'"traceEvents"')) + 1
    ends = [place + 1 for place in range(len(content)) if closes_event(content[begin : place + 1])]
    is_kernel = [event["cat"] == "kernel" for event in short_trace()]
    close = content.index(b"]", ends[-1])
    path = tmp_path / "trace.json"
    for length in places(content, every=every):
        path.write_bytes(content[:length])
        if length < begin:
            with pytest.raises(TraceError):
                read_trace(path)
            continue
        whole = sum(kernel for kernel, end in zip(is_kernel, ends, strict=True) if end <= length)
        if not whole:
            with pytest.raises(TraceError, match="cut off before its first kernel"):
                read_trace(path)
            continue
        found = read_trace(path)
        assert len(found.kernels) == whole, length
        assert not said(found.problems, "could not be read"), (length, found.problems)
        if length <= close:
            assert said(found.problems, "cut off"), (length, found.problems)
            assert said(found.warnings, "any step may lack some"), (length, found.warnings)
        assert [step.cut for step in found.steps] == [length <= close]
        assert len(analyze([found]).traces) == 1


def closes_event(content: bytes) -> bool:
    """Whether this beginning of an array ends with the end of one of its objects."""
    if not content.endswith(b"}"):
        return False
    try:
        json.loads(b"[" + content + b"]")
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("every", SAMPLE_OR_ALL)
def test_a_compressed_file_cut_off_anywhere_gives_what_can_be_read_or_one_message(tmp_path: Path, every: bool) -> None:
    content = gzip.compress(kineto.text(short_trace()))
    path = tmp_path / "trace.json.gz"
    for length in places(content, every=every)[1:]:
        path.write_bytes(content[:length])
        try:
            found = read_trace(path)
        except TraceError as error:
            assert str(path) in str(error)  # noqa: PT017 - the other outcome is right too
        else:
            assert said(found.problems, "cut off"), length


def test_of_a_large_compressed_file_cut_off_in_the_middle_the_first_half_is_read(tmp_path: Path) -> None:
    events = [gemm(i, i + 0.5, i + 1) for i in range(40_000)]
    whole = kineto.write(tmp_path / "whole.json.gz", events)
    path = tmp_path / "half.json.gz"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (found,) = analyze([read_trace(path)]).traces
    assert 0 < found.total.kernels < len(events)
    assert found.total.compute_ms == pytest.approx(0.5 * found.total.kernels)
    assert said(found.problems, "cut off or damaged")


@pytest.mark.parametrize("every", SAMPLE_OR_ALL)
def test_a_compressed_file_with_one_byte_wrong_gives_one_message_a_warning_or_what_it_gave_before(
    tmp_path: Path, every: bool
) -> None:
    content = gzip.compress(kineto.text(short_trace()))
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    (whole,) = analyze([read_trace(path)]).traces
    refused, tried = 0, places(content, every=every)
    for place in tried:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        try:
            (found,) = analyze([read_trace(path)]).traces
        except TraceError:
            refused += 1
            continue
        assert found == whole or said(found.problems, "damaged"), place
    assert refused > len(tried) / 2


def test_a_file_followed_by_what_is_not_compressed_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(kineto.text(short_trace())) + b"and more")
    try:
        (found,) = analyze([read_trace(path)]).traces
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017 - the other outcome is right too
    else:
        assert found.total.kernels == 3
        assert found.problems


# -- files that are no traces

NO_TRACES = {
    "empty": b"",
    "blank": b" \n\t \n",
    "gzip of nothing": gzip.compress(b""),
    "gzip of blanks": gzip.compress(b"  \n"),
    "gzip that ends in its header": gzip.compress(b"{}")[:5],
    "no JSON": b"Traceback (most recent call last):\n",
    "binary": bytes(range(256)),
    "a web page": b"<!DOCTYPE html><html><body>traceEvents</body></html>",
    "an object without events": b'{"schemaVersion": 1}',
    "an object in which the events are null": b'{"traceEvents": null}',
    "an object in which the events are an object": b'{"traceEvents": {"a": 1}}',
    "events in an inner object": b'{"inner": {"traceEvents": [{"ph": "X"}]}}',
    "a text": b'"traceEvents"',
    "a number": b"17",
    "a record of this library": b'{"record":"trace_analysis","traces":[]}\n',
}


@pytest.mark.parametrize("name", NO_TRACES)
def test_what_is_no_trace_gives_one_line_that_names_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(NO_TRACES[name])
    with pytest.raises(TraceError, match=r"file\.json"):
        read_trace(path)
    assert "file.json" in error_of("analyze", str(path))
    good = str(kineto.write(tmp_path / "good.json", short_trace()))
    assert "file.json" in error_of("compare", good, str(path))


def test_a_folder_and_a_missing_file_give_one_line_each(tmp_path: Path) -> None:
    assert "is a folder" in error_of("analyze", str(tmp_path))
    assert "cannot be read: No such file" in error_of("analyze", str(tmp_path / "none.json"))
    assert "is a folder" in error_of("compare", str(tmp_path), str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_gives_one_line(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "trace.json", short_trace())
    path.chmod(0)
    assert "Permission denied" in error_of("analyze", str(path))


EMPTY = {
    b'{"traceEvents": []}': "holds no events",
    b"[]": "holds no events",
    b'{"traceEvents": [{}]}': "1 event, but no kernel and no operator of torch",
    b'{"traceEvents": [{"ph": "X", "name": "f", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}': "1 event, but no kernel",
    b'{"traceEvents": [': "is cut off before its first kernel or operator",
}


@pytest.mark.parametrize("content", EMPTY)
def test_a_file_of_events_without_a_kernel_or_an_operator_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=EMPTY[content]):
        read_trace(path)
    assert EMPTY[content] in error_of("analyze", str(path))
    assert EMPTY[content] in error_of("compare", str(path), str(path))


# -- traces without kernels, or without communication


def test_a_trace_of_a_cpu_job_is_read_by_its_own_rules(tmp_path: Path) -> None:
    us = 1_000
    events = [
        kineto.host_range("aten::linear", 0, 100 * us, cat="cpu_op"),
        kineto.host_range("aten::mm", 20 * us, 80 * us, cat="cpu_op"),
        kineto.host_range("c10d::allreduce_", 100 * us, 110 * us, cat="cpu_op"),
        kineto.host_range("aten::add", 140 * us, 180 * us, cat="cpu_op"),
        kineto.host_range("aten::mul", 0, 500 * us, cat="cpu_op", thread=7),  # another thread computes something else
        kineto.host_range("gloo:all_reduce", 50 * us, 150 * us, thread=8),
        kineto.host_range("gloo:all_reduce", 140 * us, 160 * us, thread=9),
        kineto.step(3, 0, 200 * us),
    ]
    found = figures_of(tmp_path, events)
    assert found.on_host
    assert said(found.problems, "no kernels of a device")
    assert found.total.compute_ms == pytest.approx(0.1 + 0.04)
    assert found.total.comm_ms == pytest.approx(0.11)
    assert found.total.covered_compute_ms == pytest.approx(0.05 + 0.02)
    assert found.total.overlap_ratio == pytest.approx(0.07 / 0.14)
    assert [(family.family, pytest.approx(family.time_ms)) for family in found.families] == [
        ("gemm", pytest.approx(0.1)),
        ("elementwise", pytest.approx(0.04)),
    ]
    assert [(row.collective, row.count) for row in found.collectives] == [("all_reduce", 2)]
    assert [step.step for step in found.steps] == [3]


def test_without_communication_ratios_are_undefined_and_times_are_right(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [gemm(0, 2), gemm(3, 4)])
    assert found.total.compute_ms == 3
    assert (found.total.overlap_ratio, found.total.hidden_comm_fraction) == (None, None)
    assert said(found.problems, "no communication")


def test_without_compute_ratios_of_compute_are_undefined(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [all_reduce(0, 2)])
    assert (found.total.overlap_ratio, found.total.overlap_ratio_busy) == (None, None)
    assert (found.total.hidden_comm_fraction, found.total.exposed_comm_ms) == (0, 2)


# -- times


def test_kernels_with_negative_durations_are_left_out_and_counted(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [gemm(0, 2), gemm(5, 4), all_reduce(9, 3), all_reduce(1, 2)])
    assert (found.total.compute_ms, found.total.comm_ms, found.total.hidden_comm_ms) == (2, 1, 1)
    assert found.total.kernels == 2
    assert said(found.warnings, "2 events have no time that can be read, and are left out")


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", ["missing", None, "soon", "", [], {}, True, "NaN", "Infinity", 10**40])
def test_events_without_a_time_that_can_be_read_are_left_out_and_counted(
    tmp_path: Path, field: str, value: Any
) -> None:
    broken = gemm(5, 9)
    if value == "missing":
        del broken[field]
    else:
        broken[field] = value
    found = figures_of(tmp_path, [gemm(0, 2), broken, all_reduce(1, 3)])
    assert (found.total.kernels, found.total.compute_ms, found.total.hidden_comm_ms) == (2, 2, 1)
    assert said(found.problems, "1 events have no time that can be read")


@pytest.mark.parametrize(
    ("written", "nanoseconds"),
    [
        (b"1500", 1_500_000), (b"1500.5", 1_500_500), (b'"1500.25"', 1_500_250), (b'"1500"', 1_500_000),
        (b"1.5e3", 1_500_000), (b"15E2", 1_500_000), (b"1500.0004", 1_500_000), (b"1500.00060", 1_500_001),
        (b"0.001", 1), (b"1e-3", 1), (b"1e-999999", 0), (b"0", 0), (b"-0", 0), (b"-0.0", 0),
    ],
)  # fmt: skip
def test_times_are_read_to_the_nanosecond_however_they_are_written(
    tmp_path: Path, written: bytes, nanoseconds: int
) -> None:
    path = tmp_path / "trace.json"
    event = kineto.text([gemm(1, 2)], style="line")
    path.write_bytes(event.replace(b'"dur": 1000.000', b'"dur": ' + written))
    assert read_trace(path).kernels.intervals.durations_ns.tolist() == [nanoseconds]
    path.write_bytes(event.replace(b'"ts": 4458676417788.066', b'"ts": ' + written))
    assert read_trace(path).kernels.intervals.start_ns.tolist() == [nanoseconds]


@pytest.mark.parametrize("since_1970", [False, True])
def test_times_of_today_lose_no_nanosecond(tmp_path: Path, since_1970: bool) -> None:
    start = 1_755_000_000_123_456_789 if since_1970 else kineto.BASE_NS
    events = [{**gemm(0, 1), "ts": Nanoseconds(start + i), "dur": Nanoseconds(1)} for i in range(3)]
    kernels = read_trace(kineto.write(tmp_path / "trace.json", events)).kernels
    assert [time - start for time in kernels.intervals.start_ns.tolist()] == [0, 1, 2]
    assert kernels.intervals.busy_ns == 3


@pytest.mark.parametrize("written", ["1e999999999", "1e99999999999999999999", "-1e999999999", "9" * 5_000])
@pytest.mark.parametrize("field", [b'"dur": 1000.000', b'"ts": 4458676417788.066'])
def test_a_time_beyond_all_clocks_is_left_out_and_counted(tmp_path: Path, field: bytes, written: str) -> None:
    path = tmp_path / "trace.json"
    name = field.partition(b":")[0]
    content = kineto.text([gemm(1, 2), all_reduce(4, 5)], style="line")
    path.write_bytes(content.replace(field, name + b": " + written.encode(), 1))
    (found,) = analyze([read_trace(path)]).traces
    assert found.total.kernels == 1
    assert found.problems


def test_durations_of_centuries_add_up_to_no_negative_time(tmp_path: Path) -> None:
    century = 3_155_760_000 * 10**9
    found = figures_of(tmp_path, [{**gemm(i, i), "dur": Nanoseconds(century)} for i in range(4)])
    if found.total.kernels:
        assert found.total.compute_ms == pytest.approx(found.total.kernels * century / 1e6)
    assert found.total.compute_busy_ms >= 0
    assert found.problems


def test_kernels_centuries_apart_span_no_negative_time(tmp_path: Path) -> None:
    century = 3_155_760_000 * 10**9
    events = [{**gemm(0, 0), "ts": Nanoseconds(i * century), "dur": Nanoseconds(century)} for i in (-1, 1)]
    found = figures_of(tmp_path, events)
    assert found.total.wall_ms is None or found.total.wall_ms >= 0
    assert found.total.compute_ms >= 0
    assert found.problems


def test_a_clock_that_jumps_is_said_and_changes_no_figure(tmp_path: Path) -> None:
    hour = 3_600 * 1_000
    still = figures_of(tmp_path, [gemm(0, 2), all_reduce(1, 3), gemm(10, 12), all_reduce(11, 13)])
    jumped = figures_of(
        tmp_path, [gemm(0, 2), all_reduce(1, 3), gemm(hour + 10, hour + 12), all_reduce(hour + 11, hour + 13)]
    )
    assert said(jumped.problems, "the clock may have jumped")
    assert not still.problems
    for name in ("compute_ms", "comm_ms", "hidden_comm_ms", "overlap_ratio"):
        assert getattr(jumped.total, name) == getattr(still.total, name)


def test_kernels_of_one_stream_that_overlap_a_little_count_twice_in_the_sum_and_once_in_the_union(
    tmp_path: Path,
) -> None:
    found = figures_of(tmp_path, [gemm(0, 0.04), gemm(0.02, 0.06), all_reduce(0.03, 0.05), all_reduce(0.04, 0.08)])
    assert (found.total.compute_ms, found.total.compute_busy_ms) == (0.08, 0.06)
    assert (found.total.comm_kernels_ms, found.total.comm_ms) == (0.06, 0.05)
    assert (found.total.hidden_comm_ms, found.total.covered_compute_ms) == (0.03, 0.01 + 0.03)
    assert not found.warnings


# -- identities


def test_a_kernel_belongs_to_its_launch_by_numbers_above_2_to_the_63(tmp_path: Path) -> None:
    large = [2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2]
    events = []
    for i, number in enumerate(large):
        events += [kineto.step(i, i * MS, i * MS + 9_000), kineto.launch(i * MS + 10, number)]
        events.append(gemm(10 + 5 * i, 10 + 5 * i + 1 + i, number))
    found = figures_of(tmp_path, events)
    assert {step.step: step.compute_ms for step in found.steps} == {0: 1, 1: 2, 2: 3, 3: 4}


@pytest.mark.parametrize(
    "number", [0, -1, 2**64, 2**70, 10**400, "7", "0x7", None, 1.5, [1], {"a": 1}, True, float(2**80)]
)
def test_a_correlation_that_is_none_costs_the_step_and_nothing_else(tmp_path: Path, number: Any) -> None:
    broken, call = gemm(3, 5), kineto.launch(20, 9)
    broken["args"]["correlation"] = call["args"]["correlation"] = number
    events = [kineto.step(1, 0, MS), kineto.launch(10, 7), gemm(1, 2, 7), call, broken]
    found = figures_of(tmp_path, events)
    assert found.total.compute_ms == 3
    assert sum(step.compute_ms for step in found.steps) in (1, 3)


@pytest.mark.parametrize("value", [["kernel"], {"a": 1}, 7, None, True])
@pytest.mark.parametrize("field", ["cat", "ph", "name", "pid", "tid"])
def test_a_field_of_an_odd_type_spoils_no_other_event(tmp_path: Path, field: str, value: Any) -> None:
    odd = [gemm(5, 9), kineto.launch(0, 5), kineto.host_range("aten::mm", 0, 5, cat="cpu_op"), kineto.step(1, 0, 9)]
    events = [gemm(0, 2), *({**event, field: value} for event in odd), all_reduce(1, 3)]
    found = figures_of(tmp_path, events)
    assert found.total.hidden_comm_ms == 1
    assert found.total.compute_ms in (2, 6)


@pytest.mark.parametrize("value", [None, [], [1, 2], "text", 7, True])
def test_arguments_that_are_no_object_cost_what_they_would_tell_and_nothing_else(tmp_path: Path, value: Any) -> None:
    events = [{**event, "args": value} for event in (gemm(0, 2), all_reduce(1, 3), kineto.launch(0, 7))]
    found = figures_of(tmp_path, events)
    assert (found.total.compute_ms, found.total.comm_ms, found.total.hidden_comm_ms) == (2, 2, 1)
    assert [row.collective for row in found.collectives] == ["all_reduce"]


ODD = [None, -1, 0, 2**63, 2**70, 10**400, 1.5, "text", "", [], [[]], [1, "a"], {}, {"a": 1}, True]
METADATA = ["Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name",
            "Process Group Description", "Process Group Ranks", "Seq", "Input Dims", "Input type", "grid", "block",
            "device", "stream"]  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_any_type_is_read_or_taken_as_unknown(tmp_path: Path, name: str) -> None:
    known = {"Collective name": "allreduce", "In msg nelems": 250_000, "Out msg nelems": 250_000, "Group size": 2,
             "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 1}  # fmt: skip
    for number, value in enumerate(ODD):
        note, odd = kineto.host_range("nccl:all_reduce", 0, 100), all_reduce(1, 3, 5)
        note["args"] |= {**known, name: value}
        odd["args"] |= {**known, name: value}
        events = [note, kineto.launch(50, 5), odd, all_reduce(4, 6, 0)]
        path = kineto.write(tmp_path / "trace.json", events)
        found = analyze([read_trace(path)])
        assert sum(trace.total.comm_ms for trace in found.traces) == 4
        json.loads(msgspec.json.encode(found), parse_constant=pytest.fail)
        # The command shows the same; it is tried with each name, and with each value.
        if number % 5 == METADATA.index(name) % 5:
            result = overlap("analyze", str(path), "--json")
            assert result.exit_code == 0, value
            json.loads(result.stdout, parse_constant=pytest.fail)
            msgspec.json.decode(result.stdout, type=Analysis)


JOBS = [{"rank": 1}, {"rank": "0", "world_size": 2}, {"rank": 2**70, "world_size": 2}, {"rank": True, "world_size": 2}]


@pytest.mark.parametrize("value", [*ODD, *JOBS])
def test_distributed_info_of_any_type_is_read_or_taken_as_unknown(tmp_path: Path, value: Any) -> None:
    path = kineto.write(tmp_path / "trace.json", short_trace(), distributedInfo=value, deviceProperties=value)
    printed = overlap("analyze", str(path), "--json")
    assert printed.exit_code == 0
    assert msgspec.json.decode(printed.stdout, type=Analysis).traces[0].rank in (None, 1, 2**70)
    assert overlap("analyze", str(path)).exit_code == 0


@pytest.mark.parametrize("digits", ["0", "007", "9" * 18, "9" * 30, "9" * 5_000, "\u0663", ""])
def test_any_number_of_a_step_gives_an_answer(tmp_path: Path, digits: str) -> None:
    events = [kineto.host_range(f"ProfilerStep#{digits}", 0, MS), kineto.launch(10, 7), gemm(1, 2, 7), all_reduce(1, 2)]
    path = kineto.write(tmp_path / "trace.json", events)
    (found,) = analyze([read_trace(path)]).traces
    assert found.total.compute_ms == 1
    for options in ([], ["--json"], ["--csv", "steps"]):
        assert overlap("analyze", str(path), *options).exit_code == 0


# -- many of something


@pytest.mark.parametrize("streams", [20_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_very_many_streams_are_read(tmp_path: Path, streams: int) -> None:
    kernels = [gemm(0.001 * i, 0.001 * i + 0.001, i + 1, stream=i) for i in range(streams)]
    found = figures_of(tmp_path, [*kernels, all_reduce(10, 20, 0)])
    assert found.total.kernels == streams + 1
    assert found.total.compute_busy_ms == streams / 1000
    assert found.total.covered_compute_ms == pytest.approx(10)


def test_memory_is_bounded_by_the_pieces_whatever_the_size_of_the_file(tmp_path: Path) -> None:
    operator = kineto.text([kineto.host_range("aten::mm", i, i + 9, cat="cpu_op") for i in range(1_000)], style="line")
    many = operator[operator.index(b"[") + 1 : operator.rindex(b"]")]
    kernels = kineto.text([gemm(0, 2, 1), all_reduce(1, 3, 2)], style="array")[2:-2]

    def peak(mebibytes: int) -> int:
        path = tmp_path / "trace.json.gz"
        times = mebibytes * 2**20 // len(many)
        content = b'{"traceEvents": [' + b", ".join([*[many] * times, kernels]) + b"]}"
        path.write_bytes(gzip.compress(content, compresslevel=1))
        tracemalloc.start()
        try:
            found = read_trace(path)
            assert len(found.kernels) == 2
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(10), peak(20)
    assert large < 1.2 * small
    assert large < 16 * PIECE_BYTES


@pytest.mark.parametrize("filler", [b"{", b" "])
def test_a_file_without_an_event_is_read_in_time_linear_in_its_size(tmp_path: Path, filler: bytes) -> None:
    """All of it was searched again with each piece: a compressed file of 1 MB took minutes."""

    def seconds(size: int) -> float:
        path = tmp_path / "trace.json.gz"
        path.write_bytes(gzip.compress(b'{"traceEvents":[' + filler * (size // len(filler)), 1))
        start = time.process_time()
        with contextlib.suppress(TraceError):
            read_trace(path)
        return time.process_time() - start

    small, large = seconds(2**20), seconds(2**22)
    assert large < 8 * small + 0.3  # linear: 4 times


def test_no_text_is_searched_again_with_each_piece_for_where_an_event_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = 0

    class Counting:
        def finditer(self, buffer: bytearray, begin: int, end: int) -> Iterator[re.Match[bytes]]:
            nonlocal searched
            searched += end - begin
            return boundary.finditer(buffer, begin, end)

    boundary = stream._BOUNDARY
    monkeypatch.setattr(stream, "_BOUNDARY", Counting())
    path, size = tmp_path / "trace.json", 2**19
    path.write_bytes(b'{"traceEvents":[' + b"{" * size)
    assert not any(stream.EventStream(path, piece_bytes=2**14))
    assert size <= searched < 2 * size
