"""Arms on a GPU: what each does to a step, and that the job and its weights are as they were."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from gpu_steps import figures
from gpu_steps.figures import Recorder
from gpu_steps.loop_jobs import Trained, trained, value
from gpu_steps.simulated import ON_SIMULATED_GPU, shared
from overlap_callbacks import Sink, arms
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.gate.arms import BaseArm

# Steps after DDP's buckets have settled, and those of one window with what follows it.
_WARM_UP, _AFTER = 5, 2
_WINDOW: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 1_000,
    "first_step": _WARM_UP,
    "repeats": 4,
    "profiled_steps": 4,
}

# Of each job: its arms, and whether a CPU has what they turn.
ARMS: tuple[tuple[str, str, Callable[[], BaseArm], bool], ...] = (
    ("ddp", "native", arms.Native, True),
    ("ddp", "carve-out of 24 SMs", lambda: arms.SmCarveout(24), False),
    ("ddp", "TF32", arms.AllowTF32, False),
    ("fsdp2", "native", arms.Native, True),
    ("fsdp2", "prefetch of 2", lambda: arms.Prefetch(forward=2, backward=2), True),
    ("fsdp2", "no reshard", lambda: arms.Reshard(False), True),
)


class _Kept(Sink):
    def __init__(self) -> None:
        self.arms: list[ArmReport] = []

    def log(self, report: Any) -> None:
        pass

    def log_arm(self, report: ArmReport) -> None:
        self.arms.append(report)


def run(record: Recorder) -> None:
    for kind, name, make, has_cpu_form in ARMS:
        if has_cpu_form or not record.on_cpu:
            _try(record, kind, name, make)


def _try(record: Recorder, kind: str, name: str, make: Callable[[], BaseArm]) -> None:
    kept = _Kept()
    with trained(kind, record.on_cpu) as job:
        before = _torch_switches()
        arm = make()
        monitor = job.attach(sinks=[kept], arms=[arm], **_WINDOW)
        steps = monitor.schedule.first_step + monitor.schedule.window_steps + _AFTER
        with monitor:
            job.train(steps)
            monitor.close(60)
        after, with_arm = _torch_switches(), _digest(job)
    with trained(kind, record.on_cpu) as job:
        job.train(steps)
        without = _digest(job)
    report: ArmReport = shared(kept.arms[0] if kept.arms else None)
    title = f"{kind}, {name}"
    values = {key: value(getattr(report, key)) for key in ("speedup", "step_ms", "configured_step_ms", "comm_ms")}
    record.raw(title, {**values, "problems": report.problems})
    record.figure(f"{title}: a complete window", report.complete, expect=figures.YES)
    record.figure(f"{title}: speed-up against the job as configured", values["speedup"])
    record.figure(f"{title}: torch's switches are as before", after == before, expect=figures.YES)
    if arm.equal_results and not ON_SIMULATED_GPU:  # which computes no weights
        record.figure(
            f"{title}: weights are bit-identical", with_arm == without,
            proves="the arm changes no result, as it says", expect=figures.YES,
        )  # fmt: skip


def _torch_switches() -> tuple[object, ...]:
    precision = torch.get_float32_matmul_precision()
    return torch._C._get_sm_carveout_experimental(), precision, torch.backends.cudnn.allow_tf32


def _digest(job: Trained) -> str:
    digest = hashlib.sha256()
    for parameter in job.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # a shard of FSDP2's
        digest.update(local.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
