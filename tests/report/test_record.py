from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.analysis.headline import run_headline
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, SCHEMA_VERSION, RunInfo
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock
from overlap_callbacks.analysis.statistics import LOG, pool
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report.record import RecordError, read, runs_in
from overlap_callbacks.sinks.jsonl import JsonlSink
from tests.samples import aggregate_windows

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL


def run_info(**changes) -> RunInfo:
    fields = {
        "library_version": "0.1.0",
        "torch_version": "2.13.0",
        "python_version": "3.11.9",
        "started_at": "2026-11-21T14:00:00+00:00",
        "hostname": "node-1",
        "framework": "pytorch",
        "world_size": 2,
        "backend": "nccl",
        "device": "NVIDIA H200",
        "schedule": Schedule().as_dict(),
        "units": {"e2e_overlapped_ms": "ms"},
        "meanings": {"e2e_overlapped_ms": "step time"},
    }
    return RunInfo(**{**fields, **changes})


def timed(block, arm, milliseconds) -> TimedBlock:
    return TimedBlock(arm, block, (milliseconds, milliseconds))


def window_report(number=0, *, overlapped_ms=100.0, sequential_ms=120.0, residual=0.0, complete=True) -> OverlapReport:
    """Two ranks, four blocks of each mode."""
    arms = [OV, SEQ, SEQ, OV] * 2
    blocks = tuple(timed(i, arm, (overlapped_ms if arm is OV else sequential_ms) + i % 2) for i, arm in enumerate(arms))
    profiled = tuple(
        ProfiledBlock(
            arm, i, 1, 60.0, 60.0, 30.0, 30.0, 20.0 if arm is OV else 0.0, 60.0 * (0.3 if arm is OV else residual), 0.0
        )
        for i, arm in enumerate(arms)
        for hidden, covered in [(20.0, 18.0) if arm is OV else (0.0, 60.0 * residual)]
    )
    windows = [
        RankWindow(
            rank=rank,
            window=number,
            first_step=20 + 500 * number,
            num_steps=65,
            complete=complete,
            backend="nccl",
            device="NVIDIA H200",
            wall_ms=7500.0,
            timed=blocks,
            profiled=profiled,
        )
        for rank in (0, 1)
    ]
    return aggregate_windows(windows, world_size=2, every_n_steps=500)


def write(folder, *, run=None, reports=(), blocks=()):
    """One run as the sink writes it."""
    sink = JsonlSink(folder)
    sink.open(run_info() if run is None else run)
    for found in reports:
        for block in found.samples[0].timed:
            sink.block(found.window, found.first_step, block)
        sink.log(found)
    for window, first_step, block in blocks:
        sink.block(window, first_step, block)
    sink.close()
    return sink.path


def lines_of(path) -> list[str]:
    return path.read_text().splitlines()


# -- there and back


def test_a_run_reads_back_as_it_was_written(tmp_path):
    run, reports = run_info(), [window_report(0), window_report(1, overlapped_ms=104.0)]
    path = write(tmp_path, run=run, reports=reports)
    record = read(path)
    assert record.path == path
    assert record.runs == [msgspec.structs.replace(run, tells_end=True)]
    assert not record.running
    assert record.windows == reports
    assert record.unfinished is None
    assert record.broken_lines == 0


def test_a_run_folder_and_its_file_are_the_same_record(tmp_path):
    path = write(tmp_path, reports=[window_report()])
    assert path == tmp_path / FILE_NAME
    assert read(tmp_path) == read(path) == read(str(tmp_path))


def test_the_sink_makes_its_folder(tmp_path):
    assert write(tmp_path / "runs" / "today").parent == tmp_path / "runs" / "today"
    assert len(read(tmp_path / "runs" / "today").runs) == 1


def test_each_line_is_plain_json_that_says_what_it_is(tmp_path):
    path = write(tmp_path, reports=[window_report()])
    lines = [json.loads(line) for line in lines_of(path)]
    assert [line["record"] for line in lines] == ["run"] + ["block"] * 8 + ["window", "end"]
    assert lines[0]["schema_version"] == SCHEMA_VERSION
    assert lines[0]["schedule"]["every_n_steps"] == 500
    assert lines[1] == {
        "record": "block",
        "window": 0,
        "first_step": 20,
        "sample": {"arm": "overlapped", "block": 0, "step_ms": [100.0, 100.0], "steps": [], "kinds": []},
    }
    assert lines[-2]["speedup_vs_sequential"]["num_blocks"] == 8


def test_every_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.open(run_info())
    assert len(read(tmp_path).runs) == 1
    sink.block(0, 20, timed(0, OV, 100.0))
    assert read(tmp_path).unfinished is not None
    sink.log(window_report(0))
    assert len(read(tmp_path).windows) == 1
    sink.close()


def test_a_sink_closes_twice_and_without_being_opened(tmp_path):
    JsonlSink(tmp_path).close()
    sink = JsonlSink(tmp_path)
    sink.open(run_info())
    sink.close()
    sink.close()
    assert len(read(tmp_path).runs) == 1


def test_an_unwritable_folder_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        JsonlSink(tmp_path / "file" / "run").open(run_info())


# -- crashes


@pytest.mark.parametrize("lost", [1, 2, 40, 400])
def test_a_last_line_that_a_crash_cut_off_costs_itself_alone(tmp_path, lost):
    first, second = window_report(0), window_report(1)
    path = write(tmp_path, reports=[first, second])
    whole = path.read_bytes().removesuffix(b'{"record":"end"}\n')
    path.write_bytes(whole[:-lost])
    record = read(path)
    assert record.running  # for all that its record tells
    if lost == 1:  # nothing but the end of the line
        assert record.windows == [first, second]
        assert (record.broken_lines, record.unfinished) == (0, None)
        return
    assert record.windows == [first]
    assert record.broken_lines == 1
    assert record.unfinished.window == 1  # its blocks are there
    assert record.unfinished.speedup_vs_sequential.value == pytest.approx(second.speedup_vs_sequential.value)


@pytest.mark.parametrize(
    "garbage",
    [
        b"not json\n",
        b"\x00\x00\x00\xff\xfe\n",
        b'{"record": "window", "win\n',
        b"[1, 2]\n",
        b"null\n",
        b'{"record": "window", "window": 3}\n',
        b'{"record": "window", "window": "three"}\n',
        b'{"record": "run", "schema_version": 1}\n',
        b'{"record": "block", "window": 3}\n',
        b'{"record": "block", "window": 0, "first_step": 20, "sample": 4}\n',
        b'{"record":"block","window":[],"first_step":2,"sample":{"arm":"overlapped","block":0,"step_ms":[]}}',
        b'{"record":"block","window":0,"first_step":2,"sample":{"arm":"sideways","block":0,"step_ms":[1]}}',
        pytest.param(b"[" * 200_000, id="nested"),
        pytest.param(b'{"record":"window","x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001, id="nested in a field"),
    ],
)
def test_a_line_that_cannot_be_read_is_counted_and_the_rest_is_read(tmp_path, garbage):
    reports = [window_report(0), window_report(1)]
    path = write(tmp_path, reports=reports)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:10], garbage.rstrip() + b"\n", *lines[10:]]))
    record = read(path)
    assert record.windows == reports
    assert record.broken_lines == 1
    assert record.unfinished is None


def test_lines_of_a_kind_that_this_version_does_not_know_are_passed_over(tmp_path):
    path = write(tmp_path, reports=[window_report()])
    with path.open("ab") as file:
        file.write(b'{"record": "power", "avg_w": 700}\n{"no": "kind"}\n\n  \n')
    record = read(path)
    assert len(record.windows) == 1
    assert record.broken_lines == 0


def test_fields_that_this_version_does_not_know_are_passed_over(tmp_path):
    # A later version of the same schema may add some.
    found = window_report()
    path = write(tmp_path, reports=[found])
    lines = [json.dumps({**json.loads(line), "new": 1}) for line in lines_of(path)]
    path.write_text("\n".join(lines))
    record = read(path)
    assert record.windows == [found]
    assert record.broken_lines == 0


def test_a_second_run_in_the_same_folder_is_appended(tmp_path):
    first, second = run_info(hostname="node-1"), run_info(hostname="node-2")
    reports = [window_report(0), window_report(1)]
    write(tmp_path, run=first, reports=reports[:1])
    path = write(tmp_path, run=second, reports=reports[1:])
    record = read(path)
    assert record.runs == [msgspec.structs.replace(run, tells_end=True) for run in (first, second)]
    assert record.windows == reports
    assert record.broken_lines == 0


def test_a_run_resumed_after_half_a_line_loses_only_that_half(tmp_path):
    path = write(tmp_path, reports=[window_report(0), window_report(1)])
    path.write_bytes(path.read_bytes()[:-100])
    write(tmp_path, run=run_info(hostname="node-2"), reports=[window_report(1, overlapped_ms=90.0)])
    record = read(path)
    assert [run.hostname for run in record.runs] == ["node-1", "node-2"]
    assert record.windows == [window_report(0), window_report(1, overlapped_ms=90.0)]
    assert record.broken_lines == 1
    assert record.unfinished is None  # the run that was cut off is not the last


# -- a window that was cut off


def test_a_window_that_an_earlier_run_left_unfinished_is_not_the_last_run_s(tmp_path):
    write(tmp_path, blocks=[(0, 20, timed(0, OV, 100.0))])
    path = write(tmp_path, reports=[window_report(1)])
    assert read(path).unfinished is None
    write(tmp_path, blocks=[(2, 1020, timed(0, OV, 100.0))])
    assert read(path).unfinished.window == 2


def test_blocks_of_an_unfinished_window_give_a_partial_report(tmp_path):
    times = {OV: 100.0, SEQ: 125.0}
    blocks = [(1, 520, timed(number, arm, times[arm])) for number, arm in enumerate((OV, SEQ, SEQ, OV))]
    path = write(tmp_path, reports=[window_report(0)], blocks=blocks)
    record = read(path)
    assert len(record.windows) == 1
    partial = record.unfinished
    assert partial is record.partial
    assert (partial.window, partial.first_step, partial.complete) == (1, 520, False)
    assert (partial.world_size, partial.ranks) == (2, (0,))
    assert (partial.backend, partial.device) == ("nccl", "NVIDIA H200")
    assert partial.speedup_vs_sequential.value == pytest.approx(0.25)
    assert partial.speedup_vs_sequential.ci_low is None
    assert partial.e2e_sequential_ms.num_steps == 4
    assert partial.problems == ("4 timed blocks so far",)
    assert partial.measurement_overhead is None


@pytest.mark.parametrize(
    "arms",
    [
        {0: OV},
        {0: OV, 1: SEQ},
        {0: OV, 1: SEQ, 2: SEQ},
        {1: SEQ, 2: SEQ},
        {0: OV, 3: OV, 4: OV, 7: OV},  # one arm only
        {0: OV, 1: SEQ, 3: OV, 4: OV, 6: SEQ},
        {0: OV, 1: SEQ, 2: OV, 3: SEQ},  # drift falls on the later mode
        {0: OV, 1: SEQ, 2: SEQ, 3: OV, 4: OV},
    ],
)
def test_blocks_around_different_places_and_too_few_for_a_trend_compare_nothing(tmp_path, arms):
    path = write(tmp_path, blocks=[(0, 20, timed(number, arm, 100.0)) for number, arm in arms.items()])
    partial = read(path).unfinished
    assert set(partial.figures()) <= {"e2e_overlapped_ms", "e2e_sequential_ms"}
    assert partial.problems[0] == f"{len(arms)} timed blocks so far, too few blocks to compare the modes"


def test_six_blocks_show_a_drift(tmp_path):
    arms = (OV, SEQ, OV, SEQ, OV, SEQ)
    times = [(100.0 if arm is OV else 125.0) + 2 * place for place, arm in enumerate(arms)]
    write(tmp_path, blocks=[(0, 20, timed(i, arm, times[i])) for i, arm in enumerate(arms)])
    partial = read(tmp_path).unfinished
    assert partial.problems[0] == "6 timed blocks so far"
    # Drift makes the plain difference of the means 27, and it is taken out.
    difference = partial.e2e_sequential_ms.value - partial.e2e_overlapped_ms.value
    assert difference == pytest.approx(25.0)


def test_of_a_block_that_was_logged_twice_the_last_entry_counts(tmp_path):
    times = {OV: 100.0, SEQ: 125.0}
    group = [timed(number, arm, times[arm]) for number, arm in enumerate((OV, SEQ, SEQ, OV))]
    half = TimedBlock(OV, 0, (500.0,))
    path = write(tmp_path, blocks=[(0, 20, block) for block in (half, group[0], group[2], group[1], group[3])])
    partial = read(path).unfinished
    assert partial.samples[0].timed == tuple(group)
    assert partial.e2e_overlapped_ms.value == pytest.approx(100.0)
    assert partial.problems[0] == "4 timed blocks so far"


def test_a_window_cut_short_is_what_there_is_to_see_if_its_blocks_make_a_balanced_group(tmp_path):
    whole = window_report(complete=False)
    assert read(write(tmp_path / "whole", reports=[whole])).partial == whole
    sample = msgspec.structs.replace(whole.samples[0], profiled=whole.samples[0].profiled[:2])
    record = read(write(tmp_path / "profile", reports=[msgspec.structs.replace(whole, samples=(sample,))]))
    assert set(record.partial.figures()) == {"e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential"}
    assert (record.valid_windows, record.unfinished) == ([], None)
    sample = msgspec.structs.replace(sample, timed=sample.timed[:3])
    assert read(write(tmp_path / "few", reports=[msgspec.structs.replace(whole, samples=(sample,))])).partial is None
    invalid = window_report(complete=False, residual=0.5)
    assert read(write(tmp_path / "invalid", reports=[invalid])).partial is None


def test_the_newest_run_of_a_folder_is_the_one_written_to_last(tmp_path):
    assert runs_in(tmp_path) == []
    for age, name in enumerate(("b", "c", "a")):
        path = write(tmp_path / name)
        os.utime(path, (10**9 - age, 10**9 - age))
    (tmp_path / "no run").mkdir()
    assert runs_in(tmp_path) == [tmp_path / name for name in ("a", "c", "b")]


def test_an_unfinished_window_is_not_in_the_windows_or_the_runs_figures(tmp_path):
    path = write(tmp_path, reports=[window_report(0)], blocks=[(1, 520, timed(0, OV, 500.0))])
    record = read(path)
    assert record.valid_windows == [window_report(0)]
    assert record.pooled()["e2e_overlapped_ms"] == window_report(0).e2e_overlapped_ms


def test_an_unfinished_window_of_a_control_run_is_a_control(tmp_path):
    run = run_info(schedule=Schedule(control=True).as_dict())
    path = write(tmp_path, run=run, blocks=[(0, 20, timed(0, OV, 100.0))])
    assert read(path).unfinished.control


def test_a_run_without_a_window_yet_is_a_record(tmp_path):
    record = read(write(tmp_path))
    assert (record.windows, record.unfinished, record.pooled()) == ([], None, {})


# -- what is no record


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecordError, match=re.escape(f"no record at {tmp_path / 'nothing.jsonl'}")):
        read(tmp_path / "nothing.jsonl")


def test_a_folder_without_a_record_is_named_with_the_file_that_it_lacks(tmp_path):
    with pytest.raises(RecordError, match=re.escape(f"no record at {tmp_path / FILE_NAME}: give a run folder")):
        read(tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n", "a,b,c\n1,2,3\n", '{"step": 1}\n'])
def test_a_file_that_is_not_a_record_is_refused(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    message = "metrics.jsonl is not an overlap record: it has no readable line of kind 'run'"
    with pytest.raises(RecordError, match=re.escape(message)):
        read(path)


def test_a_newer_schema_is_refused_with_both_versions_and_the_way_out(tmp_path):
    run = run_info(schema_version=SCHEMA_VERSION + 1, library_version="9.0")
    path = write(tmp_path, run=run)
    message = (
        f"has schema version {SCHEMA_VERSION + 1}; this library reads up to {SCHEMA_VERSION}: "
        f"upgrade overlap-callbacks to 9.0"
    )
    with pytest.raises(RecordError, match=re.escape(message)):
        read(path)


@pytest.mark.parametrize("version", ["1", None, 1.5])
def test_a_schema_version_that_is_not_a_number_is_refused(tmp_path, version):
    path = write(tmp_path)
    line = json.loads(lines_of(path)[0])
    path.write_text(json.dumps({**line, "schema_version": version}))
    with pytest.raises(RecordError, match="has schema version"):
        read(path)


def test_a_record_error_is_a_value_error():
    assert issubclass(RecordError, ValueError)


# -- over the run


def test_figures_of_a_run_pool_its_valid_and_complete_windows(tmp_path):
    reports = [
        window_report(0, overlapped_ms=100.0),
        window_report(1, overlapped_ms=104.0),
        window_report(2, overlapped_ms=500.0, residual=0.5),  # invalid
        window_report(3, overlapped_ms=500.0, complete=False),
    ]
    record = read(write(tmp_path, reports=reports))
    assert [window.window for window in record.valid_windows] == [0, 1]
    step = record.pooled()["e2e_overlapped_ms"]
    one, two = (window.e2e_overlapped_ms.value for window in reports[:2])
    assert step.value == pytest.approx((one + two) / 2)
    assert (step.num_blocks, step.num_steps) == (2, 8 + 8)
    # The blocks of a window are nearly alike, so nearly all variance is between the two: their standard error is half
    # their distance, and the 97.5 % quantile of t is 12.7062.
    assert math.log(step.ci_high / step.value) == pytest.approx(12.7062 * math.log(two / one) / 2, rel=0.06)


def test_a_figure_that_some_windows_lack_pools_the_others(tmp_path):
    bare = msgspec.structs.replace(window_report(1), compute_slowdown=None, comm_ratio=None)
    record = read(write(tmp_path, reports=[window_report(0), bare]))
    assert record.pooled()["comm_ratio"] == window_report(0).comm_ratio
    assert record.pooled()["e2e_overlapped_ms"].num_blocks == 2


def test_a_figure_that_no_window_has_is_absent(tmp_path):
    bare = msgspec.structs.replace(window_report(0), comm_ratio=None)
    assert "comm_ratio" not in read(write(tmp_path, reports=[bare])).pooled()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_record_that_may_not_be_read_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "overlap.jsonl"
    file.write_text("{}")
    file.chmod(0)
    with pytest.raises(RecordError, match="cannot be read: Permission denied"):
        read(tmp_path)


@pytest.mark.parametrize("version", [0, True, -1, "1", None])
def test_a_schema_version_that_never_was_is_refused(tmp_path: Path, version: object) -> None:
    file = tmp_path / "overlap.jsonl"
    file.write_text(json.dumps({"record": "run", "schema_version": version}) + "\n")
    with pytest.raises(RecordError, match="schema version"):
        read(tmp_path)


def test_step_times_are_pooled_by_their_logarithms() -> None:
    windows = [Estimate(value, None, None, 10, 8) for value in (5.0, 2000.0) * 2]
    pooled = pool(windows, LOG)
    assert pooled is not None
    assert pooled.value == pytest.approx(100.0)
    assert pooled.ci_low is not None
    assert pooled.ci_low > 0
    plain = pool(windows)
    assert plain is not None
    assert plain.value == pytest.approx(1002.5)
    assert plain.ci_low is not None
    assert plain.ci_low < 0
    # What is not above zero has no logarithm.
    assert pool([Estimate(value, None, None, 10, 8) for value in (0.0, 2.0)], LOG).value == 1.0


def test_reading_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_callbacks.report.record_lines._PIECE_BYTES", 2**14)
    write(tmp_path, reports=[window_report(number) for number in range(10)])
    told: list[tuple[int, int]] = []
    read(tmp_path, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {(tmp_path / FILE_NAME).stat().st_size}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) > 3


def test_why_windows_have_no_report_is_kept_and_shown(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.open(run_info())
    sink.left_out(3, 1500, "its recorded steps were skipped (its gradients overflowed)")
    sink.close()
    record = read(tmp_path)
    assert record.left_out == ["its recorded steps were skipped (its gradients overflowed)"]
    assert run_headline(record.summary).why == "its recorded steps were skipped (its gradients overflowed)."
