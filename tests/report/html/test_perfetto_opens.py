"""What ``overlap trace`` and the page write, opened in Perfetto itself: no error, and all that was written is there."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.timeline import MAX_NAME_LENGTH, step_detail, step_timeline
from overlap_callbacks.analysis.kernels.times import KernelSums
from overlap_callbacks.analysis.results.kernel_times import StepDetail
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.perfetto import perfetto_trace
from overlap_callbacks.traces import Trace, read_trace
from tests.commands import invoke
from tests.perfetto_ui import ImportFailedError, Perfetto
from tests.report.html.test_page import made
from tests.report.runs import window, write
from tests.report.test_perfetto import MS, detail, older, with_details
from tests.traces import reference

RECORDS = Path(__file__).parent.parent / "records"
SLICES = """
    select process.name, thread.name, slice.name, category, ts, dur, extract_arg(slice.arg_set_id, 'args.bytes')
    from slice join thread_track on thread_track.id = track_id join thread using (utid) join process using (upid)
"""
COUNTERS = "select counter_track.name, ts, value from counter join counter_track on counter_track.id = track_id"

Slice = tuple[str, str, str, str, int, int, int | None]


def nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def shown(perfetto: Perfetto, report: OverlapReport, folder: Path) -> list[Slice]:
    """The slices that Perfetto has of a window."""
    file = folder / "trace.json"
    file.write_bytes(msgspec.json.encode(perfetto_trace(report)))
    perfetto.open(file)
    return perfetto.rows(SLICES)  # type: ignore[return-value]


def of_step(arm: Mode, found: StepDetail, start_ns: int, step_ms: float) -> list[tuple[Any, ...]]:
    """What a step must look like, without the tracks of its kernels, whose number depends on how they overlap."""
    process = f"{arm.value} step"
    expected: list[tuple[Any, ...]] = [(process, process, "step", start_ns, nanoseconds(step_ms), None)]
    for name, _, start_ms, length_ms, size_bytes in found.slices:
        category = "communication" if found.communication[name] else "compute"
        begin_ns = start_ns + nanoseconds(start_ms)
        expected.append((process, found.names[name], category, begin_ns, nanoseconds(length_ms), size_bytes or None))
    return expected


def without_tracks(slices: Sequence[Slice]) -> list[tuple[Any, ...]]:
    return sorted([(process, *rest) for process, _, *rest in slices], key=str)


def test_all_slices_and_counters_are_there_to_the_nanosecond(perfetto: Perfetto, tmp_path: Path) -> None:
    power = window(power=True).power_trace
    assert power is not None
    report = with_details(power.start_ns + 2 * MS + 1, power.start_ns + 900 * MS + 7, power=True)
    slices = shown(perfetto, report, tmp_path)
    expected = [
        row
        for picture, start_ns in zip(report.pictures, (2 * MS + 1, 900 * MS + 7), strict=True)
        for row in of_step(picture.mode, detail(0), start_ns, picture.step_ms)
    ]
    for segment in power.segments:
        start_ns = nanoseconds(segment.start_ms)
        length_ns = nanoseconds(segment.end_ms - segment.start_ms)
        expected.append(("power and clock", segment.mode.value, "mode", start_ns, length_ns, None))
    assert without_tracks(slices) == sorted(expected, key=str)
    tracks = {(process, thread) for process, thread, *_ in slices}
    kernels = ("compute, stream 0", "communication, stream 1", "communication, stream 1 (2)")
    assert tracks == {
        *[(f"{mode} step", track) for mode in ("overlapped", "sequential") for track in ("step", *kernels)],
        ("power and clock", "mode"),
    }
    times = [nanoseconds(time_ms) for time_ms in power.time_ms]
    watts = [("power W", time, value) for time, value in zip(times, power.power_w, strict=True)]
    clocks = [("SM clock MHz", time, value) for time, value in zip(times, power.sm_clock_mhz, strict=True)]
    assert len(clocks) > 500
    assert sorted(perfetto.rows(COUNTERS)) == sorted([*watts, *clocks])


@pytest.mark.parametrize("hours", [0, 20])
def test_no_nanosecond_is_lost_at_any_time(perfetto: Perfetto, tmp_path: Path, hours: int) -> None:
    chance = random.Random(hours)
    starts = sorted(chance.sample(range(10_000_000_000), 4000))
    slices = tuple([(0, chance.randrange(3), start / 1e6, chance.randrange(3000) / 1e6, 0) for start in starts])
    many = StepDetail(("gemm",), (False,), slices, start_ns=hours * 3_600_000_000_000 + 12_345)
    report = with_details(0, 0)
    first, second = report.pictures
    second = msgspec.structs.replace(second, detail=many)
    found = shown(perfetto, msgspec.structs.replace(report, pictures=(first, second)), tmp_path)
    sequential = [row for row in without_tracks(found) if row[0] == "sequential step"]
    assert many.start_ns is not None
    assert sequential == sorted(of_step(Mode.SEQUENTIAL, many, many.start_ns, second.step_ms), key=str)


def test_a_record_s_window_by_command_and_one_of_an_older_version(perfetto: Perfetto, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.json"
    write(run, with_details(5 * MS, 105 * MS), msgspec.structs.replace(older(), window=1))
    for number in (0, 1):
        result = invoke("trace", str(run), "--output", str(out), "--window", str(number))
        assert result.exit_code == 0, result.output
        perfetto.open(out)
        slices = perfetto.rows(SLICES)
        assert len(slices) == sum(event["ph"] == "X" for event in json.loads(out.read_bytes())["traceEvents"])
    kinds = [category for process, _, _, category, *_ in slices if process == "overlapped step"]
    assert kinds.count("compute") == len(older().pictures[0].compute)
    assert kinds.count("communication") == len(older().pictures[0].communication)


@pytest.mark.parametrize("name", ["schema-1-with-pictures", "schema-2-with-arms"])
def test_a_record_of_an_earlier_release(perfetto: Perfetto, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.json"
    result = invoke("trace", str(RECORDS / f"{name}.jsonl"), "--output", str(out))
    assert result.exit_code == 0, result.output
    perfetto.open(out)
    assert {mode for mode, *_ in perfetto.rows(SLICES)} >= {"overlapped step", "sequential step"}


def test_the_file_that_the_page_holds(perfetto: Perfetto, opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(made(tmp_path, window()), encoding="utf-8")
    page = opened(tmp_path / "report.html")
    with page.expect_download() as saved:
        page.get_by_text("Save these steps for Perfetto").click()
    file = tmp_path / saved.value.suggested_filename
    saved.value.save_as(file)
    perfetto.open(file)
    expected = [
        row
        for picture, start_ms in zip(window().pictures, (0.0, window().pictures[0].step_ms + 1), strict=True)
        if picture.detail is not None
        for row in of_step(picture.mode, picture.detail, nanoseconds(start_ms), picture.step_ms)
    ]
    assert len(expected) > 40
    assert without_tracks(perfetto.rows(SLICES)) == sorted(expected, key=str)  # type: ignore[arg-type]


# -- figures


@functools.cache
def trace(name: str) -> Trace:
    return read_trace(reference.shared_trace(f"{name}.json.gz"))


@pytest.mark.parametrize("name", ["ddp_a100_x2", "ddp_v100_x2", "job128_rank0", "job128_rank1"])
def test_figures_of_what_perfetto_shows_are_those_of_the_record_and_of_a_walk_over_the_trace(
    perfetto: Perfetto, tmp_path: Path, name: str
) -> None:
    """The first two steps of a real trace, written as a record's overlapped and sequential step."""
    kernels, walk = trace(name).kernels, reference.read(reference.shared_trace(f"{name}.json.gz"))
    numbers = [step.number for step in trace(name).steps]
    with_kernels = sorted(set(kernels.step[kernels.kind == Kind.COMPUTE].tolist()) - {-1})
    pictures = []
    for arm, step in zip(Mode, with_kernels, strict=False):
        own = kernels[np.flatnonzero(kernels.step == step)]
        picture = step_timeline(own, step, arm)
        assert picture is not None
        found = step_detail(own, step, {}, max_slices=10**6)
        pictures.append(msgspec.structs.replace(picture, detail=found))
    slices = shown(perfetto, msgspec.structs.replace(window(), pictures=tuple(pictures)), tmp_path)
    for arm, step in zip(Mode, with_kernels, strict=False):
        read_back = [
            reference.Kernel(text, start, start + length, category == "communication", track, None, "")
            for process, track, text, category, start, length, _ in slices
            if process == f"{arm.value} step" and category != "step"
        ]
        launched = walk.of_step(numbers[step])
        times = reference.times(read_back, read_back)
        assert times == reference.times(launched, launched)
        assert times.compute > 0
        record = KernelSums(kernels[np.flatnonzero(kernels.step == step)]).of_steps([step])
        assert times == (
            record.compute_ns, record.compute_busy_ns, record.comm_ns, record.comm_busy_ns, record.hidden_comm_ns,
            record.covered_compute_ns,
        )  # fmt: skip
        names = sorted(shortened(kernel.name, MAX_NAME_LENGTH) for kernel in launched)
        assert sorted(kernel.name for kernel in read_back) == names


# -- that an error would be seen


def broken(change: Callable[[list[dict[str, Any]]], object]) -> bytes:
    document = perfetto_trace(with_details(5 * MS, 105 * MS))
    change(document["traceEvents"])
    return msgspec.json.encode(document)


def onto_one_track(events: list[dict[str, Any]]) -> None:
    for event in events:
        event["tid"] = event["pid"]


def without_a_time(events: list[dict[str, Any]]) -> None:
    del events[-1]["ts"]


def a_text_for_a_number(events: list[dict[str, Any]]) -> None:
    events.append({"ph": "C", "pid": 1, "tid": 1, "name": "power", "ts": 0, "args": {"W": "many"}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (broken(onto_one_track), "slice_drop_overlapping_complete_event"),
        pytest.param(broken(without_a_time), "json_tokenizer_failure", marks=pytest.mark.nightly),
        pytest.param(broken(a_text_for_a_number), "json_parser_failure", marks=pytest.mark.nightly),
        (broken(list)[:-300], "incomplete"),
        (b"no trace", "look like a Perfetto trace"),
    ],
)
def test_what_perfetto_cannot_read_is_an_error(perfetto: Perfetto, tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(ImportFailedError, match=f"(?i){said}"):
        perfetto.open(file)
    shown(perfetto, with_details(5 * MS, 105 * MS), tmp_path)  # the next one opens
