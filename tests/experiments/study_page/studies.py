"""Studies made by hand, for tests and pictures: figures that a small model of a job gives, with intervals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.study import Configuration, StudyFigures, StudyRow, StudyStart

STEPS, BLOCKS = 16, 8
GPU = "NVIDIA H100 80GB HBM3"
CPU = "AMD EPYC 7B13"


def estimate(value: float, half: float | None = 0.01) -> Estimate:
    """A figure with a symmetric interval; without any where ``half`` is None."""
    if half is None:
        return Estimate(value, None, None, STEPS, 2)
    return Estimate(value, value - half, value + half, STEPS, BLOCKS)


def configuration(model: str = "gpt3-xl", strategy: str = "fsdp2", batch: int = 4, **more: object) -> Configuration:
    return Configuration(model=model, strategy=strategy, batch=batch, **{"precision": "bf16", **more})  # type: ignore[arg-type]


def figures(
    slowdown: float | None = 0.12,
    longer: float | None = 0.1,
    *,
    step_ms: float = 300.0,
    half: float | None = 0.01,
    ratio: float = 0.4,
    mean_w: float | None = None,
    has_tdp: bool = True,
) -> StudyFigures:
    """Figures of one configuration.

    Args:
        slowdown: of compute; None without a profile.
        longer: how much longer sequential steps take; None where they were not timed.
        step_ms: of an overlapped step.
        half: half the width of the intervals of slowdown and longer; None without.
        ratio: overlap ratio.
        mean_w: mean power with overlap; None without a sensor.
        has_tdp: whether the device reports its limit.
    """
    relative = None if half is None else half * step_ms
    values = {"overlap/e2e_overlapped_ms": estimate(step_ms, relative)}
    if longer is not None:
        values["overlap/speedup_vs_sequential"] = estimate(longer, half)
        values["overlap/e2e_sequential_ms"] = estimate(step_ms * (1 + longer), relative)
    if slowdown is not None:
        gap = 0.7 * slowdown
        values["overlap/compute_slowdown"] = estimate(slowdown, half)
        values["overlap/overlap_ratio"] = estimate(ratio, half)
        values["overlap/gap_to_ideal"] = estimate(gap, half)
        values["overlap/e2e_ideal_ms"] = estimate(step_ms / (1 + gap), relative)
    if mean_w is not None:
        for mode, share in (("overlapped", 1.0), ("sequential", 0.93)):
            values[f"power/{mode}_avg_w"] = estimate(mean_w * share, 4)
            values[f"power/{mode}_peak_w"] = estimate(mean_w * (1.18 if mode == "overlapped" else 1.02), 6)
            values[f"power/{mode}_energy_per_step_j"] = estimate(mean_w * share * step_ms / 1000, 1)
            if has_tdp:
                values[f"power/{mode}_avg_tdp_fraction"] = estimate(mean_w * share / 700, 0.006)
                peak = mean_w * (1.18 if mode == "overlapped" else 1.02)
                values[f"power/{mode}_peak_tdp_fraction"] = estimate(peak / 700, 0.01)
        values["power/peak_w_vs_sequential"] = estimate(1.18 / 1.02 - 1, 0.02)
    return StudyFigures(values=values, num_windows=4, num_steps=STEPS)


def row(one: Configuration, found: StudyFigures | None = None, *, failure: str | None = None) -> StudyRow:
    return StudyRow(
        configuration=one,
        seconds=42.0,
        figures=found,
        failure=failure,
        record=None if found is None else f"jobs/{one.model}-{one.strategy}-{one.batch}/overlap.jsonl",
        model={"layers": 24, "hidden": 2048, "parameters": 1_315_000_000},
    )


def start(configurations: Sequence[Configuration], **more: object) -> StudyStart:
    return StudyStart(
        configurations=tuple(configurations),
        **{  # type: ignore[arg-type]
            "ranks": 4, "scale": 1.0, "steps": STEPS, "device": GPU, "link": "nccl",
            "versions": {"overlap-callbacks": "0.1.0", "torch": "2.9.0"}, "started_at": "2026-11-23T08:00:00+00:00",
            **more,
        },
    )  # fmt: skip


def of_rows(rows: Sequence[StudyRow], **more: object) -> tuple[StudyStart, list[StudyRow]]:
    return start([one.configuration for one in rows], **more), list(rows)


def large() -> tuple[StudyStart, list[StudyRow]]:
    """Three models, two strategies, four batches on GPUs with power; one ran out of memory."""
    rows = []
    shapes = itertools.product(("gpt3-xl", "gpt3-2.7b", "llama2-7b"), ("fsdp2", "pp"), (1, 2, 4, 8))
    for number, (model, strategy, batch) in enumerate(shapes):
        one = configuration(model, strategy, batch)
        if (model, strategy, batch) == ("llama2-7b", "fsdp2", 8):
            rows.append(row(one, failure="exit code 1: torch.OutOfMemoryError: CUDA out of memory"))
            continue
        ratio = (0.62 if strategy == "fsdp2" else 0.18) / (1 + 0.12 * batch)
        slowdown = 0.55 * ratio + 0.013 * ((7 * number) % 5 - 2)
        longer = 0.24 * ratio + 0.008 * ((3 * number) % 7 - 3)
        half = 0.009 + 0.006 * (number % 3)
        step_ms = {"gpt3-xl": 140, "gpt3-2.7b": 310, "llama2-7b": 820}[model] * (0.4 + 0.25 * batch)
        rows.append(
            row(one, figures(slowdown, longer, step_ms=step_ms, half=half, ratio=ratio, mean_w=420 + 25 * (number % 8)))
        )
    return of_rows(rows)


def factors() -> tuple[StudyStart, list[StudyRow]]:
    """Two jobs in four precisions, and one under three caps."""
    rows = []
    for place, model in enumerate(("gpt3-xl", "gpt3-2.7b")):
        sizes = {"fp32": (2.9, 0.05), "tf32": (1.5, 0.11), "fp16": (1.02, 0.21), "bf16": (1.0, 0.2)}
        for precision, (size, slowdown) in sizes.items():
            one = configuration(model, precision=precision)
            rows.append(
                row(one, figures(slowdown + 0.02 * place, 0.6 * slowdown, step_ms=250 * size * (1 + place), mean_w=560))
            )
    for cap, size, slowdown in ((500.0, 1.06, 0.23), (400.0, 1.17, 0.28), (300.0, 1.46, 0.36)):
        one = configuration(power_cap_w=cap)
        rows.append(row(one, figures(slowdown, 0.1, step_ms=250 * size, mean_w=0.93 * cap)))
    return of_rows(rows)


def on_cpu() -> tuple[StudyStart, list[StudyRow]]:
    """Six small jobs on a CPU, without power."""
    rows = []
    for number, (strategy, batch) in enumerate(itertools.product(("ddp", "fsdp2", "zero3"), (2, 8))):
        one = configuration("gpt3-125m", strategy, batch, precision="fp32")
        found = figures(0.01 + 0.02 * (number % 3), -0.02 + 0.02 * number, step_ms=900 + 200 * number, half=0.025)
        rows.append(row(one, found))
    return of_rows(rows, device=CPU, link="gloo", ranks=2, scale=0.1)


def single() -> tuple[StudyStart, list[StudyRow]]:
    """One configuration."""
    return of_rows([row(configuration(), figures())])
