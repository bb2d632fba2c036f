"""Jobs whose figures cannot be trusted, in one process: each report says what is wrong.

On a CPU the same cases run in their CPU form. Where the fault is in what the job does, the job does it on a CPU too: a
coalescing block with a device, an optimizer in the backward pass. Where only the profile of a device can show it (a
second stream, a replayed graph, full buffers, CUPTI taken), the job is real and its profile's events are written by
hand, with that fault: see ``tests/gpu/loopback/device_profile.py``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import OverlapReport
from overlap_callbacks.experiments.loopback.device_link import DeviceLink, available
from tests.distributed import run_alone
from tests.gpu import jobs
from tests.gpu.loopback import LoopJob, LoopSettings, Move, device_profile, open_job
from tests.gpu.loopback.runs import ONE_WINDOW, Keep, train
from tests.gpu.machine import ON_CPU

HAS_CPU_FORM = True
RANKS_LOAD = ("tests.gpu.loopback.runs",)
LINK = LoopSettings("cpu", gb_s=0.02) if ON_CPU else LoopSettings("cuda", ctas=24, gb_s=4.0)

pytestmark = pytest.mark.skipif(not (ON_CPU or available()), reason="there is no nvcc, and no compiled library")

Before = Callable[[LoopJob, jobs.Job], Callable[[], None] | None]


def _report(
    kind: str, before: Before | None = None, phantom: bool = True, window: dict[str, Any] | None = None
) -> OverlapReport:
    """The report of one window.

    Args:
        kind: of the job.
        before: is called before the window, and returns what each step does first.
        phantom: whether the phantom speaks.
        window: other options.
    """
    kept = Keep()
    with open_job(LINK, phantom=phantom) as loop, jobs.job(0, kind) as job:
        first = None if before is None else before(loop, job)
        if first is not None:
            usual = job.forward_backward

            def forward_backward() -> None:
                first()
                usual()

            job.forward_backward = forward_backward  # type: ignore[method-assign]
        options = {**ONE_WINDOW, **(window or {})}
        with job.attach(sinks=[kept], **options) as monitor:
            train(loop, job, options["first_step"] + monitor.schedule.window_steps + 2, monitor)
    (report,) = kept.reports
    return report


def _no_kernel_figures(report: OverlapReport) -> bool:
    return report.comm_ms is None and report.compute_ms is None and report.overlap_ratio is None


def _on_device(job: Callable[[], OverlapReport], fault: device_profile.Fault) -> OverlapReport:
    """The report of a job; on a CPU that of a plain one, whose profile shows what this fault does to a device's."""
    if not ON_CPU:
        return job()
    with device_profile.device_profile(fault):
        return _report("ddp")


def _says(report: OverlapReport, words: str) -> bool:
    return any(words in problem for problem in report.problems)


# -- what the job tells by itself


def _chat() -> OverlapReport:
    ending = threading.Event()

    def before(loop: LoopJob, job: jobs.Job) -> None:
        group, tensor = dist.new_group([0, 1]), torch.ones(20_000 if ON_CPU else 2**22, device=loop.device)

        def chat() -> None:
            stream = None if ON_CPU else torch.cuda.Stream()
            while not ending.is_set():
                with torch.cuda.stream(stream):  # of its own: training waits for nothing of this
                    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
                    work.wait()
                if stream is not None:
                    stream.synchronize()

        threading.Thread(target=chat, daemon=True).start()
        loop_close = loop.link.close

        def close() -> None:
            ending.set()
            loop_close()

        loop.link.close = close  # type: ignore[method-assign]

    return _report("ddp", before)


@pytest.mark.slow
def test_another_thread_that_communicates_all_the_time_makes_the_report_invalid() -> None:
    report: OverlapReport = run_alone(_chat, timeout_s=120)
    assert not report.valid
    assert report.problems


def _none() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> None:
        job.model = job.model.module  # type: ignore[assignment]

    return _report("ddp", before)


def test_a_job_that_does_not_communicate_is_not_compared() -> None:
    report: OverlapReport = run_alone(_none, timeout_s=120)
    assert report.e2e_sequential_ms is None
    assert _says(report, "no collective")


def _profiled_by_another() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> None:
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()

    return _report("ddp", before)


def test_a_profiler_of_the_users_costs_the_kernel_times_and_is_named() -> None:
    report: OverlapReport = run_alone(_profiled_by_another, timeout_s=120)
    assert _no_kernel_figures(report)
    assert report.e2e_sequential_ms is not None
    assert any("another profiler" in problem for problem in report.problems)


def _silent() -> OverlapReport:
    return _report("ddp", phantom=False, window={"order_timeout_s": 1.0, "report_timeout_s": 1.0})


def test_a_rank_that_says_nothing_ends_the_window_and_no_step_is_made_sequential() -> None:
    report: OverlapReport = run_alone(_silent, timeout_s=120)
    assert not report.complete
    assert report.ranks == (0,)
    assert report.e2e_sequential_ms is None
    assert any("rank 1 did not report the order" in problem for problem in report.problems)


# -- what the gate cannot keep apart

# The name of the kernel of torch.cuda._sleep. It is none of the training's.
ASIDE = "spin_kernel"


def _second_stream() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> None:
        side = torch.cuda.Stream()

        def work(*_: Any) -> None:  # beside the backward pass, which does not wait for it
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)  # some 10 ms: longer than until the first all-reduce, less than a step

        job.model.register_forward_hook(work)

    return _report("ddp", before)


def _compute_on_a_second_stream() -> OverlapReport:
    return _on_device(_second_stream, device_profile.second_stream(f"at::cuda::{ASIDE}(long)"))


def test_compute_on_a_second_stream_is_named() -> None:
    report: OverlapReport = run_alone(_compute_on_a_second_stream, timeout_s=240)
    (problem,) = [problem for problem in report.problems if "sequential steps compute ran during" in problem]
    assert ASIDE in problem


def _graph_replay() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> Callable[[], None]:
        assert isinstance(loop.link, DeviceLink)
        link, tensor = loop.link, torch.ones(2**22, device=loop.device)
        link.launch("all_reduce", [Move(tensor, tensor)], ctas=24, length_ns=0)  # loads the kernels
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=side):
            link.launch("all_reduce", [Move(tensor, tensor)], ctas=24, length_ns=5_000_000)

        def work() -> None:
            with torch.cuda.stream(side):
                graph.replay()

        return work

    return _report("ddp", before)


def _collectives_of_a_graph() -> OverlapReport:
    return _on_device(_graph_replay, device_profile.graph_replay)


def test_collectives_of_a_replayed_graph_are_counted() -> None:
    report: OverlapReport = run_alone(_collectives_of_a_graph, timeout_s=240)
    assert _says(report, "communication kernels come from CUDA graphs, which the gate cannot serialise")


def _coalesced_with_device() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> Callable[[], None]:
        parts = [torch.zeros(2**12 if ON_CPU else 2**20, device=loop.device) for _ in range(4)]

        def work() -> None:
            manager = dist.distributed_c10d._coalescing_manager
            with manager(None, device=loop.device, async_ops=True) as block:
                for part in parts:
                    dist.all_reduce(part)
            block.wait()

        return work

    return _report("ddp", before)


def test_a_coalescing_block_with_a_device_is_named() -> None:
    report: OverlapReport = run_alone(_coalesced_with_device, timeout_s=240)
    assert _says(report, "were not serialised: they were in a coalescing block")


def _optimizer_in_backward() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> None:
        inner = {p: torch.optim.SGD([p], lr=1e-4, momentum=0.9) for p in job.model.parameters()}

        def update(parameter: Any) -> None:
            inner[parameter].step()
            inner[parameter].zero_grad()

        for parameter in inner:
            parameter.register_post_accumulate_grad_hook(update)
        assert isinstance(job, jobs.TorchJob)
        unused = nn.Parameter(torch.zeros(1, device=loop.device))
        unused.grad = torch.zeros_like(unused)
        job.optimizer = torch.optim.SGD([unused], lr=0.0)

    return _report("fsdp2", before)


def test_an_optimizer_in_the_backward_pass_of_fsdp2_is_kept_apart_or_named() -> None:
    report: OverlapReport = run_alone(_optimizer_in_backward, timeout_s=240)
    residual = report.residual_overlap
    assert residual is not None
    assert residual.value < 0.02 or _says(report, "compute ran during communication")


# -- profiles that are not whole


def _whole_profile() -> OverlapReport:
    return _on_device(lambda: _report("ddp"), device_profile.whole)


def test_a_whole_profile_of_a_device_has_nothing_to_be_said() -> None:
    report: OverlapReport = run_alone(_whole_profile, timeout_s=240)
    assert report.valid, report.problems
    assert not [problem for problem in report.problems if "kernel" in problem or "profile" in problem]
    assert not _no_kernel_figures(report)


_MANY = 150_000


def _overflow() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> Callable[[], None]:
        tiny = torch.zeros(1, device=loop.device)

        def work() -> None:
            # Of some 270 bytes each, in the 8 steps of the profile: twice of the 128 MiB that may be in flight.
            for _ in range(_MANY):
                tiny.neg_()

        return work

    return _report("ddp", before, window={"repeats": 1})


def _too_many_kernels() -> OverlapReport:
    return _on_device(_overflow, device_profile.cut_off)


def test_a_profile_of_very_many_kernels_is_whole_or_gives_no_figures_and_it_is_said() -> None:
    """Kineto's limit is on what is in flight, since torch 2.13; before, there is none."""
    report: OverlapReport = run_alone(_too_many_kernels, timeout_s=300)
    if any(kernel.overlapped_calls == kernel.sequential_calls == _MANY for kernel in report.kernels):
        return
    assert _no_kernel_figures(report)
    # Kineto says so since torch 2.13. Else the kernels of the last steps, which are missing, tell.
    full, ends = "the profiler's buffers were full", "the profile ends before its last step does"
    assert _says(report, f"kernel times are missing: {full}") or _says(report, f"kernel times are missing: {ends}")


@contextmanager
def _cupti_taken() -> Iterator[None]:
    """CUPTI, which has one subscriber at a time, has one that wants nothing."""
    torch.cuda.init()
    version = str(torch.version.cuda).split(".", maxsplit=1)[0]
    cupti = ctypes.CDLL(f"libcupti.so.{version}")  # torch has loaded it: it is found by its name
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)(lambda *_: None)
    subscriber = ctypes.c_void_p()
    assert cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None) == 0
    try:
        yield
    finally:
        cupti.cuptiUnsubscribe(subscriber)


def _subscribed() -> OverlapReport:
    with nullcontext() if ON_CPU else _cupti_taken():
        return _on_device(lambda: _report("ddp"), device_profile.no_kernels)


def test_a_profile_beside_another_user_of_cupti_is_whole_or_gives_no_figures_and_it_is_said() -> None:
    report: OverlapReport = run_alone(_subscribed, timeout_s=300)
    if _no_kernel_figures(report):
        assert _says(report, "kernel times are missing: the profiler saw no kernels of the device; another CUPTI user")
    else:  # versions of CUPTI that record for several
        assert not ON_CPU
        assert report.valid, report.problems
        assert not [problem for problem in report.problems if "kernel" in problem or "profile" in problem]
