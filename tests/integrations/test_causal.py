"""Causal windows in jobs of frameworks over Gloo: losses and weights have the bits of the job without the library."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.causal import row_of
from overlap_callbacks.report import record
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import run_ranks
from tests.toggling import at_night

RANKS_LOAD = ("tests.integrations.parallel_jobs", "tests.integrations.deepspeed_jobs", "lightning.pytorch")
STEPS = 68
OPTIONS: dict[str, Any] = {
    "causal": True, "first_step": 3, "every_n_steps": 32, "repeats": 1, "profiled_steps": 2, "max_overhead": None,
    "advanced": {"spread": False}, "power": False, "strict": True,
}  # fmt: skip
STAGES = {"zero2": 2, "zero3": 3}


def _digest(rank: int, job: str, folder: str) -> str:
    """With causal windows if there is a folder for their record."""
    from tests.integrations import deepspeed_jobs, parallel_jobs

    if job in STAGES:
        from overlap_callbacks.integrations.deepspeed import attach

        of_zero = deepspeed_jobs.Training(rank, deepspeed_jobs.config(STAGES[job]))
        monitor = attach(of_zero.engine, run_dir=folder, **OPTIONS) if folder else None
        for _ in range(STEPS):
            of_zero.step()
        digest = of_zero.digest()
    else:
        training = parallel_jobs.Training(rank, getattr(parallel_jobs, job))
        monitor = training.attach(run_dir=folder, sinks=None, **OPTIONS) if folder else None
        for _ in range(STEPS):
            training.step()
        digest = training.digest()
    if monitor is not None:
        monitor.close()
    return digest


def _both(rank: int, job: str, folder: str) -> tuple[str, str]:
    if job in STAGES:
        from tests.integrations import deepspeed_jobs

        deepspeed_jobs.set_up(rank)
    return _digest(rank, job, ""), _digest(rank, job, folder)


@pytest.mark.parametrize("job", at_night(["ddp", "fsdp2", "zero2", "zero3", "fsdp1"], ["zero2", "fsdp2", "fsdp1"]))
def test_training_with_delays_has_the_same_bits(job: str, tmp_path: Path) -> None:
    if job in STAGES and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    for plain, delayed in run_ranks(_both, 2, job, str(tmp_path), timeout_s=120):
        assert plain == delayed
    (window,) = record.read(tmp_path).causal
    assert window.delayed.delay_ms > 0
    assert set(window.levels) == {0, 1, 2}
    assert window.missed == 0
    # The last steps are profiled, and delay nothing.
    assert {(row.collective, row.name) for row in window.names} == {row_of(one) for one in window.delayed.members}
    assert all(row.exposed_ms + row.hidden_ms > 0 for row in window.names)


def _megatron(rank: int, folder: str) -> tuple[str, str]:
    """Two stages of two tensor-parallel ranks: three of the four groups of each kind are without rank 0."""
    from tests.integrations import megatron_jobs as jobs
    from tests.integrations import megatron_shims

    megatron_shims.install()
    setup, sinks = jobs.FOUR_RANKS["tp_pp"], [JsonlSink(folder)]
    plain = jobs.train_absent(setup, STEPS)
    with jobs.job(setup) as training:
        monitor = jobs.attach(training.model, training.optimizer, sinks=sinks, **OPTIONS)
        for _ in range(STEPS):
            training.step()
        monitor.close()
        return plain, training.digest()


def test_megatron_jobs_of_tensor_and_pipeline_parallelism_are_delayed_in_all_stages(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-core is not installed")
    for plain, delayed in run_ranks(_megatron, 4, str(tmp_path), timeout_s=180):
        assert plain == delayed
    (window,) = record.read(tmp_path).causal
    assert {member.group for member in window.delayed.members} == {"tensor"}
    assert window.missed == 0
    assert len(set(window.delayed.members)) == len(window.delayed.members)


def _lightning(rank: int, folder: str) -> tuple[str, str]:
    from tests.integrations import test_lightning as of_lightning

    digests = []
    for callbacks in ([], [of_lightning.overlap_callback(run_dir=folder, **{**OPTIONS, "advanced": None})]):
        model = of_lightning.Regression()
        of_lightning.trainer(rank, folder, *callbacks, max_steps=STEPS).fit(model, of_lightning.batches(rank, STEPS))
        digests.append(of_lightning.digest(model))
    return digests[0], digests[1]


def test_lightning_jobs_are_delayed(tmp_path: Path) -> None:
    for plain, delayed in run_ranks(_lightning, 2, str(tmp_path), timeout_s=120):
        assert plain == delayed
    (window,) = record.read(tmp_path).causal
    assert window.missed == 0
    assert window.delayed.delay_ms > 0
