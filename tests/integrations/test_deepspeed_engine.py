"""The DeepSpeed adapter's effects on an engine: what it leaves behind, what it refuses, where reports go."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from overlap_callbacks import Mode
from overlap_callbacks.report import record
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import tiny_schedule

# Everything that touches DeepSpeed runs in the ranks, where DS_ACCELERATOR is set first (see deepspeed_jobs).
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
RANKS_LOAD = ("tests.integrations.deepspeed_jobs",)

NUM_STEPS = 20
# Weights of a layer.
LAYER = 16 * 16


def _leave_as_it_was(rank: int) -> None:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)

    def state(engine: Any) -> list[dict[str, Any]]:
        """Attributes of everything that belongs to the engine; hooks are among a module's."""
        owners = [engine, engine.optimizer, getattr(engine.optimizer, "optimizer", None), engine.monitor]
        owners += [*engine.module.modules(), getattr(engine.optimizer, "parameter_offload", None)]
        owners += [getattr(owners[-1], "param_coordinator", None)]
        return [
            {name: len(value) if "hooks" in name else value for name, value in vars(owner).items()}
            for owner in owners
            if owner is not None
        ]

    def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
        return len(one) == len(other) and all(
            a.keys() == b.keys() and all(a[name] is b[name] for name in a) for a, b in zip(one, other, strict=True)
        )

    for stage, stages in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 2)):
        training = jobs.Training(rank, jobs.config(stage), stages)
        training.step()
        for sequential in ("gate", "native") if stage else ("gate",):
            before = state(training.engine)
            monitor = attach(training.engine, sequential=sequential, sinks=[])
            assert not same(before, state(training.engine))
            monitor.close()
            assert same(before, state(training.engine))

        # Closed between steps of a window, in sequential mode.
        names = [owner.keys() for owner in state(training.engine)]
        switch = jobs.switch_of(training.engine)
        schedule = tiny_schedule(100, 1, blocks="SO", spread=False)
        monitor = attach(
            training.engine, sequential="native" if stage else "gate", schedule=schedule, sinks=[], max_overhead=None
        )
        for _ in range(2):
            training.step()
        assert (jobs.switch_of(training.engine) != switch) is (stage > 0)
        monitor.close()
        assert jobs.switch_of(training.engine) == switch
        assert [owner.keys() for owner in state(training.engine)] == names

    # Wrappers of other people's, below ours and above it.
    engine = training.engine
    calls = []
    inner = engine.train_batch

    def below(*args: Any) -> Any:
        calls.append("below")
        return inner(*args)

    engine.train_batch = below
    monitor = attach(engine, sinks=[], strict=True)
    monitor.close()
    assert vars(engine)["train_batch"] is below
    monitor = attach(engine, sinks=[], strict=True)
    ours = engine.train_batch

    def above(*args: Any) -> Any:
        calls.append("above")
        return ours(*args)

    engine.train_batch = above
    monitor.close()
    assert vars(engine)["train_batch"] is above
    training.step()
    assert calls == ["above", "below"]


def _close_while_accumulating(rank: int) -> None:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    digests = []
    for attached in (False, True):
        training = jobs.Training(rank, jobs.config(1, micro_batches=3))
        engine = training.engine
        if attached:
            before = dict(vars(engine))
            schedule = tiny_schedule(spread=False, every_n_steps=50, first_step=1, blocks="OS", repeats=5)
            options = {"schedule": schedule, "max_overhead": None, "strict": True}
            monitor = attach(engine, sequential="native", sinks=[], **options)
        for _ in range(2):
            training.step()
        while attached and monitor.mode is not Mode.SEQUENTIAL:
            training.micro_step()
        if attached:
            assert engine.optimizer.overlap_comm is False
            monitor.close()
            # Gradients of this step are in the buckets of the one way of reducing: it ends as it began.
            assert engine.optimizer.overlap_comm is False
            assert "step" in vars(engine)
            step = engine.global_steps
            while engine.global_steps == step:
                training.micro_step()
            assert vars(engine).keys() == before.keys()
            assert engine.optimizer.overlap_comm is True
        while len(training.losses) < 3 * NUM_STEPS:
            training.micro_step()
        digests.append(training.digest())
    assert digests[0] == digests[1]


def test_a_close_amid_an_accumulation_leaves_the_switches_until_the_step_has_ended() -> None:
    run_ranks(_close_while_accumulating, 2, timeout_s=90)


def test_close_leaves_the_engine_exactly_as_it_was() -> None:
    run_ranks(_leave_as_it_was, 2, timeout_s=90)


def _refuse(rank: int) -> None:
    import re

    import torch.distributed as dist
    from torch import nn

    from overlap_callbacks.integrations import _deepspeed_switches
    from overlap_callbacks.integrations import deepspeed as adapter
    from overlap_callbacks.integrations.base import KNOWN_TO_WORK
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)

    def refuses(error: type[Exception], words: str, engine: Any, **options: Any) -> None:
        with pytest.raises(error, match=re.escape(words)):
            adapter.attach(engine, strict=True, **options)
        if error is TypeError or options.keys() & {"every_n_steps"} or options.get("sequential") == "no":
            with pytest.raises(error, match=re.escape(words)):
                adapter.attach(engine, **options)
            return
        # Unless strict, it costs the measuring and not the job.
        before = dict(vars(engine))
        with captured_log() as lines:
            assert not adapter.attach(engine, **options).active
        assert len(lines) == (rank == 0 or not dist.is_initialized())
        assert all(words in line for line in lines)
        assert vars(engine) == before

    def engine_of(*args: Any, stages: int = 0, **options: Any) -> Any:
        return jobs.Training(rank, jobs.config(*args, **options), stages).engine

    engine = engine_of(2)
    refuses(TypeError, "engine must be what deepspeed.initialize returned first, got a Linear", nn.Linear(2, 2))
    refuses(TypeError, "engine must be what deepspeed.initialize returned first, got a tuple", (engine, None))
    refuses(TypeError, "unknown options ['every']", engine, every=3)
    refuses(ValueError, "sequential must be 'gate' or 'native', got 'no'", engine, sequential="no")
    refuses(ValueError, "every_n_steps", engine, every_n_steps=0)

    monitor = adapter.attach(engine, sinks=[])
    refuses(ValueError, "engine is attached to already: use that monitor", engine)
    monitor.close()
    adapter.attach(engine, sinks=[]).close()

    # A version without something that is needed.
    method = adapter.DeepSpeedEngine.was_step_applied
    del adapter.DeepSpeedEngine.was_step_applied
    known = f"which is needed here; known to work: {KNOWN_TO_WORK['deepspeed']}"
    refuses(RuntimeError, f"has no DeepSpeedEngine.was_step_applied, {known}", engine)
    adapter.DeepSpeedEngine.was_step_applied = method

    def refuses_native(words: str, *args: Any, **options: Any) -> None:
        refuses(ValueError, words, engine_of(*args, **options), sequential="native")

    off = {"overlap_comm": False}
    refuses_native("ZeRO stage 0 reduces all gradients after the backward pass", 0)
    refuses_native("built with overlap_comm off", 1, zero=off)
    refuses_native("built with overlap_comm off", 3, zero=off)
    refuses_native("built with overlap_comm off", 1, zero={**off, "contiguous_gradients": False})
    refuses_native("ZeRO stage 1 without contiguous_gradients", 1, zero={"contiguous_gradients": False})
    refuses_native("built with stage3_prefetch_bucket_size 0", 3, zero={"stage3_prefetch_bucket_size": 0})
    refuses_native("not known to be safe to flip with offloading", 2, zero={"offload_optimizer": {"device": "cpu"}})
    fp32_gradients = {"grad_accum_dtype": "fp32"}
    refuses_native("overlap_comm of a BF16_Optimizer is not known", 1, dtype="bf16", data_types=fp32_gradients)
    with mock.patch.object(_deepspeed_switches, "PREFETCH_ATTRIBUTE", "_moved"):
        refuses_native(f"has no prefetch bucket size of ZeRO-3 under the known name, {known}", 3)
    refuses_native("does not overlap the communication of pipelines", 0, micro_batches=2, stages=2)

    dist.destroy_process_group()
    refuses(RuntimeError, "attach(engine) was called without a process group: call it after", engine)


def _flip_streams(rank: int) -> None:
    from deepspeed.accelerator import get_accelerator

    from overlap_callbacks.integrations._deepspeed_switches import native_switches
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    engine = jobs.Training(rank, jobs.config(3)).engine
    coordinator = engine.optimizer.parameter_offload.param_coordinator
    attribute = "_PartitionedParameterCoordinator__allgather_stream"
    assert getattr(coordinator, attribute) is None
    assert engine.optimizer.reduce_and_partition_stream is None
    # As on a GPU, where they are streams.
    setattr(coordinator, attribute, "gather")
    engine.optimizer.reduce_and_partition_stream = "reduce"
    main = get_accelerator().default_stream()

    def streams() -> tuple[Any, Any, Any]:
        return getattr(coordinator, attribute), engine.optimizer.reduce_and_partition_stream, jobs.switch_of(engine)

    switches = native_switches(engine)
    assert switches.name == "stage3_prefetch_bucket_size and streams"
    switches.disable()
    assert streams() == (main, main, 0)
    switches.restore()
    assert streams() == ("gather", "reduce", LAYER)
    switches.restore()
    engine.optimizer.reduce_and_partition_stream = "another"
    with pytest.raises(RuntimeError, match="reduce_and_partition_stream was 'reduce' when the monitor was attached"):
        switches.disable()
    assert streams() == ("gather", "another", LAYER)


def test_zero3s_streams_are_flipped_with_its_prefetch_where_it_has_some() -> None:
    run_ranks(_flip_streams, 2, timeout_s=90)


def test_what_cannot_be_measured_is_refused_in_words() -> None:
    run_ranks(_refuse, 2, timeout_s=90)


def _log_to_csv(rank: int, folder: str) -> list[str]:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    events = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"}}
    training = jobs.Training(rank, jobs.config(2, **events))
    with attach(training.engine, schedule=tiny_schedule(10), run_dir=folder, max_overhead=None, strict=True):
        for _ in range(17):  # the second window ends with the job
            training.step()

    training = jobs.Training(rank, jobs.config(2, **events))
    with captured_log() as lines:
        monitor = attach(training.engine, schedule=tiny_schedule(10), run_dir=folder, max_overhead=None)
        if training.engine.monitor.csv_monitor is not None:
            training.engine.monitor.csv_monitor.log_dir = "/nonexistent"
        training.engine.monitor.enabled = False  # DeepSpeed's own logging would fail
        for _ in range(17):
            training.step()
        monitor.close()
    return lines


def test_the_engines_monitor_gets_every_report_and_costs_no_more_than_a_warning_where_it_fails(tmp_path: Path) -> None:
    failed, quiet = run_ranks(_log_to_csv, 2, str(tmp_path), timeout_s=90)
    windows = record.read(tmp_path).windows
    with Path(tmp_path, "csv", "overlap_e2e_sequential_ms.csv").open() as lines:
        rows = list(csv.reader(lines))
    assert [float(value) for _, value in rows[1:]] == [window.e2e_sequential_ms.value for window in windows[:2]]
    # Samples seen: 8 for each step. The first window ended with step 6, the second with the job.
    assert 7 * 8 <= int(rows[1][0]) <= 17 * 8
    assert int(rows[2][0]) == 17 * 8
    assert len(windows) == 4
    (line,) = failed
    assert "nonexistent" in line
    assert quiet == []


def _give_one_sink(rank: int, folder: str) -> bool:
    from overlap_callbacks.integrations.deepspeed import attach
    from overlap_callbacks.sinks import JsonlSink
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    events = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "odd"}}
    engine = jobs.Training(rank, jobs.config(2, **events)).engine
    for wrong in ({"run_dir": 5}, {"sinks": 5}):
        for strict in (False, True):
            with pytest.raises(TypeError, match="must be"):
                attach(engine, strict=strict, **wrong)
    with attach(engine, sinks=JsonlSink(folder), strict=True) as monitor:
        return monitor.active


def test_one_sink_may_be_given_as_it_is_and_a_wrong_value_raises(tmp_path: Path) -> None:
    assert run_ranks(_give_one_sink, 2, str(tmp_path)) == [True, True]


def _log_to_wandb(rank: int, folder: str) -> None:
    import os

    import wandb

    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true", WANDB_CONSOLE="off")
    os.environ.update(WANDB_DISABLE_GIT="true", WANDB_DISABLE_CODE="true")
    events = {"wandb": {"enabled": True, "project": "test"}}
    training = jobs.Training(rank, jobs.config(2, **events))
    schedule = tiny_schedule(40, repeats=2, profiled_steps=4, spread=False)
    with attach(training.engine, schedule=schedule, run_dir=folder, max_overhead=None, strict=True):
        for _ in range(40):
            training.step()
    wandb.finish()


def test_the_run_of_the_engines_own_wandb_monitor_gets_each_report_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tests.wandb_reader import read_run

    run_ranks(_log_to_wandb, 2, str(tmp_path), timeout_s=90)
    run = read_run(tmp_path)
    assert len(run.values("overlap/e2e_overlapped_ms")) == 1
    assert run.values("overlap/step")[0] == 2
    assert len(run.values("Train/Samples/lr")) == 40  # DeepSpeed's own rows are all there


def _measure(rank: int, folder: str) -> None:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    for stage in (2, 3):
        training = jobs.Training(rank, jobs.config(stage, micro_batches=2))
        schedule = tiny_schedule(100, repeats=2, warmup_steps=1, profiled_steps=4, spread=False)
        run_dir = Path(folder, f"zero{stage}")
        with attach(training.engine, schedule=schedule, run_dir=run_dir, max_overhead=None, strict=True):
            for _ in range(45):
                training.step()


def test_sequential_steps_are_sequential_in_the_profile_too(tmp_path: Path) -> None:
    run_ranks(_measure, 2, str(tmp_path), timeout_s=120)
    for stage in (2, 3):
        run = record.read(tmp_path / f"zero{stage}")
        (window,) = run.windows
        assert run.runs[0].framework.startswith("deepspeed 0.")
        assert run.runs[0].configuration["zero_stage"] == stage
        assert run.runs[0].configuration.keys() >= {"model", "shapes", "zero_reduce_bucket_size"}
        assert window.complete
        residual = window.figures()["residual_overlap"].value
        assert residual < 0.05 or not window.valid
        assert {row.dimension for row in window.collectives} == {"data"}
