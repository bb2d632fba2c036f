"""The profile of a device becomes figures, or says why it cannot. Kineto's events are made by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from overlap_callbacks.analysis.exposure import exposure_sentence
from overlap_callbacks.analysis.headline import run_headline
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.results.exposure import FIRST, LAST
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background.measurement import measure
from overlap_callbacks.monitor.background.profile_figures import check_device_profile
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow
from tests.analysis.kernels.test_table import event, gpu_kernel, launch, launch_metadata
from tests.columns import EPOCH_NS, columns
from tests.samples import aggregate_windows

MS = 1_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KERNELS = 100  # of compute, in each step
STEP_NS = 20 * MS
ORDER = "OSSOOSSO"
# A window without step times of both modes is not valid.
TIMED = (TimedBlock(Mode.OVERLAPPED, 0, (900.0,)), TimedBlock(Mode.SEQUENTIAL, 1, (900.0,)))
NO_KERNELS = "the profiler saw no kernels of the device"

Event = Any
GROUP = Group("0", "default_pg", (0, 1), "nccl")
LOG = StepLog((Collective("allreduce_", GROUP, 4, 4, None, 0, -1, 0, 0, asynchronous=True, on_device=True),), 0, None)


def step_events(number: int, kernels: int = KERNELS, last: str = "gemm") -> list[Event]:
    """A step's GEMMs, and an all-reduce beside them in overlapped steps; the device lags by half a step."""
    start, first = number * STEP_NS, 1000 * (number + 1)
    ran = start + STEP_NS // 2
    events = [launch(start + 10 * i, first + i) for i in range(kernels + 1)]
    for i in range(kernels):
        metadata = launch_metadata((i % 7 + 1, 1, 1), correlation=first + i)
        at = ran + 100_000 * i
        name = last if i == kernels - 1 else "gemm"
        events.append(gpu_kernel(name, at, at + 90_000, first + i, metadata=metadata))
    at = ran if ORDER[number % len(ORDER)] == "O" else ran + 100_000 * kernels
    events.append(gpu_kernel(ALL_REDUCE, at, at + 2 * MS, first + kernels, stream=20))
    return events


def whole(num_steps: int = len(ORDER)) -> list[list[Event]]:
    return [step_events(number) for number in range(num_steps)]


def closed(events: Callable[[], Sequence[Event]], num_steps: int = len(ORDER)) -> MeasuredWindow:
    """A window on a device, with one profiled step in each block."""
    profile = Profile(on_cuda=True)
    profile.session = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=events)))
    profile.bounds = [(EPOCH_NS + i * STEP_NS, EPOCH_NS + (i + 1) * STEP_NS) for i in range(num_steps)]
    clock = StepClock()
    clock.compute_stream = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
    steps = []
    for number in range(num_steps):
        arm = Mode.OVERLAPPED if ORDER[number] == "O" else Mode.SEQUENTIAL
        plan = Plan(0, number, Part.PROFILED, number, arm, arm, True, False)
        steps.append(MeasuredStep(plan=plan, start=0, end=1, log=LOG, profile_index=number, number=number))
    return MeasuredWindow(
        number=0, first_step=0, steps=tuple(steps), complete=True, problems=(), opened_ns=0, wall_ms=1.0, clock=clock,
        meter=None, profile=profile, missing_profile="",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("overlap_callbacks.monitor.background.profile_figures.chip_of", lambda stream: None)


def measured(steps: Sequence[Sequence[Event]], extra: Sequence[Event] = ()) -> RankWindow:
    events = [found for of_step in steps for found in of_step]
    return measure(closed(lambda: [*events, *extra]), rank=0, backend="nccl")


def blocks_of(found: RankWindow) -> list[int]:
    return [block.block for block in found.profiled]


def test_a_whole_profile_gives_figures_and_no_problem() -> None:
    found = measured(whole())
    assert (found.problems, found.doubts, blocks_of(found)) == ((), (), list(range(8)))
    found = msgspec.structs.replace(found, timed=TIMED)
    report = aggregate_windows([found], world_size=1, every_n_steps=1000)
    assert (report.valid, report.verified, report.problems) == (True, True, ())
    assert report.compute_ms is not None
    assert report.compute_ms.value == pytest.approx(0.09 * KERNELS)


def test_streams_that_run_kernels_are_counted_and_those_of_copies_are_not() -> None:
    assert measured(whole()).num_streams == 2
    at = STEP_NS + STEP_NS // 2
    norm = [launch(STEP_NS, 90_000), gpu_kernel("norm", at, at + 1000, 90_000, stream=30)]
    copy = [launch(STEP_NS, 90_001), event("Memcpy HtoD", "gpu_memcpy", at, at + 1000, correlation=90_001, resource=31)]
    assert measured(whole(), [*norm, *copy]).num_streams == 3


def exposed(found: RankWindow) -> list[tuple[str, int, float, float, dict[int, float]]]:
    """Place, size, exposed and hidden time, and exposed time of each step; the most exposed first."""
    rows = sorted(found.exposure.rows, key=lambda row: -row.exposed_ns)
    return [(row.place, row.size, row.exposed_ns / MS, row.hidden_ns / MS, row.by_step) for row in rows]


def test_the_collectives_of_overlapped_steps_are_exposed_or_hidden_by_size_and_place() -> None:
    # Beside 20 GEMMs of 0.09 ms, with a gap after each; those of sequential steps are no matter.
    found = measured(whole())
    (row,) = exposed(found)
    steps = [number for number, mode in enumerate(ORDER) if mode == "O"]
    assert row[:2] == (FIRST, 4)
    assert row[2:4] == (pytest.approx(4 * 0.2), pytest.approx(4 * 1.8))
    assert {number: ns / MS for number, ns in row[4].items()} == pytest.approx(dict.fromkeys(steps, 0.2))
    late = [events for events in whole() if events]
    for number in (steps[1], steps[3]):  # the collective runs behind all compute
        at = number * STEP_NS + STEP_NS // 2 + 100_000 * KERNELS
        late[number][-1] = gpu_kernel(ALL_REDUCE, at, at + 2 * MS, 1000 * (number + 1) + KERNELS, stream=20)
    last, first = exposed(measured(late))
    assert (last[0], last[2], sorted(last[4])) == (LAST, pytest.approx(4), [steps[1], steps[3]])
    assert (first[0], first[2]) == (FIRST, pytest.approx(0.4))
    ranks = [msgspec.structs.replace(measured(of), timed=TIMED, rank=i) for i, of in enumerate((whole(), late))]
    report = aggregate_windows(ranks, world_size=2, every_n_steps=1000)
    assert report.exposure is not None
    assert exposure_sentence(report.exposure).startswith(
        "Of 5.20 ms exposed on 2 ranks 4.00 ms are the 4 B all-reduce that ends the step, in 2 of 4 steps, on rank 1 "
    )
    assert all(not sample.exposure.rows for sample in report.samples)


def with_copies(*, barrier: bool) -> list[list[Event]]:
    """The same, with copies beside the GEMMs on another stream in all steps, each followed by a barrier or nothing."""
    found = []
    for number, events in enumerate(whole()):
        start, more = number * STEP_NS, []
        for i in range(8):
            at, first = start + STEP_NS // 2 + 1_000_000 * i, 1000 * (number + 1) + 500 + 2 * i
            more += [launch(start + 2000 + 10 * i, first), event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", at,
                     at + 700_000, correlation=first, resource=30)]  # fmt: skip
            if barrier:
                name = "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"
                ran = gpu_kernel(name, at + 700_000, at + 701_000, first + 1, stream=30)
                more += [launch(start + 2005 + 10 * i, first + 1), ran]
        found.append([*events, *more])
    return found


@pytest.mark.parametrize(("barrier", "groups"), [(True, {}), (False, {"tp": None})], ids=["kernels", "groups"])
def test_copies_of_symmetric_memory_leave_no_window_verified(
    barrier: bool, groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "torch.distributed._symmetric_memory", SimpleNamespace(_group_name_to_store=groups)
    )
    found = measured(with_copies(barrier=barrier))
    report = aggregate_windows([msgspec.structs.replace(found, timed=TIMED)], world_size=1, every_n_steps=1000)
    assert report.lower_bound
    assert not report.verified
    assert any(problem.endswith("residual overlap are lower bounds [OC378]") for problem in report.problems)
    assert "lower bounds" in run_headline(RunSummary(None, [report])).why


def test_copies_within_the_device_are_its_own_where_nothing_else_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", SimpleNamespace())
    found = measured(with_copies(barrier=False))
    assert not found.lower_bound


def test_the_device_and_the_largest_launch_of_each_kernel_are_known() -> None:
    found = measured(whole())
    assert found.num_sms == 132
    blocks = {kernel.name: kernel.num_blocks for kernel in found.kernels}
    assert (blocks["gemm"], blocks[ALL_REDUCE]) == (7, 0)
    report = aggregate_windows([found], world_size=1, every_n_steps=1000)
    assert {kernel.name: kernel.num_blocks for kernel in report.kernels} == blocks


@pytest.mark.parametrize(
    "events",
    [
        [],
        [launch(5 * MS, 1)],  # the runtime's calls come from elsewhere than the device's records
        [launch(5 * MS, 1), event("Memcpy HtoD", "gpu_memcpy", 6 * MS, 7 * MS, correlation=1)],
        [launch(5 * MS, 1), gpu_kernel("gemm", 6 * MS, 7 * MS, 2)],  # of the step before, or of nobody knows which
    ],
    ids=["nothing", "launches", "copies", "no launch of any kernel"],
)
def test_a_device_profile_without_kernels_says_so_and_gives_no_zeros(events: list[Event]) -> None:
    found = measured([events])
    why = "does not tell which steps" if len(events) > 1 and "gemm" in events[1].name() else NO_KERNELS
    assert [why in problem for problem in found.problems] == [True]
    assert (found.profiled, found.kernels, found.pairs, found.dimensions, found.pictures) == ((), (), (), (), ())
    report = aggregate_windows([found], world_size=1, every_n_steps=1000)
    assert report.figures() == {}
    assert not report.verified
    assert report.metrics()["overlap/verified"] == 0.0


@pytest.mark.parametrize(
    "kept",
    [(KERNELS,) * 7 + (60,), (KERNELS,) * 6 + (60, 0), (KERNELS,) * 2 + (30,) + (0,) * 5],
    ids=["in the last step", "two steps before the end", "early"],
)
def test_a_truncated_profile_says_so_and_gives_nothing(kept: tuple[int, ...]) -> None:
    steps = [
        step_events(number, last="adamw")[: None if count == KERNELS else KERNELS + 1 + count]
        for number, count in enumerate(kept)
    ]
    found = measured(steps)
    assert [problem.startswith("kernel times are missing: the profile ends") for problem in found.problems] == [True]
    assert found.profiled == ()


def without_kernels(step: list[Event], number: int) -> list[Event]:
    """A step that lost its first kernels of compute, but not their launches."""
    return [*step[: KERNELS + 1], *step[KERNELS + 1 + number :]]


def lengthened(step: list[Event], place: int = 50) -> list[Event]:
    """A step with a kernel that seems to run for three seconds."""
    kernel = step[KERNELS + 1 + place]
    start, end = kernel.start_ns() - EPOCH_NS, kernel.start_ns() - EPOCH_NS + 3_000 * MS
    longer = gpu_kernel(kernel.name(), start, end, kernel.correlation_id(), metadata=kernel.metadata_json())
    return [longer if event is kernel else event for event in step]


@pytest.mark.parametrize("step", [0, 3, 7])
def test_a_step_whose_launches_have_no_kernel_or_whose_kernels_cannot_be_is_left_out(step: int) -> None:
    usual = measured(whole())
    for change, words in (
        (lambda events: without_kernels(events, 70), "kernels that they launched are missing"),
        (lambda events: without_kernels(events, 1), "kernels that they launched are missing"),
        (lengthened, "kernels of theirs run longer than they can"),
    ):
        steps = whole()
        steps[step] = change(steps[step])
        found = measured(steps)
        assert blocks_of(found) == [number for number in range(8) if number != step]
        assert found.problems == (f"profiled steps were left out: {words} [OC365]",)
        assert found.doubts == ()
        assert found.profiled == tuple(block for block in usual.profiled if block.block != step)


def test_a_window_with_fewer_than_half_of_the_profiled_steps_of_a_mode_is_not_valid() -> None:
    steps = whole()
    for number in (0, 3):  # of four overlapped ones
        steps[number] = without_kernels(steps[number], 70)
    found = msgspec.structs.replace(measured(steps), timed=TIMED)
    assert blocks_of(found) == [1, 2, 4, 5, 6, 7]
    assert aggregate_windows([found], world_size=1, every_n_steps=1000).valid
    steps[4] = lengthened(steps[4])
    found = msgspec.structs.replace(measured(steps), timed=TIMED)
    assert (found.profiled, found.problems) == ((), ())
    assert found.doubts == (
        "kernel times are missing: of a mode, fewer than half of the profiled steps are left: kernels that they "
        "launched are missing and kernels of theirs run longer than they can [OC363]",
    )
    report = aggregate_windows([found], world_size=1, every_n_steps=1000)
    assert not report.valid


def test_a_kernel_without_a_time_is_left_out_with_its_step() -> None:
    steps = whole()
    kernel = steps[2][KERNELS + 1]
    kernel.start_ns, kernel.duration_ns = (lambda: 0), (lambda: 0)
    found = measured(steps)
    assert blocks_of(found) == [0, 1, 3, 4, 5, 6, 7]
    assert found.problems == ("profiled steps were left out: kernels that they launched are missing [OC365]",)


def test_launches_into_a_graph_lack_no_kernel() -> None:
    captured = [
        launch(STEP_NS + 100, 0, name="cudaStreamBeginCapture"),
        *[launch(STEP_NS + 200 + i, 50_000 + i) for i in range(40)],
        launch(STEP_NS + 300, 0, name="cudaStreamEndCapture"),
    ]
    found, usual = measured(whole(), captured), measured(whole())
    assert (found.profiled, found.problems, found.doubts) == (usual.profiled, (), ())


def test_kernels_of_two_devices_or_of_one_launch_of_a_graph_may_overlap() -> None:
    graph = [gpu_kernel("gemm", 5 * MS + i, 9 * MS + i, 70_000, stream=30) for i in range(3)]
    calls = [launch(100, 70_000, name="cudaGraphLaunch"), launch(101, 70_001), launch(102, 70_002)]
    others = [gpu_kernel("gemm", 15 * MS + i, 19 * MS, 70_001 + i, stream=31) for i in range(2)]
    others[0].device_index = lambda: 1
    assert "profiled steps were left out" not in " ".join(measured(whole(), [*calls, *graph, *others]).problems)


def test_no_kernel_ends_after_the_profile() -> None:
    events = [found for of_step in whole() for found in of_step]
    last = next(event for event in reversed(events) if event.name() == "gemm")
    last.duration_ns = lambda: 5_000 * MS
    window = closed(lambda: events)
    assert window.profile is not None
    window.profile._ended_ns = EPOCH_NS + 9 * STEP_NS
    found = measure(window, rank=0, backend="nccl")
    assert blocks_of(found) == [0, 1, 2, 3, 4, 5, 6]
    assert found.problems == ("profiled steps were left out: kernels of theirs run longer than they can [OC365]",)


def test_an_odd_step_is_left_out_with_a_note() -> None:
    steps = whole()
    steps[3] = step_events(3, kernels=KERNELS + 50)
    found = measured(steps)
    assert blocks_of(found) == [0, 1, 2, 4, 5, 6, 7]
    assert found.problems == (
        "profiled steps with more or fewer kernels than most of their mode were left out [OC367]",
    )


def test_a_shorter_last_step_that_ends_as_the_others_do_is_left_out_alone() -> None:
    steps = [step_events(number, KERNELS - (5 if number == 7 else 0), last="adamw") for number in range(8)]
    found = measured(steps)
    assert blocks_of(found) == [0, 1, 2, 3, 4, 5, 6]
    assert found.problems == (
        "profiled steps with more or fewer kernels than most of their mode were left out [OC367]",
    )


def test_steps_that_all_differ_are_kept_with_a_note() -> None:
    found = measured([step_events(number, kernels=60 + 10 * number) for number in range(8)])
    assert len(found.profiled) == 8
    assert [problem.startswith("the number of kernels differs") for problem in found.problems] == [True]


def kinds_of_blocks(found: RankWindow) -> dict[Mode, list[int]]:
    return {mode: [block.kinds[0] for block in found.profiled if block.mode is mode] for mode in Mode}


def test_steps_that_called_other_kernels_in_both_modes_are_of_another_kind() -> None:
    steps = whole()
    for number in (1, 3):  # blocks O S S O, O S S O
        steps[number] = step_events(number, kernels=KERNELS + 50)
    found = measured(steps)
    assert blocks_of(found) == list(range(8))
    assert kinds_of_blocks(found) == {Mode.OVERLAPPED: [0, 1, 0, 0], Mode.SEQUENTIAL: [1, 0, 0, 0]}
    assert [problem.split(":")[0] for problem in found.problems] == [
        f"profiled steps with the same communication called different kernels ({KERNELS + 1} and {KERNELS + 51})"
    ]


def test_both_modes_have_as_many_profiled_steps_of_each_kind() -> None:
    steps = whole()
    for number in (0, 1, 3):
        steps[number] = step_events(number, kernels=KERNELS + 50)
    found = measured(steps)
    # Of three longer steps in two modes, one is too many; then one of the others is.
    assert kinds_of_blocks(found) == {Mode.OVERLAPPED: [1, 0, 0], Mode.SEQUENTIAL: [1, 0, 0]}
    assert "profiled steps were left out so that both modes have as many of each kind [OC370]" in found.problems


def test_collectives_without_a_launch_count_in_their_steps_and_are_named() -> None:
    def without_launch(number: int) -> list[Event]:
        *others, collective = step_events(number)
        last = others.pop(KERNELS)  # the launch of the all-reduce
        assert last.correlation_id() == collective.correlation_id()
        return [*others, collective]

    usual, found = measured(whole()), measured([without_launch(number) for number in range(8)])
    assert found.profiled == usual.profiled
    assert found.problems == (
        "8 kernels (20 ms) of the profiled steps have no launch in the profile; they are placed by their start [OC368]",
    )


def test_collectives_of_a_graph_are_named() -> None:
    steps = whole()
    for number in (0, 1):
        first = 1000 * (number + 1)
        steps[number][KERNELS] = launch(number * STEP_NS + 9_000, first + KERNELS, name="cudaGraphLaunch")
    assert measured(steps).problems == (
        "20 % of communication kernels come from CUDA graphs, which the gate cannot serialise [OC369]",
    )


def test_ranks_with_somewhat_different_numbers_of_graph_kernels_say_the_same() -> None:
    def problems_of(replayed: int) -> tuple[str, ...]:
        rows = [("gemm", Kind.COMPUTE, step, 0, 1) for step in (0, 1) for _ in range(100)]
        rows += [(ALL_REDUCE, Kind.COMMUNICATION, 0, 2, 3)] * 50
        kernels = columns(rows)
        kernels.from_graph[len(rows) - replayed :] = True
        return check_device_profile(kernels, {Mode.OVERLAPPED: [0], Mode.SEQUENTIAL: [1]}, {0: 0, 1: 0}).problems

    assert problems_of(21) == problems_of(22)
    assert problems_of(21)[-1].startswith("40 % of communication kernels come from CUDA graphs")


def test_a_device_profile_of_which_no_step_can_be_compared_with_the_log_says_so() -> None:
    window = closed(lambda: [found for of_step in whole() for found in of_step])
    lost = tuple(replace(step, log=replace(step.log, dropped=1)) for step in window.steps)
    found = measure(replace(window, steps=lost), rank=0, backend="nccl")
    assert found.problems == (
        "the gate's log could not be compared with the profile: in every profiled step collectives were lost from the "
        "log [OC371]",
    )
    assert found.profiled


def test_where_no_profiled_step_counts_the_report_says_so() -> None:
    window = closed(lambda: [found for of_step in whole() for found in of_step])
    compiled = tuple(replace(step, counted=False) for step in window.steps)
    found = measure(replace(window, steps=compiled), rank=0, backend="nccl")
    assert (found.problems, found.profiled) == (("kernel times are missing: no profiled step counts [OC372]",), ())


def test_the_cpu_time_of_reading_a_profile_is_kept_and_the_time_of_waiting_is_not() -> None:
    events = [found for of_step in whole() for found in of_step]

    def work() -> Sequence[Event]:
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass
        return events

    def wait() -> Sequence[Event]:
        time.sleep(0.2)
        return events

    idle, working, waiting = (
        measure(closed(read), rank=0, backend="nccl").report_cpu_ms for read in (lambda: events, work, wait)
    )
    assert idle > 0
    assert waiting < working
    assert working >= 200


def test_a_profile_that_cannot_be_read_loses_only_kernel_times() -> None:
    def fail() -> Sequence[Event]:
        raise RuntimeError("no trace")

    found = measure(closed(fail), rank=0, backend="nccl")
    assert found.problems == ("kernel times are missing: the profile cannot be read (RuntimeError: no trace) [OC360]",)
    assert (found.profiled, found.num_steps) == ((), 8)


def test_pictures_hold_the_kernels_of_a_step_of_each_mode_with_the_sizes_of_their_collectives() -> None:
    found = measured(whole())
    assert [picture.mode for picture in found.pictures] == [Mode.OVERLAPPED, Mode.SEQUENTIAL]
    size = max(LOG.collectives[0].bytes_in, LOG.collectives[0].bytes_out)
    for picture in found.pictures:
        assert picture.detail is not None
        detail = picture.detail
        named = f"all_reduce 1 of 1: {ALL_REDUCE}"  # without a framework's name by its place
        assert set(detail.names) == {"gemm", named}
        assert {(detail.names[name], size_bytes) for name, *_, size_bytes in detail.slices} == {
            ("gemm", 0), (named, size)
        }  # fmt: skip
        assert len([name for name, *_ in detail.slices if not detail.communication[name]]) == KERNELS
        assert (detail.left_out, detail.start_ns) == (0, 0)
