"""Jobs whose figures cannot be trusted, in one process: each report is invalid, or says what is wrong."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import OverlapReport
from tests.distributed import run_alone
from tests.gpu import jobs
from tests.gpu.loopback import LoopJob, LoopSettings, Move, open_job
from tests.gpu.loopback.device_link import DeviceLink, available
from tests.gpu.loopback.runs import ONE_WINDOW, Keep, train
from tests.gpu.machine import ON_CPU

HAS_CPU_FORM = True
RANKS_LOAD = ("tests.gpu.loopback.runs",)
LINK = LoopSettings("cpu", gb_s=0.02) if ON_CPU else LoopSettings("cuda", ctas=24, gb_s=4.0)

pytestmark = pytest.mark.skipif(not (ON_CPU or available()), reason="there is no nvcc, and no compiled library")
on_gpu = pytest.mark.skipif(ON_CPU, reason="no accelerator")

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


# -- with a CPU form


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
    assert not report.valid or report.problems
    assert report.e2e_sequential_ms is None or not report.valid


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


# -- on a GPU only


def _second_stream() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> Callable[[], None]:
        side, a = torch.cuda.Stream(), torch.randn(4096, 4096, device=loop.device)

        def work() -> None:  # which nothing of the step waits for
            with torch.cuda.stream(side):
                for _ in range(20):
                    a @ a

        return work

    return _report("ddp", before)


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


def _coalesced_with_device() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> Callable[[], None]:
        parts = [torch.zeros(2**20, device=loop.device) for _ in range(4)]

        def work() -> None:
            manager = dist.distributed_c10d._coalescing_manager
            with manager(None, device=loop.device, async_ops=True) as block:
                for part in parts:
                    dist.all_reduce(part)
            block.wait()

        return work

    return _report("ddp", before)


@on_gpu
@pytest.mark.parametrize("job", [_second_stream, _graph_replay, _coalesced_with_device], ids=lambda job: job.__name__)
def test_what_the_gate_cannot_keep_apart_is_noticed(job: Callable[[], OverlapReport]) -> None:
    report: OverlapReport = run_alone(job, timeout_s=240)
    assert not report.valid or report.problems


def _optimizer_in_backward() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> None:
        inner = {p: torch.optim.SGD([p], lr=1e-4, momentum=0.9) for p in job.model.parameters()}

        def update(parameter: Any) -> None:
            inner[parameter].step()
            inner[parameter].zero_grad()

        for parameter in inner:
            parameter.register_post_accumulate_grad_hook(update)
        assert isinstance(job, jobs._Torch)
        unused = nn.Parameter(torch.zeros(1, device=loop.device))
        unused.grad = torch.zeros_like(unused)
        job.optimizer = torch.optim.SGD([unused], lr=0.0)

    return _report("fsdp2", before)


@on_gpu
def test_an_optimizer_in_the_backward_pass_of_fsdp2_is_kept_apart_or_noticed() -> None:
    report: OverlapReport = run_alone(_optimizer_in_backward, timeout_s=240)
    residual = report.residual_overlap
    assert not report.valid or report.problems or (residual is not None and residual.value < 0.02)


def _overflow() -> OverlapReport:
    def before(loop: LoopJob, job: jobs.Job) -> Callable[[], None]:
        tiny = torch.zeros(1, device=loop.device)

        def work() -> None:
            for _ in range(60_000):
                tiny.neg_()

        return work

    return _report("ddp", before)


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
    with _cupti_taken():
        return _report("ddp")


@on_gpu
@pytest.mark.parametrize("job", [_overflow, _subscribed], ids=lambda job: job.__name__)
def test_a_profile_that_is_not_whole_gives_no_figures_of_kernels(job: Callable[[], OverlapReport]) -> None:
    report: OverlapReport = run_alone(job, timeout_s=300)
    assert _no_kernel_figures(report)
    assert report.problems
