"""Files that lie: kernels that cannot be, and kernels that were launched and are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.traces import analyze, compare, read_trace
from overlap_callbacks.traces.figures import Comparison, TraceFigures
from overlap_callbacks.traces.trace import Trace
from tests import kineto
from tests.traces import nsys_file
from tests.traces.events import MS, error_of, figures_of, gemm, overlap, said

US = 1_000
STEP_NS = 15_960 * US
# 100 products of 120 us on stream 7 and four all-reduces of 1 ms on stream 20 in each of three steps.
GEMMS, COMMS, STEPS = 100, 4, 3
NUMBER = STEPS * (GEMMS + COMMS)


def job(*, launches: bool = True, steps: bool = True) -> list[kineto.Event]:
    """A product every 150 us; their numbers begin at 1 in the order of launches, which is that of the file."""
    events, number = [], 0
    for step in range(STEPS):
        begin = step * STEP_NS
        starts = [(begin + i * 150 * US, kineto.GEMM, 120 * US, 7) for i in range(GEMMS)]
        starts += [(begin + (3 * i + 1) * MS, kineto.ALL_REDUCE, MS, 20) for i in range(COMMS)]
        for start, name, length, stream in sorted(starts):
            number += 1
            if launches:
                events.append(kineto.launch(start, number))
            events.append(kineto.kernel(name, start + 10 * US, start + 10 * US + length, number, stream=stream))
        if steps:
            events.append(kineto.step(step, begin, begin + STEP_NS - US))
    return events


def is_kernel(event: kineto.Event) -> bool:
    return event.get("cat") == "kernel"


def kernels_of(events: list[kineto.Event], name: str = "") -> list[kineto.Event]:
    return [event for event in events if is_kernel(event) and event["name"].startswith(name)]


def without(events: list[kineto.Event], lost: list[kineto.Event]) -> list[kineto.Event]:
    return [event for event in events if not any(event is one for one in lost)]


def lengthened(place: int, length: int, name: str = kineto.GEMM, **options: Any) -> list[kineto.Event]:
    events = job(**options)
    kernels_of(events, name)[place]["dur"] = kineto.Nanoseconds(length)
    return events


def compared(folder: Path, one: list[kineto.Event], other: list[kineto.Event]) -> Comparison:
    paths = [kineto.write(folder / f"{i}.json", events) for i, events in enumerate((one, other))]
    return compare(*map(read_trace, paths))


# -- kernels that run longer than they can


@pytest.mark.parametrize("length", [3_200 * MS, 9 * MS, 201 * US])
def test_a_kernel_that_overruns_the_next_one_of_its_stream_counts_up_to_there(tmp_path: Path, length: int) -> None:
    found = figures_of(tmp_path, lengthened(49, length))
    clean = figures_of(tmp_path, job())
    assert found.total.compute_ms == pytest.approx(clean.total.compute_ms + 0.030)
    assert found.total.hidden_comm_ms == pytest.approx(clean.total.hidden_comm_ms, abs=0.031)
    assert found.time[0].span_ms == clean.time[0].span_ms
    assert said(found.warnings, "cutlass_80", "on stream 7", f"{(length - 150 * US) / MS:.3f} ms after the next")
    assert found.problems[0] == found.warnings[0]
    assert not clean.warnings


def test_an_overrun_of_up_to_50_us_is_no_doubt(tmp_path: Path) -> None:
    found = figures_of(tmp_path, lengthened(49, 200 * US))
    assert found.total.compute_ms == pytest.approx(36.080)
    assert not found.warnings


def test_several_are_one_sentence_that_names_the_worst(tmp_path: Path) -> None:
    events = lengthened(49, 9 * MS)
    kernels_of(events, kineto.ALL_REDUCE)[5]["dur"] = kineto.Nanoseconds(70 * MS)
    found = figures_of(tmp_path, events)
    (sentence,) = found.warnings
    assert sentence.startswith("2 kernels end later than they can")
    assert "AllReduce" in sentence
    assert "on stream 20, 67.000 ms" in sentence
    assert found.total.comm_ms == pytest.approx(12 + 2)


def test_a_copy_overruns_too_and_another_stream_does_not_matter(tmp_path: Path) -> None:
    copy = {**gemm(0, 5), "name": "Memcpy DtoH (Device -> Pinned)", "cat": "gpu_memcpy"}
    found = figures_of(tmp_path, [copy, gemm(1, 2), gemm(0.5, 8, stream=9)])
    assert (found.total.copy_ms, found.total.compute_ms) == (1, 8.5)
    assert said(found.warnings, "Memcpy DtoH", "4.000 ms after")


def test_of_kernels_that_start_together_one_counts_and_empty_ones_cut_none(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [gemm(0, 1, 1), gemm(0, 1, 2), gemm(2, 3), gemm(2, 2), gemm(2.5, 2.5)])
    assert found.total.compute_ms == 2
    assert said(found.warnings, "1.000 ms after the next")


@pytest.mark.parametrize("length", [30 * US, 120 * US])
def test_a_kernel_that_is_in_the_file_twice_counts_once(tmp_path: Path, length: int) -> None:
    events = job()
    for event in kernels_of(events, kineto.GEMM):
        event["dur"] = kineto.Nanoseconds(length)
    clean = figures_of(tmp_path, events)
    found = figures_of(tmp_path, [*events, *kernels_of(events)[50:150], *kernels_of(events)[50:60]])
    assert found.warnings == ("110 kernels are in the file more than once, and count once [OC738]",)
    assert found.total == clean.total
    assert found.steps == clean.steps


def test_what_only_looks_like_a_kernel_twice_counts(tmp_path: Path) -> None:
    graph = [gemm(0, 0.02, 5), gemm(0, 0.02, 5), gemm(0.02, 0.04, 5)]
    other = [
        gemm(1, 1.02, 6),
        gemm(1, 1.02, 7),
        gemm(1, 1.02, 6, stream=8),
        gemm(1, 1.03, 6),
        gemm(2, 2, 8),
        gemm(2, 2, 8),
    ]
    found = figures_of(tmp_path, [*graph, *other])
    assert (found.total.kernels, found.warnings) == (9, ())


def test_kernels_of_one_launch_of_a_graph_may_run_at_the_same_time(tmp_path: Path) -> None:
    branches = [gemm(0, 3, 5), gemm(0.1, 1, 5), gemm(0.2, 2, 5)]
    assert figures_of(tmp_path, [*branches, gemm(4, 5, 6)]).total.compute_ms == pytest.approx(6.7)
    found = figures_of(tmp_path, [*branches, gemm(1, 2.5, 6)])
    assert found.total.compute_ms == pytest.approx(1 + 0.9 + 0.8 + 1.5)


def test_devices_of_one_file_have_streams_of_their_own(tmp_path: Path) -> None:
    events = [gemm(0, 5), gemm(1, 2, device=1), gemm(6, 7)]
    figures = analyze([read_trace(kineto.write(tmp_path / "a.json", events))]).traces
    assert [(one.total.compute_ms, one.warnings) for one in figures] == [(6, ()), (1, ())]


def test_the_last_kernel_of_a_stream_ends_before_the_host_has_waited_for_it(tmp_path: Path) -> None:
    wait = {**kineto.launch(3 * STEP_NS, 0), "name": "cudaDeviceSynchronize"}
    events = [*lengthened(-1, 9 * MS), wait]
    found = figures_of(tmp_path, events)
    assert said(found.warnings, "on stream 7", "after all else has ended")
    assert found.total.compute_ms == pytest.approx(35.88 + (STEP_NS - 99 * 150 * US - 6 * US) / MS)
    # Without it a kernel may run on after the host's last event.
    assert figures_of(tmp_path, lengthened(-1, 9 * MS)).total.compute_ms == pytest.approx(35.88 + 9)


def test_the_last_kernel_is_not_longer_than_all_of_the_file_unless_it_waits_for_other_ranks(tmp_path: Path) -> None:
    found = figures_of(tmp_path, lengthened(-1, 3_200 * MS))
    assert found.total.compute_ms == pytest.approx(35.88 + (STEP_NS - US - 99 * 150 * US - 10 * US) / MS)
    assert said(found.warnings, "after all else has ended")
    waits = figures_of(tmp_path, lengthened(-1, 3_200 * MS, kineto.ALL_REDUCE))
    assert waits.total.comm_ms == pytest.approx(11 + 3_200)


@pytest.mark.parametrize("length", [3_200 * MS, 9 * MS])
def test_an_overrun_is_no_slowdown_and_makes_no_negative_step(tmp_path: Path, length: int) -> None:
    for pair in ((lengthened(49, length), job()), (job(), lengthened(49, length))):
        figures = compared(tmp_path, *pair).figures
        assert figures["compute_slowdown"] == pytest.approx(0, abs=0.001)
        assert figures["e2e_ideal_ms"] == pytest.approx(STEP_NS / MS, abs=0.05)


def test_without_a_positive_ideal_step_there_is_none(tmp_path: Path) -> None:
    more = [kineto.kernel(kineto.GEMM, MS + i * US, 15 * MS, 0, stream=100 + i) for i in range(9)]
    found = compared(tmp_path, [*job(), *more], job())
    assert not {"e2e_ideal_ms", "e2e_sequential_model_ms", "gap_to_ideal"} & {*found.figures}
    assert not found.valid


# -- kernels without a time


def timeless(number: int, **times: Any) -> list[kineto.Event]:
    events = job()
    for event in kernels_of(events)[:number]:
        event.update({"ts": 0, "dur": 0} | times)
    return events


@pytest.mark.parametrize("times", [{}, {"dur": 120}, {"ts": -5}, {"ts": 5, "dur": 4e12}])
def test_kernels_at_time_0_are_left_out_and_their_step_is_in_no_mean(tmp_path: Path, times: dict[str, Any]) -> None:
    found = figures_of(tmp_path, timeless(30, **times))
    assert found.warnings == ("30 kernels have no time and are left out; step 0 lacks them [OC737]",)
    assert found.total.kernels == NUMBER - 30
    assert [step.cut for step in found.steps] == [True, False, False]
    assert [time.step for time in found.time] == [None, 1, 2]
    assert [path.step for path in found.paths] == [1, 2]
    assert found.time[0].span_ms < 2 * STEP_NS / MS
    assert not said(found.problems, "the clock may have jumped")
    again = compared(tmp_path, timeless(30, **times), job())
    assert (again.figures["compute_slowdown"], again.steps) == (0, (2, 2))


@pytest.mark.parametrize("times", [{"ts": None}, {"dur": "soon"}, {"ts": "NaN"}])
def test_of_times_that_cannot_be_read_the_step_is_known_too(tmp_path: Path, times: dict[str, Any]) -> None:
    found = figures_of(tmp_path, timeless(3, **times))
    assert said(found.warnings, "3 events have no time that can be read", "step 0 lacks them")
    assert [step.cut for step in found.steps] == [True, False, False]


def test_a_kernel_far_from_its_launch_has_no_time_and_a_launch_at_0_costs_only_itself(tmp_path: Path) -> None:
    events = job()
    hour = 3_600 * 1000 * MS
    kernels_of(events)[110]["ts"] = kineto.Nanoseconds(kernels_of(events)[110]["ts"] + hour)
    found = figures_of(tmp_path, events)
    assert said(found.warnings, "1 kernels have no time", "step 1 lacks them")
    events = job()
    launch = next(event for event in events if event["args"].get("correlation") == 150)
    launch.update(ts=0, dur=0)
    found = figures_of(tmp_path, events)
    assert found.total.kernels == NUMBER
    assert [step.kernels for step in found.steps] == [104] * 3


@pytest.mark.parametrize("times", [{"ts": 0, "dur": 0}, {"ts": None}, {"dur": "soon"}, {"dur": -5}])
def test_a_step_without_a_time_is_left_out_and_the_next_one_is_no_longer(tmp_path: Path, times: dict[str, Any]) -> None:
    clean = figures_of(tmp_path, job())
    events = job()
    next(event for event in events if event["name"] == "ProfilerStep#1").update(times)
    found = figures_of(tmp_path, events)
    assert found.warnings == ("1 steps have no time and are left out: their kernels count in the total alone [OC722]",)
    assert [step.step for step in found.steps] == [0, 2]
    assert (found.total, found.steps[1]) == (clean.total, clean.steps[2])
    assert found.time[2].span_ms == pytest.approx(clean.time[3].span_ms, rel=0.1)


def test_a_step_ends_where_the_next_begins_or_the_profile_ended(tmp_path: Path) -> None:
    events = [*job(), window_end(STEPS * STEP_NS)]
    clean = figures_of(tmp_path, events)
    assert not clean.warnings
    for event in events:
        if event["name"] in ("ProfilerStep#0", "ProfilerStep#2"):
            event["dur"] = kineto.Nanoseconds(3_200 * MS)
    found = figures_of(tmp_path, events)
    assert [step.wall_ms for step in found.steps] == pytest.approx([step.wall_ms for step in clean.steps], abs=0.002)
    assert said(found.warnings, "some steps overlap: each ends where the next begins")
    assert said(found.warnings, "step 2 ends 3184.040 ms after the profile: it counts only up to there")


@pytest.mark.parametrize("end", [STEPS * STEP_NS, 0])
def test_nothing_runs_on_when_the_profile_has_ended(tmp_path: Path, end: int) -> None:
    events = lengthened(-1, 3_200 * MS, kineto.ALL_REDUCE)
    found = figures_of(tmp_path, [*events, window_end(end)])
    if end:
        assert found.total.comm_ms == pytest.approx(12 + 4.95)
        assert said(found.warnings, "AllReduce", "on stream 20", "after all else has ended")
    else:  # no end of a profile that had work after it
        assert found.total.comm_ms == pytest.approx(11 + 3_200)
        assert not found.warnings


def window_end(time: int) -> kineto.Event:
    return {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "",
            "ts": kineto.Nanoseconds(kineto.BASE_NS + time)}  # fmt: skip


def test_whose_launch_is_not_known_may_be_of_any_step(tmp_path: Path) -> None:
    events = job(launches=False)
    kernels_of(events)[3].update(ts=0, dur=0)
    found = figures_of(tmp_path, events)
    assert said(found.warnings, "any step may lack them")
    assert [step.cut for step in found.steps] == [True] * 3
    assert found.total.cut
    assert not compared(tmp_path, events, job(launches=False)).valid


def test_a_file_of_kernels_without_time_has_no_figures(tmp_path: Path) -> None:
    found = figures_of(tmp_path, timeless(NUMBER))
    assert (found.total.kernels, found.time) == (0, ())
    assert said(found.warnings, f"{NUMBER} kernels have no time", "steps 0, 1, 2 lack them")


@pytest.mark.parametrize("times", [{"ts": 0, "dur": 0}, {"ts": 5}, {"ts": "5"}])
def test_operators_of_a_cpu_job_and_steps_at_time_0_are_left_out_too(tmp_path: Path, times: dict[str, Any]) -> None:
    events = [kineto.step(i, i * MS, (i + 1) * MS - 1) for i in range(3)]
    events += [kineto.host_range("aten::mm", i * MS, i * MS + MS // 2, cat="cpu_op") for i in range(3)]
    clean = figures_of(tmp_path, events)
    for event in (events[0], events[3]):
        event.update(times)
    found = figures_of(tmp_path, events)
    assert (clean.total.compute_ms, clean.warnings) == (1.5, ())
    assert found.warnings == (
        "1 steps have no time and are left out: their kernels count in the total alone [OC722]",
        "1 operators and ranges have no time and are left out; any step may lack them [OC748]",
    )
    assert (found.total.compute_ms, [step.step for step in found.steps]) == (1, [1, 2])
    assert found.total.cut


# -- what was launched


def lossy(number: int, first: int = 0, **options: Any) -> list[kineto.Event]:
    events = job(**options)
    return without(events, kernels_of(events)[first : first + number])


def test_a_step_whose_launches_have_no_kernel_is_in_no_mean(tmp_path: Path) -> None:
    found = figures_of(tmp_path, lossy(70))
    assert found.warnings == ("70 of 312 launches have no kernel, all in step 0: that step is in no mean [OC733]",)
    assert [step.cut for step in found.steps] == [True, False, False]
    clean = figures_of(tmp_path, job())
    assert [time.step for time in found.time] == [None, 1, 2]
    assert found.time[2] == clean.time[3]
    assert found.time[0].compute_ms == pytest.approx(2 * 12)


def test_where_only_steps_that_lack_kernels_have_any_the_time_is_that_of_the_file(tmp_path: Path) -> None:
    end = STEPS * STEP_NS
    found = figures_of(tmp_path, [*_all_lossy(), kineto.step(STEPS, end, end + MS)])
    assert [step.cut for step in found.steps] == [True] * STEPS
    assert [(time.step, time.compute_ms) for time in found.time] == [(None, pytest.approx(found.total.compute_busy_ms))]
    assert (found.paths, found.host_limit) == ((), None)


def test_launches_of_several_steps_and_at_the_end(tmp_path: Path) -> None:
    found = figures_of(tmp_path, lossy(20, 100))
    assert said(found.warnings, "20 of 312 launches have no kernel, in steps 0, 1: those steps are in no mean")
    found = figures_of(tmp_path, lossy(1, NUMBER - 1))
    assert said(found.warnings, "1 of 312 launches have no kernel, all in step 2")


@pytest.mark.parametrize("swap", [False, True])
def test_steps_that_lack_kernels_are_compared_in_neither_file(tmp_path: Path, swap: bool) -> None:
    pair = (job(), lossy(70))
    found = compared(tmp_path, *(reversed(pair) if swap else pair))
    assert found.figures["compute_slowdown"] == 0
    assert (found.matched_fraction, found.steps) == (1, (2, 2))


def test_a_comparison_says_first_what_it_leaves_out(tmp_path: Path) -> None:
    paths = [kineto.write(tmp_path / f"{i}.json", events) for i, events in enumerate((job(), lossy(70)))]
    output = overlap("compare", *map(str, paths), "--force").output
    assert output.count("sequential: 70 of 312 launches have no kernel, all in step 0") == 1
    assert output.index("70 of 312") < output.index("compute slowdown")


def test_without_steps_or_whole_ones_a_comparison_says_why_it_is_not_valid(tmp_path: Path) -> None:
    for pair in ((job(steps=False), lossy(70, steps=False)), (job(), _all_lossy())):
        found = compared(tmp_path, *pair)
        assert not found.valid
        assert said(found.problems, "the sequential file lacks kernels, and no step of it is known to be whole")
        assert said(found.problems, "launches have no kernel")


def test_steps_in_one_of_two_files_are_the_reason_where_no_ideal_step_is_left(tmp_path: Path) -> None:
    events = job(steps=False)
    others = [{**event, "tid": 8} for event in kernels_of(events, kineto.GEMM)]
    found = compared(tmp_path, [*events, *others], job())
    assert "e2e_ideal_ms" not in found.figures
    assert said(found.problems, "only one of the files has ProfilerStep ranges")


def _all_lossy() -> list[kineto.Event]:
    events = job()
    return without(events, kernels_of(events)[::50])


def test_what_a_profile_without_steps_lacks_at_its_ends_is_a_note(tmp_path: Path) -> None:
    events = job(steps=False)
    kernels = kernels_of(events)
    found = figures_of(tmp_path, without(events, [*kernels[:1], *kernels[-2:]]))
    assert not found.warnings
    assert said(found.problems, "3 of 312 launches have no kernel, all at the beginning or the end")
    assert said(figures_of(tmp_path, lossy(5, 100, steps=False)).warnings, "5 of 312 launches have no kernel")


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "hipModuleLaunchKernel", "cudaLaunchCooperativeKernel"])
def test_other_calls_that_launch_a_kernel_have_one_too(tmp_path: Path, name: str) -> None:
    events = [*job(), {**kineto.launch(MS + 20 * US, 9_999), "name": name}]
    assert said(figures_of(tmp_path, events).warnings, "1 of 313 launches have no kernel")


def test_calls_that_may_launch_nothing_are_not_missed(tmp_path: Path) -> None:
    names = ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch", "cudaEventRecord", "cudaFuncSetAttribute")
    events = [{**kineto.launch(MS, 9_000 + i), "name": name} for i, name in enumerate(names)]
    driver = {**kineto.launch(200 * US, 9_999), "name": "cuLaunchKernel", "cat": "cuda_driver"}
    runtime = {**kineto.launch(199 * US, 10_000), "dur": kineto.Nanoseconds(6 * US)}  # which calls the driver
    events += [driver, runtime, kineto.kernel("k", 201 * US, 202 * US, 10_000, stream=9)]
    assert not figures_of(tmp_path, [*job(), *events]).warnings


def test_kernels_without_numbers_may_be_those_that_were_launched(tmp_path: Path) -> None:
    events = job()
    for event in kernels_of(events)[:20]:
        del event["args"]["correlation"]
    assert not figures_of(tmp_path, events).warnings


# -- graphs


def captured(begin: str = "cudaStreamBeginCapture", end: str = "cudaStreamEndCapture") -> list[kineto.Event]:
    events = [kineto.launch(0, 1), gemm(0, 0.1, 1)]
    events += [{**kineto.launch(MS // 5, 0), "name": begin}] if begin else []
    events += [kineto.launch(MS // 4 + i * 10 * US, 100 + i, thread=100 + i % 2) for i in range(400)]
    events += [{**kineto.launch(9 * MS // 2, 0), "name": end}] if end else []
    events += [{**kineto.launch(9 * MS // 2 + 5 * US, 1000), "name": "cudaGraphLaunch"}] if end else []
    return [*events, *[gemm(4.6 + i / 100, 4.6 + (i + 1) / 100, 1000) for i in range(10)]]


@pytest.mark.parametrize(
    "calls", [(), ("hipStreamBeginCapture", "hipStreamEndCapture"), ("cuStreamBeginCapture_v2", "cuStreamEndCapture")]
)
def test_launches_into_a_graph_are_not_missing_and_nothing_waits_for_them(tmp_path: Path, calls: tuple[str]) -> None:
    found = figures_of(tmp_path, captured(*calls))
    assert found.warnings == ("400 launches were captured into a CUDA graph and ran no kernels [OC732]",)
    whole = found.time[0]
    assert whole.idle_host_ms is not None
    assert whole.idle_other_ms == pytest.approx(4.3)
    assert whole.idle_host_ms < 0.11
    assert found.host_limit is not None
    assert not found.host_limit.launch_bound


def test_a_capture_that_began_before_the_file_or_ends_after_it_counts(tmp_path: Path) -> None:
    for options in ({"begin": ""}, {"end": ""}):
        assert said(figures_of(tmp_path, captured(**options)).warnings, "400 launches were captured into a CUDA graph")


# -- Nsight Systems

DIAGNOSTICS = """
CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, timestampType INTEGER, source INTEGER, severity INTEGER, text TEXT,
    globalPid INTEGER);
CREATE TABLE ENUM_DIAGNOSTIC_SEVERITY_LEVEL (id INTEGER, name TEXT, label TEXT);
"""
LOST = "Not all CUDA events might have been collected."


def export(path: Path, events: list[kineto.Event], *texts: tuple[int, str, int | None]) -> Path:
    report = nsys_file.NsysFile(path)
    for statement in DIAGNOSTICS.split(";"):
        report.execute(statement)
    for number, name in enumerate(("Info", "Warning", "Error"), 1):
        report.row("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", id=number, name=name, label=name)
    for severity, text, process in texts:
        pid = None if process is None else nsys_file.number_of(process)
        report.row("DIAGNOSTIC_EVENT", severity=severity, text=text, globalPid=pid)
    report.add([{**event, **{key: event[key] / 1000 for key in ("ts", "dur")}} for event in events])
    return report.close()


def figures_of_export(path: Path) -> TraceFigures:
    trace: Trace = read_trace(path)
    (found,) = analyze([trace]).traces
    return found


def test_exports_are_checked_like_files_of_torch(tmp_path: Path) -> None:
    found = figures_of_export(export(tmp_path / "a.sqlite", lossy(70)))
    assert said(found.warnings, "70 of 312 launches have no kernel, all in step 0")
    found = figures_of_export(export(tmp_path / "b.sqlite", lengthened(49, 9 * MS)))
    assert said(found.warnings, "on stream 7 ends 8.850 ms after")
    found = figures_of_export(export(tmp_path / "c.sqlite", captured()))
    assert said(found.warnings, "400 launches were captured into a CUDA graph")


def test_an_export_says_that_events_were_lost(tmp_path: Path) -> None:
    harmless = [(1, "Number of CUDA events collected: 312, dropped: 0.", 77), (2, "CPU sampling is not supported.", 77),
                (2, "No CUDA events collected. Does the process use CUDA?", 78), (2, LOST, 79)]  # fmt: skip
    assert not figures_of_export(export(tmp_path / "a.sqlite", job(), *harmless)).warnings
    lost = [(1, "CUDA device 0: 1200 events were dropped.", None), (3, "The CUPTI buffer overflowed.", 77)]
    assert said(figures_of_export(export(tmp_path / "c.sqlite", job(), *lost)).warnings, "1200 events", "overflowed")
    for place, process in enumerate((77, None)):
        path = export(tmp_path / f"b{place}.sqlite", job(), *harmless, (2, LOST, process))
        assert said(figures_of_export(path).warnings, "Nsight Systems says that it lost events", LOST)


def test_an_export_without_kernels_is_refused_with_what_it_says(tmp_path: Path) -> None:
    told = (2, "CUDA profiling might have not been started correctly.", 77)
    path = export(tmp_path / "a.sqlite", [kineto.step(1, 0, MS)], told)
    error = error_of("analyze", str(path))
    assert "is an export of Nsight Systems, but holds no CUDA kernels" in error
    assert told[1] in error
    empty = tmp_path / "b.sqlite"
    report = nsys_file.NsysFile(empty)
    for table in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME"):
        report.execute(f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}")
    report.execute("CREATE TABLE DIAGNOSTIC_EVENT (text TEXT)")
    report.row("DIAGNOSTIC_EVENT", text="CUDA was not traced.")
    report.close()
    error = error_of("analyze", str(empty))
    assert "is an export of Nsight Systems" in error
    assert "CUDA was not traced." in error
