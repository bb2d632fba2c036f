"""A profiler of the user's in real jobs, in the ways in which loops and frameworks start one, beside our windows.

It counts the operators that it counts without the library, and ours gives way with one sentence.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_callbacks import JsonlSink
from overlap_callbacks.report import record
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

RANKS_LOAD = ("transformers.trainer", "accelerate", "lightning.pytorch")

NUM_STEPS = 24
# wait 0, 6, 12, 18; warm-up 1-2, 7-8, ...; active 3-5, 9-11, ...
CYCLE = {"wait": 1, "warmup": 2, "active": 3}
# Windows of 1 + 4 + 4 steps at 2 and 14: their profiled parts begin at 7 (warming up) and 19 (warming up).
WINDOWS: dict[str, Any] = {"every_n_steps": 12, "first_step": 2, "profiled_steps": 2}


class Cycles:
    """The operators of each cycle of a profiler."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []

    def keep(self, theirs: Any) -> None:
        names = Counter(event.name for event in theirs.events() if event.name.startswith("aten::"))
        self.counts.append({name: names[name] for name in ("aten::addmm", "aten::mm", "aten::lerp_")})

    def options(self, **phases: int) -> dict[str, Any]:
        return {
            "activities": [torch.profiler.ProfilerActivity.CPU],
            "schedule": torch.profiler.schedule(**{**CYCLE, **phases}),
            "on_trace_ready": self.keep,
        }


def train(rank: int, folder: str, measured: bool) -> list[dict[str, int]]:
    training, cycles = Training(rank), Cycles()
    monitor = new_monitor(JsonlSink(folder), schedule=tiny_schedule(**WINDOWS)) if measured else None
    with torch.profiler.profile(**cycles.options()) as theirs:
        for step in range(NUM_STEPS):
            if monitor is not None:
                monitor.step_begin(step)
            training.step()
            if monitor is not None:
                monitor.step_end(step)
            theirs.step()
    if monitor is not None:
        monitor.close()
    return cycles.counts


def train_with_lightning(rank: int, folder: str, measured: bool) -> list[dict[str, int]]:
    from lightning.pytorch.profilers import PyTorchProfiler

    from tests.integrations.test_lightning import Regression, batches, overlap_callback, trainer

    cycles = Cycles()
    options = {**WINDOWS, "repeats": 1, "warmup_steps": 0, "strict": False, "run_dir": folder}
    theirs = cycles.options(warmup=6, active=6)  # the profiled part of our first window begins within its one cycle
    profiler = PyTorchProfiler(dirpath=folder, filename="theirs", export_to_chrome=False, **theirs)
    callbacks = [overlap_callback(**options)] if measured else []
    fit = trainer(rank, folder, *callbacks, profiler=profiler, max_steps=NUM_STEPS)
    fit.fit(Regression(), batches(rank, NUM_STEPS))
    return cycles.counts


def train_with_transformers(rank: int, folder: str, measured: bool) -> list[dict[str, int]]:
    from transformers import TrainerCallback

    from tests.integrations.huggingface_jobs import overlap_callback, trainer

    cycles = Cycles()
    with torch.profiler.profile(**cycles.options()) as theirs:

        class Step(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                theirs.step()

        options = {**WINDOWS, "repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "strict": False, "run_dir": folder}
        callbacks = [overlap_callback(**options)] if measured else []
        trainer(rank, Path(folder, str(rank)), *callbacks, Step(), max_steps=NUM_STEPS).train()
    return cycles.counts


# Four windows of 9 steps. Their profiled parts are the steps 7 to 10, 19 to 22, 31 to 34 and 43 to 46.
NUM_ACCELERATE_STEPS = 48
# The steps in a block of Accelerate's profiler, which waits, warms up, and records two. The first block warms up once
# our second profile runs; the second does so when our third is to start. After each, Accelerate has a barrier of its
# own, which comes after our windows.
ACCELERATE_BLOCKS = [range(19, 25), range(29, 37)]


def train_with_accelerate(rank: int, folder: str, measured: bool) -> dict[str, Any]:
    from accelerate.utils import ProfileKwargs

    from overlap_callbacks.integrations.transformers import attach_accelerate
    from tests.integrations.huggingface_jobs import accelerate_job, digest

    profiling = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        output_trace_dir=f"{folder}/traces",
    )
    accelerator, model, optimizer, loader = accelerate_job(rank, kwargs_handlers=[profiling])
    options = {**WINDOWS, "repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "max_overhead": None}
    monitor = attach_accelerate(optimizer, strict=False, run_dir=folder, **options) if measured else None
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    traces = []

    def train(theirs: Any = None) -> None:
        accelerator.backward(model(next(batches)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if theirs is not None:
            theirs.step()

    done = 0
    for block in ACCELERATE_BLOCKS:
        for _ in range(done, block.start):
            train()
        with accelerator.profile() as theirs:
            for _ in block:
                train(theirs)
        done = block.stop
        events = json.loads(Path(folder, "traces", f"profile_{rank}.json").read_text())["traceEvents"]
        # Operators and steps alone: how many events Gloo's threads have is left to chance.
        traces.append(Counter(e["name"] for e in events if e["name"].startswith(("aten::", "ProfilerStep#"))))
    for _ in range(done, NUM_ACCELERATE_STEPS):
        train()
    if monitor is not None:
        monitor.close()
    return {"traces": traces, "weights": digest(model)}


def run_twice(rank: int, job: Callable[..., Any], folder: str) -> dict[str, Any]:
    plain = job(rank, f"{folder}/plain", False)
    with captured_log() as lines:
        measured = job(rank, f"{folder}/measured", True)
    return {"plain": plain, "measured": measured, "log": lines}


JOBS = [
    pytest.param(train, id="own loop"),
    pytest.param(
        train_with_lightning,
        id="lightning",
        marks=pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing"),
    ),
    pytest.param(
        train_with_transformers,
        id="transformers",
        marks=pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing"),
    ),
]


@pytest.mark.parametrize("job", JOBS)
def test_a_profiler_of_the_users_behaves_as_without_the_library(tmp_path: Path, job: Callable[..., Any]) -> None:
    results = run_ranks(run_twice, 2, job, str(tmp_path), timeout_s=150.0)
    for result in results:
        assert result["measured"] == result["plain"]
        assert result["measured"][0]["aten::addmm"] > 0
        assert len([line for line in result["log"] if "profiler" in line]) == 1, result["log"]
    windows = record.read(tmp_path / "measured").windows
    assert [window.complete for window in windows] == [True, True]
    # Lightning's profiler records one cycle.
    met = windows[:1] if job is train_with_lightning else windows
    assert all("kernel times are missing: another profiler was" in " ".join(window.problems) for window in met)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")
def test_accelerates_own_profiler_behaves_as_without_the_library_which_gives_way_only_if_they_meet(
    tmp_path: Path,
) -> None:
    for result in run_ranks(run_twice, 2, train_with_accelerate, str(tmp_path), timeout_s=90.0):
        assert result["measured"] == result["plain"]
        for trace in result["measured"]["traces"]:
            assert sorted(name for name in trace if "#" in name) == ["ProfilerStep#2", "ProfilerStep#3"]
            assert trace["aten::addmm"] == 2 * 2  # two layers in two steps
        assert len([line for line in result["log"] if "profiler" in line]) == 1, result["log"]
    before, ours_first, theirs_first, after = record.read(tmp_path / "measured").windows
    assert all(window.complete for window in (before, ours_first, theirs_first, after))
    assert "kernel times are missing: another profiler was started" in " ".join(ours_first.problems)
    assert "kernel times are missing: another profiler was running" in " ".join(theirs_first.problems)
    for window in (before, after):
        assert "kernel times are missing" not in " ".join(window.problems)
