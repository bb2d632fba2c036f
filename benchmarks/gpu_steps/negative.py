"""Jobs whose sequential steps are not sequential, or whose profile is no good: each must end invalid or noted.

Each case runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpu_steps import figures, overflow
from gpu_steps.figures import Recorder
from gpu_steps.loop_jobs import Trained, trained, value
from gpu_steps.loopback import summary
from gpu_steps.runner import Step, run_step
from overlap_callbacks import OverlapReport
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from tests.gpu import not_simulated
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

# Of each case: its function, what it shows, and whether it has a CPU form.
CASES = {
    "second_stream": ("compute on a second stream of the user's", False),
    "graph_replay": ("collectives in a CUDA graph that is replayed", False),
    "optimizer_in_backward": ("FSDP2 with the optimizer in the backward pass", True),
    "coalesced_with_device": ("a coalescing block that is given its device", True),
    "too_many_kernels": ("more kernels than the profiler keeps", False),
    "cupti_taken": ("another tool has taken CUPTI", False),
}
_CASE_S = 85
# Launches of a small kernel in each step.
_MANY = 150_000


def run(record: Recorder) -> None:
    for name, (title, has_cpu_form) in CASES.items():
        if record.on_cpu and not has_cpu_form:
            continue
        if ON_SIMULATED_GPU and (why := not_simulated.STEPS.get(f"negative: {name}")):
            record.raw(f"{title}: why it is missing", why)
            continue
        print(f"-- {title}", flush=True)
        step = Step(name, f"gpu_steps.negative:{name}", title, _CASE_S, simulated_ranks=2)
        case = run_step(step, on_cpu=record.on_cpu, own_group=False)
        record.raw(title, case.raw | {"error": case.error, "output": list(case.output)})
        known = name == "too_many_kernels" and overflow.is_known_fault(case.error)
        record.figure(
            f"{title}: ran to its end", not case.error,
            proves=overflow.KNOWN_FAULT if known else case.error, expect=None if known else figures.YES,
        )  # fmt: skip
        for figure in case.figures:
            record.copy(figure)


def judge(record: Recorder, title: str, report: OverlapReport, *, kernels_wanted: bool | None = None) -> None:
    """A report must be invalid, or say what is wrong; or what is wrong has been set right.

    Args:
        record: takes the figures.
        title: of the case.
        report: of its window.
        kernels_wanted: False if a figure of kernels would be a wrong number.
    """
    record.raw("report", summary(report))
    residual = value(report.residual_overlap)
    said = not report.valid or bool(report.problems)
    apart = residual is not None and residual < 0.02 and value(report.comm_isolated_ms) not in (None, 0.0)
    record.figure(f"{title}: valid", report.valid)
    record.figure(f"{title}: residual overlap", residual, "of compute")
    record.figure(f"{title}: first problem", report.problems[0] if report.problems else "none")
    allowed = said if kernels_wanted is False else said or apart
    record.figure(
        f"{title}: invalid or noted" + ("" if kernels_wanted is False else ", or kept apart after all"), allowed,
        proves="the user reads that these figures do not count", expect=None if record.on_cpu else figures.YES,
    )  # fmt: skip
    if kernels_wanted is False:
        record.figure(
            f"{title}: no figure of kernels", report.compute_ms is None and report.comm_ms is None,
            proves="nothing is published from such a profile", expect=None if record.on_cpu else figures.YES,
        )  # fmt: skip


def second_stream(record: Recorder) -> None:
    """A product on a stream of the user's, which waits for nothing but the start of the step."""
    with trained("ddp", record.on_cpu) as job:
        side, a = torch.cuda.Stream(), torch.randn(4096, 4096, device=job.link.device)
        usual = job.step

        def step() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(40):
                    a @ a
            usual()
            torch.cuda.current_stream().wait_stream(side)

        job.step = step
        job.train(3)
        judge(record, CASES["second_stream"][0], job.window())


def graph_replay(record: Recorder) -> None:
    """A step whose collective and product are captured, on two streams, and replayed."""
    with trained("ddp", record.on_cpu) as job:
        a = torch.randn(4096, 4096, device=job.link.device)
        gradient = torch.zeros(16 * 2**20, device=job.link.device)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def captured() -> None:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                dist.all_reduce(gradient)  # synchronous: on the side stream itself
            for _ in range(8):
                a @ a
            current.wait_stream(side)

        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            captured()
        torch.cuda.current_stream().wait_stream(warm)
        with torch.cuda.graph(graph):
            captured()
        usual = job.step

        def step() -> None:
            graph.replay()
            usual()

        job.step = step
        job.train(3)
        judge(record, CASES["graph_replay"][0], job.window())


def optimizer_in_backward(record: Recorder) -> None:
    """Each shard is updated as soon as its gradient is reduced, on the stream that reduced it."""
    with trained("fsdp2", record.on_cpu) as job:
        inner = {p: torch.optim.SGD([p], lr=1e-4, momentum=0.9, foreach=False) for p in job.model.parameters()}

        def update(parameter: Any) -> None:
            inner[parameter].step()
            inner[parameter].zero_grad()

        for parameter in inner:
            parameter.register_post_accumulate_grad_hook(update)
        # What is left for the optimizer that ends the step: a parameter of no importance.
        last = torch.nn.Parameter(torch.zeros(1, device=job.link.device))
        last.grad = torch.zeros_like(last)
        job.optimizer = torch.optim.SGD([last], lr=0.0)

        def step() -> None:
            job.model(job.data).square().mean().backward()
            job.optimizer.step()

        job.step = step
        job.train(3)
        judge(record, CASES["optimizer_in_backward"][0], job.window())


def coalesced_with_device(record: Recorder) -> None:
    """Gradients that are reduced in one block, opened with its device, beside a product."""
    with trained("ddp", record.on_cpu) as job:
        parts = [torch.zeros(2**10 if record.on_cpu else 2**22, device=job.link.device) for _ in range(4)]
        usual = job.step

        def step() -> None:
            with dist.distributed_c10d._coalescing_manager(None, device=job.link.device, async_ops=True) as block:
                for part in parts:
                    dist.all_reduce(part)
            usual()
            block.wait()

        job.step = step
        job.train(3)
        judge(record, CASES["coalesced_with_device"][0], job.window())


def too_many_kernels(record: Recorder) -> None:
    """Steps of so many kernels that CUPTI's buffers may be full before the window's profile ends.

    Kineto's limit is on what is in flight, since torch 2.13; before, there is none. So the profile may be whole: then
    it has each of the kernels that the job launched.
    """
    with trained("ddp", record.on_cpu) as job:
        tiny = torch.zeros(1, device=job.link.device)

        def work() -> None:
            # Of some 270 bytes each, in the 8 steps of the profile: twice of the 128 MiB that may be in flight.
            for _ in range(_MANY):
                tiny.neg_()

        add_to(job, work)
        title = CASES["too_many_kernels"][0]
        report = job.window(repeats=1, steps_per_block=1, warmup_steps=1, profiled_steps=2)
    whole = is_whole(report.kernels, _MANY)
    record.figure(f"{title}: the profile has all of them", whole)
    judge(record, title, report, kernels_wanted=None if whole else False)


def is_whole(kernels: Sequence[KernelTime], launched: int) -> bool:
    """Whether a kernel has as many calls in the steps of both modes as the job launched."""
    return any(kernel.overlapped_calls == kernel.sequential_calls == launched for kernel in kernels)


def cupti_taken(record: Recorder) -> None:
    """CUPTI has a subscriber before the first profile."""
    record.raw("cuptiSubscribe returned", overflow.subscribe())
    with trained("ddp", record.on_cpu) as job:
        job.train(3)
        report = job.window()
    # Versions of CUPTI that record for several give a whole profile: then its figures are right.
    whole = report.valid and value(report.comm_ms) is not None
    record.figure(f"{CASES['cupti_taken'][0]}: the profile was recorded all the same", whole)
    judge(record, CASES["cupti_taken"][0], report, kernels_wanted=None if whole else False)


def add_to(job: Trained, work: Callable[[], Any]) -> None:
    """Have every step of a job do ``work`` first."""
    usual = job.step

    def step() -> None:
        work()
        usual()

    job.step = step
