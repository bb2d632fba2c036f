"""Arms of frameworks that a job decides about: kept where ranks issue the same collectives, else recommended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from overlap_callbacks import arms
from overlap_callbacks.gate.arms import BaseArm, Keep
from overlap_callbacks.report.record import holds_runs, read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import run_ranks
from tests.integrations import parallel_jobs as jobs
from tests.monitor.jobs import tiny_schedule

pytestmark = pytest.mark.alone

# By how much a step as configured is longer than one with an arm turned.
LONGER_S = 0.015
# A busy machine needs more windows to tell.
EVERY, MOST_STEPS, KEPT_STEPS, TIMEOUT_S = 24, 2400, 20, 180.0


class Sharded:
    """FSDP2 in torch's own loop."""

    def __init__(self, rank: int) -> None:
        self.training = jobs.Training(rank, jobs.fsdp2)
        self.model = self.training.job.models[0]

    def switch(self) -> Any:
        return jobs.fsdp_options(self.model)

    def attach(self, **options: Any) -> Any:
        return self.training.attach(**options)


class Zero3:
    """DeepSpeed's ZeRO-3."""

    def __init__(self, rank: int) -> None:
        from tests.integrations import deepspeed_jobs

        deepspeed_jobs.set_up(rank)
        self.training = deepspeed_jobs.Training(rank, deepspeed_jobs.config(3))
        self.model: nn.Module = self.training.engine.module

    def switch(self) -> Any:
        from tests.integrations.deepspeed_jobs import switch_of

        return switch_of(self.training.engine)

    def attach(self, **options: Any) -> Any:
        from overlap_callbacks.integrations.deepspeed import attach

        return attach(self.training.engine, **options)


def train_plainly(rank: int, make: Callable[[int], Any], num_steps: int) -> str:
    job = make(rank)
    for _ in range(num_steps):
        job.training.step()
    return str(job.training.digest())


def train_and_decide(
    rank: int, make: Callable[[int], Any], compared: list[BaseArm], folder: str, kept: str, advised: str
) -> dict[str, Any]:
    """Trains until an arm was kept for some steps and another is advised, as far as they are named.

    Notes for each step whether an arm was turned, and whether it was of a window.
    """
    job, last = make(rank), Path(folder) / "last step"
    job.training.step()
    own, turned, within = job.switch(), [], []
    monitor = job.attach(
        arms=compared, decide=Keep(budget=1.0), schedule=tiny_schedule(repeats=2, every_n_steps=EVERY),
        sinks=[JsonlSink(folder)], max_overhead=None, strict=True,
    )  # fmt: skip

    def sleep(*_: Any) -> None:
        turned.append(job.switch() != own)
        within.append(monitor.in_window)
        time.sleep(0.0 if turned[-1] else LONGER_S)

    def is_decided() -> bool:
        decision = read(folder).decision if holds_runs(Path(folder)) else None
        found = "" if decision is None or decision.advised is None else decision.advised.arm
        kept_steps = sum(on and not of_window for on, of_window in zip(turned, within, strict=True))
        return (not advised or found == advised) and (not kept or kept_steps > KEPT_STEPS)

    job.model.register_forward_pre_hook(sleep)
    for step in range(MOST_STEPS):
        job.training.step()
        if rank == 0 and step % EVERY == EVERY - 1 and not last.exists() and is_decided():
            last.write_text(str(step + 2))  # before the collectives of the next step
        if last.exists() and int(last.read_text() or MOST_STEPS) <= step:
            break
    monitor.close()
    return {"digest": job.training.digest(), "turned": turned, "within": within, "same": job.switch() == own}


@pytest.mark.parametrize(
    ("make", "compared", "kept", "advised"),
    [
        pytest.param(
            Sharded, [arms.Prefetch(1, 0), arms.Prefetch(2, 2)], "prefetch_1_0", "prefetch_2_2", id="fsdp2-prefetch"
        ),
        pytest.param(
            Sharded, [arms.Reshard(False)], "", "no_reshard", id="fsdp2-no-reshard", marks=pytest.mark.nightly
        ),
        # tests/integrations/test_arms.py has this arm's weights for each change.
        pytest.param(
            Zero3,
            [arms.ZeroPrefetchBucket(4 * 16 * 16)],
            "zero_prefetch_bucket_1024",
            "",
            id="zero3-bucket",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_arm_is_kept_only_if_ranks_issue_the_same_collectives_in_the_same_order(
    make: Callable[[int], Any], compared: list[BaseArm], kept: str, advised: str, tmp_path: Path
) -> None:
    ranks = run_ranks(train_and_decide, 2, make, compared, str(tmp_path), kept, advised, timeout_s=TIMEOUT_S)
    record = read(tmp_path)
    assert record.decision is not None
    assert record.decision.kept == kept
    if advised:
        assert record.decision.advised is not None
        assert record.decision.advised.arm == advised
        assert "other collectives" in record.decision.advised.caution
    assert {report.arm.name for report in record.arms if report.same_order} == ({kept} if kept else set())
    for rank in ranks:
        outside = [on for on, of_window in zip(rank["turned"], rank["within"], strict=True) if not of_window]
        assert sum(outside) > KEPT_STEPS if kept else not any(outside)
        assert rank["same"]
    assert ranks[0]["turned"] == ranks[1]["turned"]
    plain = run_ranks(train_plainly, 2, make, 1 + len(ranks[0]["turned"]), timeout_s=TIMEOUT_S)
    assert [rank["digest"] for rank in ranks] == list(plain)
