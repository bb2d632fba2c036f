"""``overlap trace``: the profiled steps of a window for Perfetto. Opened in it: html/test_perfetto_opens.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.table import KernelTableBuilder, Kind, device_kernels
from overlap_callbacks.analysis.kernels.timeline import MAX_NAME_LENGTH, step_detail
from overlap_callbacks.analysis.results.kernel_times import StepDetail
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from overlap_callbacks.report.perfetto import perfetto_trace
from tests.commands import invoke
from tests.report import perfetto_form
from tests.report.runs import window, write

MS = 1_000_000
OVERLAPPED, SEQUENTIAL = 1000, 2000  # processes


def detail(start_ns: int | None) -> StepDetail:
    """Two gemms beside an all-reduce of 1 MB; another all-reduce overlaps it on the same stream."""
    return StepDetail(
        names=("gemm", "all_reduce"),
        communication=(False, True),
        slices=((0, 0, 0.0, 2.0, 0), (1, 1, 1.0, 3.0, 1_000_000), (0, 0, 2.0, 2.5, 0), (1, 1, 3.0, 2.0, 0)),
        left_out=3,
        left_out_ms=0.01,
        start_ns=start_ns,
    )


def with_details(*starts_ns: int | None, power: bool = False) -> OverlapReport:
    found = window(power=power)
    pictures = tuple(
        [
            msgspec.structs.replace(picture, detail=detail(start_ns))
            for picture, start_ns in zip(found.pictures, starts_ns, strict=True)
        ]
    )
    return msgspec.structs.replace(found, pictures=pictures)


def older() -> OverlapReport:
    """A report whose record keeps no kernels of a step."""
    found = window()
    return msgspec.structs.replace(
        found, pictures=tuple([msgspec.structs.replace(picture, detail=None) for picture in found.pictures])
    )


def slices(document: Any, process: int, category: str) -> list[tuple[str, float, float]]:
    events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == process]
    return [(event["name"], event["ts"], event["dur"]) for event in events if event["cat"] == category]


def test_kernels_and_collectives_of_both_modes_are_at_their_times() -> None:
    document = perfetto_trace(with_details(5 * MS, 105 * MS))
    perfetto_form.check(document)
    assert slices(document, OVERLAPPED, "compute") == [("gemm", 0, 2000), ("gemm", 2000, 2500)]
    assert slices(document, SEQUENTIAL, "compute") == [("gemm", 100_000, 2000), ("gemm", 102_000, 2500)]
    assert slices(document, SEQUENTIAL, "communication") == [
        ("all_reduce", 101_000, 3000),
        ("all_reduce", 103_000, 2000),
    ]
    sizes = [event["args"] for event in document["traceEvents"] if event.get("cat") == "communication"]
    assert sizes == [{"bytes": 1_000_000}, {}] * 2


def test_tracks_of_a_cpu_job_are_its_threads() -> None:
    found = msgspec.structs.replace(with_details(5 * MS, 105 * MS), device="cpu")
    events = perfetto_trace(found)["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"step", "compute, thread 0", "communication, thread 1", "communication, thread 1 (2)"}


def test_kernels_that_follow_one_another_without_a_gap_share_a_track() -> None:
    assert 0.1 + 0.2 > 0.3
    found = StepDetail(("gemm",), (False,), ((0, 0, 0.1, 0.2, 0), (0, 0, 0.3, 0.4, 0)))
    picture = msgspec.structs.replace(window().pictures[0], detail=found)
    document = perfetto_trace(msgspec.structs.replace(window(), pictures=(picture,)))
    perfetto_form.check(document)
    assert len({event["tid"] for event in document["traceEvents"] if event.get("cat") == "compute"}) == 1


def test_kernels_that_a_damaged_record_makes_impossible_are_left_out() -> None:
    whole = detail(5 * MS)
    damaged = (
        (2, 0, 0.0, 1.0, 0),
        (-1, 0, 0.0, 1.0, 0),
        (1, 0, 1e308, 1.0, 0),
        (1, 0, 0.0, 1e308, 0),
        (1, 0, 0.0, -1.0, 0),
    )
    bad = msgspec.structs.replace(whole, slices=(*damaged, *whole.slices))
    picture = msgspec.structs.replace(window().pictures[0], detail=whole)
    with_damage = msgspec.structs.replace(picture, detail=bad)
    found, expected = (
        perfetto_trace(msgspec.structs.replace(window(), pictures=(each,))) for each in (with_damage, picture)
    )
    assert found == expected


def test_steps_without_a_clock_follow_one_another_and_older_records_show_what_they_have() -> None:
    for report in (with_details(None, 7), older()):
        document = perfetto_trace(report)
        perfetto_form.check(document)
        first, second = (slices(document, process, "step")[0] for process in (OVERLAPPED, SEQUENTIAL))
        assert first[1] == 0
        assert second[1] == pytest.approx(first[2] + 1000)
        assert "made-up" in document["otherData"]["clock"]
    assert len(slices(document, OVERLAPPED, "compute")) == len(window().pictures[0].compute)


def test_power_and_clock_are_counters_on_the_clock_of_the_steps() -> None:
    power = window(power=True).power_trace
    assert power is not None
    document = perfetto_trace(with_details(power.start_ns + 2 * MS, power.start_ns + 9 * MS, power=True))
    perfetto_form.check(document)
    assert slices(document, OVERLAPPED, "step")[0][1] == 2000
    counters = [event for event in document["traceEvents"] if event["ph"] == "C"]
    watts = [(event["ts"], event["args"]["W"]) for event in counters if event["name"] == "power"]
    assert watts == [(round(t * 1000, 3), w) for t, w in zip(power.time_ms, power.power_w, strict=True)]
    assert {event["name"] for event in counters} == {"power", "SM clock"}


# -- the command


def run_folder(folder: Path, *reports: OverlapReport) -> Path:
    write(folder, *reports)
    return folder


def test_the_command_writes_the_last_window_or_the_one_that_is_named(tmp_path: Path) -> None:
    reports = [msgspec.structs.replace(with_details(1, 2), window=number) for number in (0, 1)]
    run, out = run_folder(tmp_path / "run", *reports), tmp_path / "out.json"
    for arguments, wanted in (([], "1"), (["--window", "0"], "0")):
        result = invoke("trace", str(run), "--output", str(out), *arguments)
        assert result.exit_code == 0, result.output
        document = json.loads(out.read_bytes())
        assert document["otherData"]["window"] == wanted
        perfetto_form.check(document)
        assert f"window {wanted}, overlapped and sequential step" in result.output


def test_the_command_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    bare = msgspec.structs.replace(window(), pictures=())
    run, out = run_folder(tmp_path / "run", bare), tmp_path / "out.json"
    for arguments, code, said in (
        ([], 3, "has no window with profiled steps"), (["--window", "7"], 2, "has no window 7"),
        (["--window", "0"], 3, "window 0 has no profiled steps"),
    ):  # fmt: skip
        result = invoke("trace", str(run), "--output", str(out), *arguments)
        assert result.exit_code == code
        assert said in result.output
    other = run_folder(tmp_path / "other", window())
    result = invoke("trace", str(other), "--output", str(tmp_path / "none" / "out.json"))
    assert result.exit_code == 2
    assert "cannot be written" in result.output


# -- what the record keeps


def test_a_record_with_details_opens_again_and_one_without_has_none(tmp_path: Path) -> None:
    report = with_details(1, 2)
    older = tuple(msgspec.structs.replace(picture, detail=None) for picture in report.pictures)
    run = run_folder(tmp_path / "run", report, msgspec.structs.replace(report, window=1, pictures=older))
    first, second = (record.read(run).whole(found) for found in record.read(run).windows)
    assert first.pictures == report.pictures
    assert all(picture.detail is None for picture in second.pictures)


def test_the_detail_of_a_step_keeps_its_longest_kernels_in_order_of_their_starts() -> None:
    rows = KernelTableBuilder()
    times = [(0, 10), (10, 11), (11, 31), (5, 25), (31, 32), (40, 90)]
    for i, (start, end) in enumerate(times):
        rows.start.append(start * MS)
        rows.end.append(end * MS)
        rows.label(Kind.COMPUTE, "ncclDevKernel_AllReduce" if i == 3 else "k" * 200 if i == 2 else "gemm", lane=i == 3)
    kernels = device_kernels(rows, np.array([0, 1, 2, 3, 4, 90]) * MS, [(0, 50 * MS), (50 * MS, 99 * MS)])
    found = step_detail(kernels, 0, {3: 4096}, max_slices=3, start_ns=17)
    assert found.names == ("gemm", "ncclDevKernel_AllReduce", "k" * (MAX_NAME_LENGTH - 1) + "…")
    assert found.communication == (False, True, False)
    assert found.slices == ((0, 0, 0, 10, 0), (1, 1, 5, 20, 4096), (2, 0, 11, 20, 0))
    assert (found.left_out, found.left_out_ms, found.start_ns) == (2, 2, 17)


def test_the_detail_of_a_step_keeps_communication_before_longer_compute() -> None:
    rows = KernelTableBuilder()
    times = [(0, 10), (10, 20), (20, 21), (21, 22), (22, 30)]
    for start, end in times:
        rows.start.append(start * MS)
        rows.end.append(end * MS)
        rows.label(Kind.COMPUTE, "ncclDevKernel_AllReduce" if end - start == 1 else "gemm", lane=0)
    kernels = device_kernels(rows, np.array([0, 1, 2, 3, 4]) * MS, [(0, 50 * MS)])
    whole, one = (step_detail(kernels, 0, {}, max_slices=most) for most in (4, 2))
    assert [row[2] for row in whole.slices] == [0, 10, 20, 21]
    assert whole.left_out == 1
    assert [row[2] for row in one.slices] == [0, 20]  # a part is for compute
    assert one.left_out == 3
