from __future__ import annotations

import csv
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import Mode, OverlapMonitor
from overlap_callbacks.report import record
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, dispatch_table, kept_logs, tiny_schedule

# Everything that touches DeepSpeed runs in the ranks, where DS_ACCELERATOR is set first (see deepspeed_jobs).
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

NUM_STEPS = 20

# Arguments of jobs.config, and stages of a pipeline.
JOBS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    **{f"zero{stage} accumulating": {"stage": stage, "micro_batches": 2} for stage in range(4)},
    **{f"zero{stage} bf16": {"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3)},
    **{f"zero{stage} fp16 that overflows": {"stage": stage, "dtype": "fp16"} for stage in (2, 3)},
    **{f"zero{stage} native": {"stage": stage, "sequential": "native"} for stage in (1, 2, 3)},
    "zero2 native accumulating": {"stage": 2, "micro_batches": 2, "sequential": "native"},
    **{f"zero{stage} for 200 steps": {"stage": stage, "steps": 204} for stage in range(4)},
    # Pipelines last: DeepSpeed keeps the first grid for the rest of the process.
    "pipeline": {"stage": 0, "micro_batches": 4, "stages": 2},
    "pipeline for 200 steps": {"stage": 0, "micro_batches": 4, "stages": 2, "steps": 204},
}
# One recorded step at FIRST, then overlapped and sequential steps in turn up to the end.
FIRST = 4


def ways_of(job: str) -> tuple[str, ...]:
    return ("absent", "attached") if "200" in job else ("absent", "attached", "forced")


def pairs_of(steps: int) -> int:
    """Overlapped and sequential steps of the window, in pairs."""
    return (steps - FIRST - 1) // 2


def train(rank: int, job: str, way: str) -> dict[str, Any]:
    """Train the job with the library absent, attached (toggling every step) or forced sequential."""
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    options = dict(JOBS[job])
    steps, stages = options.pop("steps", NUM_STEPS), options.pop("stages", 0)
    sequential = options.pop("sequential", "gate")
    training = jobs.Training(rank, jobs.config(**options), stages)
    engine = training.engine
    sink, modes, switches, applied = KeptReports(), {}, {}, []
    monitor = None
    if way != "absent":
        schedule = tiny_schedule(every_n_steps=steps - FIRST, first_step=FIRST, blocks="OS", repeats=pairs_of(steps))
        monitor = attach(engine, sequential=sequential, schedule=schedule, sinks=[sink], max_overhead=None, strict=True)
        if way == "forced":
            monitor.force(Mode.SEQUENTIAL)

        def note(*_: Any) -> None:
            modes[engine.global_steps] = monitor.mode
            switches[engine.global_steps] = switch_of(engine)

        engine.module.register_forward_pre_hook(note)
    with kept_logs() as logs:
        for _ in range(steps):
            training.step()
            applied.append(engine.was_step_applied())
    if monitor is not None:
        monitor.close()
    return {
        "digest": training.digest(),
        "modes": modes,
        "switches": switches,
        "applied": applied,
        "recorded": Counter((c.operator, c.group.dimension, c.bytes_in, c.bytes_out) for c in logs[0].collectives)
        if logs
        else None,
        "serialised": sum(c.start is not None for log in logs for c in log.collectives),
        "reports": sink.facts(),
        "valid": [report.valid for report in sink.reports],
    }


def switch_of(engine: Any) -> Any:
    """The value of what the native form flips."""
    if engine.zero_optimization_stage() == 3:
        coordinator = engine.optimizer.parameter_offload.param_coordinator
        return coordinator._PartitionedParameterCoordinator__prefetch_bucket_sz
    return getattr(engine.optimizer, "overlap_comm", None)


def _train_all(rank: int) -> dict[str, dict[str, Any]]:
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    untouched = dispatch_table()
    found = {job: {way: train(rank, job, way) for way in ways_of(job)} for job in JOBS}
    assert dispatch_table() == untouched
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, dict[str, Any]]]:
    """What ``train`` gave on each rank, for every job and way: one launch, because loading DeepSpeed takes long."""
    return run_ranks(_train_all, 2, timeout_s=240)


# -- weights, modes, windows


@pytest.mark.parametrize("job", JOBS)
def test_weights_are_bit_identical_absent_toggling_every_step_and_forced(trained: Any, job: str) -> None:
    steps = JOBS[job].get("steps", NUM_STEPS)
    window = range(FIRST + 1, FIRST + 1 + 2 * pairs_of(steps))
    for rank in trained:
        absent, attached = rank[job]["absent"], rank[job]["attached"]
        assert attached["digest"] == absent["digest"]
        # The promise was put to the test in every second step of the window.
        assert [step for step in range(steps) if attached["modes"][step] is Mode.SEQUENTIAL] == list(window[1::2])
        assert attached["serialised"] == 0 if "native" in job else attached["serialised"] >= pairs_of(steps)
        if "forced" not in ways_of(job):
            continue
        forced = rank[job]["forced"]
        assert forced["digest"] == absent["digest"]
        overlapped = [step for step in range(steps) if forced["modes"][step] is not Mode.SEQUENTIAL]
        if "overflows" in job:  # the first step that is not skipped is recorded for the order check
            assert overlapped == [0, 1, 2, 3, 4]
        elif "pipeline" in job:  # the first step has sends of its own, of the shapes to come
            assert overlapped == [0, 2]
        else:
            assert overlapped == [0]
        assert forced["serialised"] == 0 if "native" in job else forced["serialised"] >= steps - len(overlapped)


def _train_pipelines_of_data_parallel_stages(rank: int) -> dict[str, dict[str, Any]]:
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    return {way: train(rank, "pipeline", way) for way in ways_of("pipeline")}


def test_two_pipelines_of_data_parallel_stages_stay_bit_identical_on_four_ranks() -> None:
    for found in run_ranks(_train_pipelines_of_data_parallel_stages, 4, timeout_s=120):
        assert found["attached"]["digest"] == found["forced"]["digest"] == found["absent"]["digest"]
        assert list(found["attached"]["modes"].values()).count(Mode.SEQUENTIAL) == pairs_of(NUM_STEPS)
        assert list(found["forced"]["modes"].values()).count(Mode.SEQUENTIAL) >= NUM_STEPS - 3
        # A stage reduces its two layers' gradients, 16 x 16 each, with the other pipeline's stage, in one bucket.
        reduced = {
            key: count for key, count in found["attached"]["recorded"].items() if key[:2] == ("allreduce_", "data")
        }
        assert reduced[("allreduce_", "data", 2 * 16 * 16 * 4, 2 * 16 * 16 * 4)] == 1


@pytest.mark.parametrize("job", JOBS)
def test_windows_are_complete_and_hear_both_ranks(trained: Any, job: str) -> None:
    attached = trained[0][job]["attached"]
    (report,) = attached["reports"]
    assert report["complete"]
    assert attached["valid"] == [True]
    assert report["ranks"] == [0, 1]
    assert not any("left out" in problem for problem in report["problems"])
    blocks = 2 * pairs_of(JOBS[job].get("steps", NUM_STEPS))
    skipped = [step - FIRST - 1 for step, applied in enumerate(attached["applied"]) if not applied]
    for counted in report["blocks"].values():
        assert counted == [block for block in range(blocks) if block not in skipped]


@pytest.mark.parametrize("job", [job for job in JOBS if "overflows" in job])
def test_steps_that_the_loss_scaler_skips_have_numbers_and_do_not_count(trained: Any, job: str) -> None:
    for rank in trained:
        applied = rank[job]["attached"]["applied"]
        assert applied == rank[job]["absent"]["applied"]
        # The first steps, and one within the window.
        assert [step for step, was in enumerate(applied) if not was] == [0, 1, 2, 3, 17]
        assert sorted(rank[job]["attached"]["modes"]) == list(range(NUM_STEPS))


def _skip_the_recorded_step(rank: int) -> dict[str, Any]:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    digests, sink = [], KeptReports()
    for attached in (False, True):
        training = jobs.Training(rank, jobs.config(2, dtype="fp16"))
        with captured_log() as lines:
            if attached:
                schedule = tiny_schedule(every_n_steps=5, first_step=3, blocks="OS", repeats=2)
                monitor = attach(training.engine, schedule=schedule, sinks=[sink], max_overhead=None, strict=True)
            for _ in range(NUM_STEPS):
                training.step()
            if attached:
                monitor.close()
        digests.append(training.digest())
    return {"digests": digests, "windows": [report.first_step for report in sink.reports], "lines": lines}


def test_a_window_whose_first_step_the_loss_scaler_skips_is_left_out_and_the_next_one_is_whole() -> None:
    for rank, found in enumerate(run_ranks(_skip_the_recorded_step, 2, timeout_s=90)):
        assert found["digests"][0] == found["digests"][1]
        assert not any("further collective" in line for line in found["lines"])
        if rank == 0:
            assert 3 not in found["windows"]
            assert 8 in found["windows"]


# -- collectives, worked out by hand: 4 layers of 16 x 16 weights without bias, on 2 ranks

LAYER = 16 * 16


def expected(job: str) -> Counter[tuple[str, str, int, int]]:
    """Collectives of one step: operator, dimension, bytes in, bytes out; and how many."""
    options = JOBS[job]
    stage, micro_batches = options["stage"], options.get("micro_batches", 1)
    dtype = options.get("dtype", "fp32")
    half = dtype != "fp32"
    layer = LAYER * (2 if half else 4)
    if "pipeline" in job:
        return Counter(
            {
                # Activations one way, their gradients the other: 4 samples of 16 features, for each micro-batch.
                ("send", "pipeline", 4 * 16 * 4, 0): micro_batches,
                ("recv_", "pipeline", 0, 4 * 16 * 4): micro_batches,
                # This stage's two layers, in a data parallel group of one rank.
                ("allreduce_", "data", 2 * layer, 2 * layer): 1,
                # The norm of all gradients, for clipping, over the stages and then over the replicas.
                ("allreduce_", "model", 4, 4): 1,
                ("allreduce_", "data", 4, 4): 1,
                # The last stage tells its loss: the sum and the one of this batch.
                ("broadcast_", "pipeline", 8, 8): 1,
            }
        )
    if stage == 0:  # one bucket for all gradients; the norm for clipping
        return Counter({("allreduce_", "data", 4 * layer, 4 * layer): 1, ("allreduce_", "data", 4, 4): 1})
    found: Counter[tuple[str, str, int, int]] = Counter()
    if half and (stage, dtype) != (3, "bf16"):  # whether any rank's gradients overflowed
        found["allreduce_", "data", 1, 1] = 1
    if stage < 3:
        # A bucket holds one layer. ZeRO-2 reduces in every micro-batch, since no rank keeps all gradients.
        found["allreduce_", "data", layer, layer] = 4 * (micro_batches if stage == 2 else 1)
        found["allreduce_", "data", 4, 4] = 1  # the norm
        found["_allgather_base_", "data", 2 * layer, 4 * layer] = 1  # each rank's half of the updated weights
    else:
        # Every layer's weights for forward and for backward, its gradients once, in every micro-batch.
        found["_allgather_base_", "data", layer // 2, layer] = 2 * 4 * micro_batches
        found["_reduce_scatter_base_", "data", layer, layer // 2] = 4 * micro_batches
        found["allreduce_", "data", 8, 8] = 1  # the norm, in double precision
    return found


@pytest.mark.parametrize("job", JOBS)
def test_the_collectives_recorded_are_those_worked_out_by_hand(trained: Any, job: str) -> None:
    for rank in trained:
        assert rank[job]["attached"]["recorded"] == expected(job)


@pytest.mark.parametrize("job", [job for job in JOBS if "native" in job])
def test_the_native_form_flips_its_switch_in_sequential_steps_alone(trained: Any, job: str) -> None:
    on, off = (LAYER, 0) if "zero3" in job else (True, False)
    for rank in trained:
        for way in ("attached", "forced"):  # watched in every micro-batch
            for step, mode in rank[job][way]["modes"].items():
                assert rank[job][way]["switches"][step] == (off if mode is Mode.SEQUENTIAL else on)


# -- bounds of steps


def watched(monitor: OverlapMonitor) -> list[tuple[str, int]]:
    """What the monitor is told from here on."""
    calls: list[tuple[str, int]] = []
    begin, end = monitor.step_begin, monitor.step_end

    def note_begin(step: int) -> None:
        calls.append(("begin", step))
        begin(step)

    def note_end(step: int | None = None) -> None:
        assert step is not None
        calls.append(("end", step))
        end(step)

    monitor.step_begin, monitor.step_end = note_begin, note_end  # type: ignore[method-assign]
    return calls


def evaluate(training: Any) -> None:
    training.engine.eval()
    training.engine(training.batch())
    training.engine.train()


def _bound_steps(rank: int, folder: str) -> dict[str, Any]:
    import torch

    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    found: dict[str, Any] = {}

    training = jobs.Training(rank, jobs.config(2, micro_batches=2))
    with attach(training.engine, sinks=[], strict=True) as monitor:
        found["accumulation"] = calls = watched(monitor)
        for _ in range(2):
            evaluate(training)
            with torch.no_grad():
                training.engine(training.batch())  # in training mode, but nothing is trained on it
            for _ in range(2):
                training.micro_step()
                calls.append(("micro-batch", 0))

    # Of the window 3 (recorded), 4, 5, 6, 7 (O S S O), step 5 has an evaluation between its micro-batches.
    sink = KeptReports()
    training = jobs.Training(rank, jobs.config(3, micro_batches=2))
    with attach(training.engine, sinks=[sink], strict=True, schedule=tiny_schedule(100, 3), max_overhead=None):
        for step in range(9):
            training.micro_step()
            if step == 5:
                evaluate(training)
            training.micro_step()
    found["reports"] = sink.facts()

    # A checkpoint brings the step's number back.
    training = jobs.Training(rank, jobs.config(1))
    for _ in range(3):
        training.step()
    training.engine.save_checkpoint(folder)
    training = jobs.Training(rank, jobs.config(1))
    with attach(training.engine, sinks=[], strict=True) as monitor:
        found["resumed"] = watched(monitor)
        training.engine.load_checkpoint(folder)
        for _ in range(2):
            training.step()

    # A step that raised is not measured, whether or not it is tried again.
    with attach(training.engine, sinks=[], strict=True) as monitor:
        found["after"] = watched(monitor)
        training.step()

    training = jobs.Training(rank, jobs.config(0, micro_batches=2), stages=2)
    with attach(training.engine, sinks=[], strict=True) as monitor:
        found["pipeline"] = calls = watched(monitor)
        training.step()
        calls.append(("evaluation", 0))
        training.engine.eval_batch(iter([(training.batch(), training.batch())] * 2))
        calls.append(("evaluation", 0))
        with pytest.raises(RuntimeError, match="requires gradients"), torch.no_grad():
            training.step()
        assert not monitor.in_step
        training.step()  # has the number that the one which raised had
        training.step()
    return found


def test_steps_have_deepspeeds_numbers_and_bounds(tmp_path: Path) -> None:
    micro_batch = ("micro-batch", 0)
    for found in run_ranks(_bound_steps, 2, str(tmp_path), timeout_s=120):
        assert found["accumulation"] == [
            ("begin", 0), micro_batch, ("end", 0), micro_batch,
            ("begin", 1), micro_batch, ("end", 1), micro_batch,
        ]  # fmt: skip
        assert found["resumed"] == [("begin", 3), ("end", 3), ("begin", 4), ("end", 4)]
        assert found["after"] == [("begin", 5), ("end", 5)]
        evaluation = ("evaluation", 0)
        assert found["pipeline"] == [
            ("begin", 0), ("end", 0), evaluation, evaluation, ("begin", 1), ("begin", 2), ("end", 2),
        ]  # fmt: skip
        for report in found["reports"]:
            assert report["complete"]
            assert not any("left out" in problem for problem in report["problems"])
            assert report["blocks"] == {0: [0, 2, 3], 1: [0, 2, 3]}


# -- the engine


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
        switch = switch_of(training.engine)
        schedule = tiny_schedule(100, 1, blocks="SO")
        monitor = attach(
            training.engine, sequential="native" if stage else "gate", schedule=schedule, sinks=[], max_overhead=None
        )
        for _ in range(2):
            training.step()
        assert (switch_of(training.engine) != switch) is (stage > 0)
        monitor.close()
        assert switch_of(training.engine) == switch
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
            schedule = tiny_schedule(every_n_steps=50, first_step=1, blocks="OS", repeats=5)
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

    from overlap_callbacks.integrations import deepspeed as adapter
    from overlap_callbacks.integrations.base import KNOWN_TO_WORK
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)

    def refuses(error: type[Exception], words: str, engine: Any, **options: Any) -> None:
        with pytest.raises(error, match=re.escape(words)):
            adapter.attach(engine, strict=True, **options)
        if error is TypeError:
            return
        # Unless strict, it costs the measuring and not the job.
        before = dict(vars(engine))
        with captured_log() as lines:
            assert not adapter.attach(engine, **options).active
        (line,) = lines
        assert words in line
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
    refuses(ValueError, "engine is attached to already: close() that monitor first", engine)
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
    attribute, adapter.PREFETCH_ATTRIBUTE = adapter.PREFETCH_ATTRIBUTE, "_moved"
    refuses_native(f"has no prefetch bucket size of ZeRO-3 under the known name, {known}", 3)
    adapter.PREFETCH_ATTRIBUTE = attribute
    refuses_native("does not overlap the communication of pipelines", 0, micro_batches=2, stages=2)

    dist.destroy_process_group()
    refuses(RuntimeError, "attach(engine) was called without a process group: call it after", engine)


def _flip_streams(rank: int) -> None:
    from deepspeed.accelerator import get_accelerator

    from overlap_callbacks.integrations import deepspeed as adapter
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
        return getattr(coordinator, attribute), engine.optimizer.reduce_and_partition_stream, switch_of(engine)

    switches = adapter.native_switches(engine)
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


# -- logging


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


def _give_odd_values(rank: int, folder: str) -> tuple[list[str], bool]:
    from overlap_callbacks.integrations.deepspeed import attach
    from overlap_callbacks.sinks import JsonlSink
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    events = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "odd"}}
    engine = jobs.Training(rank, jobs.config(2, **events)).engine
    with captured_log() as lines:
        assert not attach(engine, run_dir=5).active
        assert not attach(engine, sinks=5).active
    with pytest.raises(TypeError, match="run_dir must be the path of a folder"):
        attach(engine, run_dir=5, strict=True)
    with attach(engine, sinks=JsonlSink(folder), strict=True) as monitor:
        return lines, monitor.active


def test_one_sink_may_be_given_as_it_is_and_a_wrong_value_costs_the_measuring_and_not_the_job(tmp_path: Path) -> None:
    for (no_folder, no_sinks), active in run_ranks(_give_odd_values, 2, str(tmp_path)):
        assert "run_dir must be the path of a folder, got 5 (a int)" in no_folder
        assert "sinks must be a list of Sink objects, got 5 (a int)" in no_sinks
        assert active


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
    schedule = tiny_schedule(40, repeats=2, profiled_steps=4)
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


# -- the figures


def _measure(rank: int, folder: str) -> None:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    for stage in (2, 3):
        training = jobs.Training(rank, jobs.config(stage, micro_batches=2))
        schedule = tiny_schedule(100, repeats=2, warmup_steps=1, profiled_steps=4)
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
        assert window.complete
        residual = window.figures()["residual_overlap"].value
        assert residual < 0.05 or not window.valid
        assert {row.dimension for row in window.collectives} == {"data"}
