"""A job whose device waits for the host: what sequential steps cost the host must not pass for communication."""

from __future__ import annotations

import statistics

from gpu_steps import figures
from gpu_steps.figures import Recorder
from gpu_steps.loop_jobs import Size, trained, value
from gpu_steps.loopback import on_gpu, summary
from overlap_callbacks import Mode, OverlapReport


def run(record: Recorder) -> None:
    # Kernels of a few microseconds, less than what it takes to launch them.
    size = Size(32, 8, 8, 0.01, 10.0) if record.on_cpu else Size(128, 200, 64, 1.0, 100.0)
    for kind in ("ddp", "fsdp2"):
        with trained(kind, record.on_cpu, size=size) as job:
            job.train(3)
            report = job.window()
        record.raw(f"{kind}, report", summary(report))
        check(record, kind, report)


def check(record: Recorder, kind: str, report: OverlapReport) -> None:
    overlapped, sequential = value(report.e2e_overlapped_ms), value(report.e2e_sequential_ms)
    record.figure(f"{kind}: a complete report", report.complete, expect=figures.YES)
    record.figure(f"{kind}: overlapped step", overlapped, "ms")
    record.figure(f"{kind}: sequential step", sequential, "ms")
    idle_ms = {mode: idle(report, mode) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL)}
    for mode, found_ms in idle_ms.items():
        record.figure(f"{kind}: idle in {mode.value} steps", found_ms, "ms")
    messages = sum(collective.messages for collective in report.collectives)
    if overlapped is not None and sequential is not None and messages:
        record.figure(
            f"{kind}: longer sequential step, for each of {messages} collectives",
            1e3 * (sequential - overlapped) / messages, "us",
            proves="what serialising costs a host-bound step, kernels of the link included",
        )  # fmt: skip
    ov_ms, seq_ms = idle_ms[Mode.OVERLAPPED], idle_ms[Mode.SEQUENTIAL]
    if record.on_cpu or sequential is None or ov_ms is None or seq_ms is None:
        return
    waits = seq_ms - ov_ms > 0.02 * sequential
    said = any("host" in problem for problem in report.problems)
    record.figure(
        f"{kind}: is it said where sequential steps wait for the host", said or not waits,
        proves="a speedup that comes from the host's waits is marked", expect=on_gpu(record, figures.YES),
    )  # fmt: skip


def idle(report: OverlapReport, mode: Mode) -> float | None:
    """Idle time of a profiled step of one mode, ms; None without a profile."""
    blocks = [block.idle_ms for rank in report.samples for block in rank.profiled if block.mode is mode]
    return statistics.mean(blocks) if blocks else None
