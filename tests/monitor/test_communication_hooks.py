"""Jobs whose DDP has a communication hook. PowerSGD's communicates in callbacks, where an earlier collective ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, Training, digest_without_library, kept_logs, new_monitor, tiny_schedule

# A window: one recorded step, and timed steps O S S O, O S S O.
FIRST_STEP, NUM_STEPS = 5, 14
# Rank 1 is late by so much that rank 0 is done with its backward pass: what its callbacks issue comes from a thread of
# Gloo's, unless the step is sequential.
LATE_S = 0.02


def hooked(kind: str) -> Any:
    def wrap(model: torch.nn.Module) -> DistributedDataParallel:
        # One bucket: with two, PowerSGD waits for ever in Gloo's two threads, with and without the library.
        parallel = DistributedDataParallel(model)
        if "post-localSGD" in kind:
            since = FIRST_STEP + 4 if "from" in kind else 3
            state: Any = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(2)[0], since)
            parallel.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        elif "PowerSGD" in kind:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            hook = powerSGD_hook.powerSGD_hook
            parallel.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook) if "fp16" in kind else hook)
        else:
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return parallel

    return wrap


def train_with_hook(rank: int, kind: str) -> dict[str, Any]:
    plain = digest_without_library(rank, NUM_STEPS, wrap=hooked(kind))
    training, sink = Training(rank, wrap=hooked(kind)), KeptReports()
    schedule = tiny_schedule(every_n_steps=9, first_step=FIRST_STEP, repeats=2)
    modes = []
    with kept_logs() as logs, new_monitor(sink, schedule=schedule) as monitor:
        for _ in range(NUM_STEPS):
            with monitor.step():
                if monitor.in_window:
                    modes.append(monitor.mode.value)
                    if rank == 1:
                        time.sleep(LATE_S)
                training.step()
    return {
        "identical": training.digest() == plain,
        "issued": list(zip(modes, [len(log.collectives) for log in logs], strict=True)),
        "windows": sink.facts(),
    }


KINDS = ["PowerSGD", "PowerSGD in fp16", "fp16", "post-localSGD", "post-localSGD from within the window"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_changes_neither_weights_nor_which_steps_count(kind: str) -> None:
    first, second = run_ranks(train_with_hook, 2, kind)
    assert first["identical"]
    assert second["identical"]
    if "PowerSGD" in kind:
        # So the numbers that are compared differ between the modes, and no step is odd.
        assert {("overlapped", 1), ("sequential", 3)} <= set(first["issued"])
    (window,) = first["windows"]
    assert window["complete"], window["problems"]
    if "from" in kind:
        return  # sequential steps are not those that were checked any more: they do not count
    assert window["blocks"] == {rank: list(range(8)) for rank in (0, 1)}
    assert not any("far more or fewer" in problem for problem in window["problems"])
    assert window["valid"], window["problems"]
