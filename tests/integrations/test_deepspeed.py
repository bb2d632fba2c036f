from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import Mode, OverlapMonitor
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, dispatch_table, kept_logs, tiny_schedule
from tests.toggling import TOGGLING_STEPS, asked_for, at_night

# Everything that touches DeepSpeed runs in the ranks, where DS_ACCELERATOR is set first (see deepspeed_jobs).
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
RANKS_LOAD = ("tests.integrations.deepspeed_jobs",)

NUM_STEPS = 20

# Arguments of jobs.config, and stages of a pipeline.
JOBS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    **{f"zero{stage} accumulating": {"stage": stage, "micro_batches": 2} for stage in range(4)},
    **{f"zero{stage} bf16": {"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3)},
    **{f"zero{stage} fp16 that overflows": {"stage": stage, "dtype": "fp16"} for stage in (2, 3)},
    **{f"zero{stage} native": {"stage": stage, "sequential": "native"} for stage in (1, 2, 3)},
    "zero2 native accumulating": {"stage": 2, "micro_batches": 2, "sequential": "native"},
    **{f"zero{stage} for many steps": {"stage": stage, "steps": TOGGLING_STEPS + 4} for stage in range(4)},
    # Pipelines last: DeepSpeed keeps the first grid for the rest of the process.
    "pipeline": {"stage": 0, "micro_batches": 4, "stages": 2},
    "pipeline for many steps": {"stage": 0, "micro_batches": 4, "stages": 2, "steps": TOGGLING_STEPS + 4},
}
# Each stage, kind of number, native form and the pipeline stays; what combines them otherwise is left to the night.
NIGHTLY = (
    "zero0 accumulating", "zero1 accumulating", "zero1 bf16", "zero2 bf16", "zero3 fp16 that overflows", "zero1 native",
    "zero2 native accumulating", "zero0 for many steps", "zero1 for many steps", "zero2 for many steps",
    "zero3 for many steps", "pipeline for many steps",
)  # fmt: skip
# One recorded step at FIRST, then overlapped and sequential steps in turn up to the end.
FIRST = 4


def ways_of(job: str) -> tuple[str, ...]:
    return ("absent", "attached") if "many" in job else ("absent", "attached", "forced")


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
        schedule = tiny_schedule(
            spread=False, every_n_steps=steps - FIRST, first_step=FIRST, blocks="OS", repeats=pairs_of(steps)
        )
        monitor = attach(engine, sequential=sequential, schedule=schedule, sinks=[sink], max_overhead=None, strict=True)
        if way == "forced":
            monitor.force(Mode.SEQUENTIAL)

        def note(*_: Any) -> None:
            modes[engine.global_steps] = monitor.mode
            switches[engine.global_steps] = jobs.switch_of(engine)

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
        "micro-batches": {log.micro_batches for log in logs},
        "serialised": sum(c.start is not None for log in logs for c in log.collectives),
        "reports": sink.facts(),
        "valid": [report.valid for report in sink.reports],
    }


def _train_all(rank: int, asked: list[str]) -> dict[str, dict[str, Any]]:
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    untouched = dispatch_table()
    found = {job: {way: train(rank, job, way) for way in ways_of(job)} for job in asked}
    assert dispatch_table() == untouched
    return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """What ``train`` gave on each rank, for every job and way: one launch, because loading DeepSpeed takes long."""
    asked = asked_for(request, "job")
    return run_ranks(_train_all, 2, [job for job in JOBS if job in asked], timeout_s=240)


# -- weights, modes, windows


@pytest.mark.parametrize("job", at_night(JOBS, NIGHTLY))
def test_weights_are_bit_identical_absent_toggling_every_step_and_forced(trained: Any, job: str) -> None:
    steps = JOBS[job].get("steps", NUM_STEPS)
    window = range(FIRST + 1, FIRST + 1 + 2 * pairs_of(steps))
    for rank in trained:
        absent, attached = rank[job]["absent"], rank[job]["attached"]
        assert attached["digest"] == absent["digest"]
        if "pipeline" not in job:
            assert attached["micro-batches"] == {JOBS[job].get("micro_batches", 1)}
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


@pytest.mark.parametrize("job", at_night(JOBS, NIGHTLY))
def test_windows_are_complete_and_hear_both_ranks(trained: Any, job: str) -> None:
    attached = trained[0][job]["attached"]
    (report,) = attached["reports"]
    assert report["complete"]
    # DeepSpeed's pipelines send and receive singly. Nothing waits for that, and here no profile shows what it did.
    assert attached["valid"] == ["pipeline" not in job]
    assert report["ranks"] == [0, 1]
    assert not any("left out" in problem for problem in report["problems"])
    blocks = 2 * pairs_of(JOBS[job].get("steps", NUM_STEPS))
    skipped = [step - FIRST - 1 for step, applied in enumerate(attached["applied"]) if not applied]
    for counted in report["blocks"].values():
        assert counted == [block for block in range(blocks) if block not in skipped]


@pytest.mark.parametrize("job", at_night([job for job in JOBS if "overflows" in job], NIGHTLY))
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


@pytest.mark.parametrize("job", at_night(JOBS, NIGHTLY))
def test_the_collectives_recorded_are_those_worked_out_by_hand(trained: Any, job: str) -> None:
    for rank in trained:
        assert rank[job]["attached"]["recorded"] == expected(job)


@pytest.mark.parametrize("job", at_night([job for job in JOBS if "native" in job], NIGHTLY))
def test_the_native_form_flips_its_switch_in_sequential_steps_alone(trained: Any, job: str) -> None:
    on, off = (LAYER, 0) if "zero3" in job else (True, False)
    for rank in trained:
        for way in ("attached", "forced"):  # watched in every micro-batch
            for step, mode in rank[job][way]["modes"].items():
                assert rank[job][way]["switches"][step] == (off if mode is Mode.SEQUENTIAL else on)


# -- bounds of steps


def watched(monitor: OverlapMonitor) -> list[tuple[str, int]]:
    """The monitor's calls from here on."""
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
    with attach(
        training.engine, sinks=[sink], strict=True, schedule=tiny_schedule(100, 3, spread=False), max_overhead=None
    ):
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
