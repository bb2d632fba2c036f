"""Two compiled versions of one step as an arm: a user's function swaps the callable between steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap_callbacks import arms
from tests.distributed import run_ranks
from tests.integrations.parallel_jobs import BATCH, WIDTH, Job, Training, backward_of, parallelized
from tests.monitor.jobs import tiny_schedule

STEPS = 24
INDUCTOR = {"reorder_for_compute_comm_overlap": True}
# How each version is compiled: as configured, and with the arm.
VERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "traced": ({"backend": "aot_eager"}, {"backend": "eager"}),
    "overlap scheduling": ({"options": {name: False for name in INDUCTOR}}, {"options": INDUCTOR}),
}


def train(rank: int, kind: str, *, with_arm: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    model = parallelized(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    plain, other = [torch.compile(model, **options) for options in VERSIONS[kind]]
    version = {"now": plain}
    calls: Counter[tuple[str | None, bool]] = Counter()
    for compiled in (plain, other):  # no step of a window compiles
        compiled(torch.zeros(BATCH, WIDTH)).square().mean().backward()

    def forward(batch: torch.Tensor) -> torch.Tensor:
        calls[monitor.arm if monitor is not None else None, version["now"] is other] += 1
        found: torch.Tensor = version["now"](batch)
        return found

    training = Training(rank, lambda rank: Job([model], backward_of(forward)))
    monitor = None
    if with_arm:
        arm = arms.Arm(
            "compiled_otherwise",
            on=lambda: version.update(now=other),
            off=lambda: version.update(now=plain),
            equal_results=True,
        )
        monitor = training.attach(arms=[arm], schedule=tiny_schedule(6))
    for _ in range(STEPS):
        training.step()
    if monitor is not None:
        monitor.close()
    return {"digest": training.digest(), "calls": set(calls), "left": version["now"] is plain}


@pytest.mark.parametrize("kind", ["traced", pytest.param("overlap scheduling", marks=pytest.mark.nightly)])
def test_two_compiled_versions_of_a_step_are_compared_and_weights_stay_what_they_are(kind: str) -> None:
    plain = run_ranks(train_plainly, 2, kind, timeout_s=240)
    for rank, found in enumerate(run_ranks(train_with_arm, 2, kind, timeout_s=240)):
        assert found["digest"] == plain[rank]["digest"]
        assert found["calls"] == {(None, False), ("compiled_otherwise", True)}
        assert found["left"]


def train_plainly(rank: int, kind: str) -> dict[str, Any]:
    return train(rank, kind, with_arm=False)


def train_with_arm(rank: int, kind: str) -> dict[str, Any]:
    return train(rank, kind, with_arm=True)
