"""DDP and FSDP2 on a link of known length: what the library reports against what is known to be true.

A single GPU has no NVLink and no second rank: how NCCL itself contends with compute stays unknown. On the simulated GPU
two ranks talk, and compute beside them takes 1.3 times as long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpu_steps import figures
from gpu_steps.figures import Recorder
from gpu_steps.loop_jobs import Size, Trained, beside_communication, trained, value
from gpu_steps.simulated import ON_SIMULATED_GPU
from overlap_callbacks import Mode, OverlapReport
from tests.gpu.loopback.by_hand import slowdown_by_hand, tolerance

CTAS = (8, 24, 66)


def ddp(record: Recorder) -> None:
    check(record, "ddp")


def fsdp2(record: Recorder) -> None:
    check(record, "fsdp2")


def check(record: Recorder, kind: str) -> None:
    with trained(kind, record.on_cpu) as job:
        job.train(3)
        check_window(record, kind, job)
        check_raw_kernels(record, kind, job)
        check_control(record, kind, job)


def slowdown(record: Recorder) -> None:
    with trained("ddp", record.on_cpu) as job:
        if ON_SIMULATED_GPU and not record.on_cpu:
            check_slowdown(record, 16, job)
            return
        for ctas in CTAS:
            job.link.settings = replace(job.link.settings, ctas=ctas)
            check_slowdown(record, ctas, job)


def on_gpu(record: Recorder, expectation: figures.Expectation) -> figures.Expectation | None:
    """What is expected on a GPU only: on a CPU with other tenants times tell nothing."""
    return None if record.on_cpu else expectation


def check_window(record: Recorder, kind: str, job: Trained) -> None:
    """One window's report against the truth."""
    known_ms = job.known_ms()
    report = job.window()
    record.raw(f"{kind}, report", summary(report))

    def figure(name: str, found: Any, unit: str, proves: str, expect: figures.Expectation) -> None:
        record.figure(f"{kind}: {name}", found, unit, proves=proves, expect=on_gpu(record, expect))

    record.figure(f"{kind}: a complete report", report.complete, proves="a window runs to its end", expect=figures.YES)
    figure("valid", report.valid, "", "sequential steps are judged to be sequential", figures.YES)
    figure("residual overlap", value(report.residual_overlap), "of compute", "compute and communication are kept apart",
           figures.below(0.02))  # fmt: skip
    compute_ms, comm_ms = value(report.compute_busy_isolated_ms), value(report.comm_isolated_ms)
    sequential_ms = value(report.e2e_sequential_ms)
    whole = None if None in (compute_ms, comm_ms, sequential_ms) else sequential_ms / (compute_ms + comm_ms)
    figure("sequential step / (compute + communication)", whole, "", "a sequential step is the one, then the other",
           figures.near(1.0, 0.02))  # fmt: skip
    figure("sequential model error", value(report.sequential_model_error), "", "equation 5 predicts the measured step",
           figures.Expectation("within 0.02 of 0", lambda error: abs(error) < 0.02))  # fmt: skip
    figure("communication alone / known length", None if comm_ms is None else comm_ms / known_ms, "",
           "the profile's communication is all of it, at its true length", figures.near(1.0, 0.02))  # fmt: skip
    figure("overlap ratio", value(report.overlap_ratio), "of compute", "the overlapped steps did overlap",
           figures.above(0.02))  # fmt: skip
    figure("launch shapes read", any(kernel.num_blocks for kernel in report.kernels), "",
           "grids are read from a live profile", figures.YES)  # fmt: skip


def check_raw_kernels(record: Recorder, kind: str, job: Trained) -> None:
    """Interval algebra on the kernels themselves, without the library's figures."""
    sequential = beside_communication(job.raw_profile(Mode.SEQUENTIAL))
    overlapped = beside_communication(job.raw_profile(Mode.OVERLAPPED))
    record.raw(f"{kind}, compute beside communication in sequential steps, us by kernel", sequential)
    record.raw(f"{kind}, compute beside communication in overlapped steps, us by kernel", overlapped)
    record.figure(
        f"{kind}: kinds of compute kernels beside communication in sequential steps", len(sequential),
        proves="no compute kernel runs beside a communication kernel; which did is under raw",
        expect=on_gpu(record, figures.equal(0)),
    )  # fmt: skip
    record.figure(
        f"{kind}: the same in overlapped steps", len(overlapped),
        proves="the check above can see overlap", expect=on_gpu(record, figures.above(0)),
    )  # fmt: skip


def check_control(record: Recorder, kind: str, job: Trained) -> None:
    """A window with both sides overlapped."""
    report = job.window(control=True)
    for name in ("speedup_vs_sequential", "compute_slowdown"):
        found = getattr(report, name)
        interval = None if found is None or found.ci_low is None else (found.ci_low, found.ci_high)
        record.figure(
            f"{kind}: A/A, 95 % interval of {name}", interval,
            proves="no difference is reported where there is none (one interval in twenty may miss zero)",
            expect=on_gpu(record, figures.contains_zero()),
        )  # fmt: skip


def check_slowdown(record: Recorder, ctas: int, job: Trained) -> None:
    """The slowdown that the report gives matrix products while all-reduces run, against one measured by hand.

    By hand, all of each product runs beside them. In the job a part of some does, so the slowdown of whole products is
    less.
    """
    job.train(3)
    report = job.window()
    record.raw(f"{ctas} CTAs, report", summary(report))
    pairs = [pair for pair in report.pairs if pair.kernel_family == "gemm" and pair.concurrent_with == "all_reduce"]
    found = pairs[0].slowdown_during if pairs else None
    if record.on_cpu:
        record.figure(f"{ctas} CTAs: gemm during all_reduce, as reported", found)
        return
    size = Size.usual(on_cpu=False)
    bucket = torch.zeros(int(size.bucket_mib * 2**20 / 4), device=job.data.device)
    by_hand = slowdown_by_hand(job.data, bucket)
    allowed = tolerance(by_hand)
    record.figure(f"{ctas} CTAs: gemm during all_reduce, by hand", by_hand, "slower")
    record.figure(
        f"{ctas} CTAs: gemm during all_reduce, as reported", found, "slower",
        proves="an injected contention is reported at its true size",
        expect=figures.Expectation(
            f"{by_hand:.3f} within {allowed:.3f}", lambda reported: abs(reported - by_hand) < allowed
        ),
    )  # fmt: skip


def summary(report: OverlapReport) -> dict[str, Any]:
    """The parts of a report that are kept under raw."""
    return {
        "valid": report.valid,
        "problems": list(report.problems),
        "figures": {name: [e.value, e.ci_low, e.ci_high] for name, e in report.figures().items()},
        "pairs": [[p.kernel_family, p.concurrent_with, p.calls, p.time_ms, p.alone_ms] for p in report.pairs],
        "collectives": [[c.operator, c.messages, c.bytes_in, c.isolated_ms] for c in report.collectives],
        "kernels": [[k.name, k.overlapped_ms, k.sequential_ms, k.num_blocks] for k in report.kernels[:20]],
    }
