"""What marking the parts of every step adds to a step, of ``overhead.py``: equal models beside each other."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def parts_of_a_step(rounds: int) -> dict[str, dict[str, float]]:
    """What marking the parts adds to a step, by what is attached to."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    added = {
        arm: _beside_twins(rounds, cold=False, **options) | _beside_twins(rounds // 4, cold=True, **options)
        for arm, options in (("optimizer", {"with_model": False}), ("model", {"with_model": True}))
    }
    dist.destroy_process_group()
    return added


def _beside_twins(rounds: int, *, cold: bool, with_model: bool) -> dict[str, float]:
    """Paired steps, in random order, of equal models: one has the library. ``cold``: other data was used between.

    CPU time of the training thread; ``reporting_us``: of the library's own, by the step.
    """
    from overlap_callbacks.integrations.pytorch import attach

    twins, run = {}, torch.autograd._engine_run_backward
    runs = dict.fromkeys(("absent", "with", "again", "empty"), run)
    for arm in runs:
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        twins[arm] = net, torch.optim.SGD(net.parameters(), lr=1e-6)
    _hook_nothing(*twins["empty"], with_model=with_model)
    net, optimizer = twins["with"]
    model = net if with_model else None
    monitor = attach(optimizer, model=model, sinks=[], power=False, first_step=10**8, every_n_steps=10**8)
    runs["with"] = torch.autograd._engine_run_backward

    def passed_on(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    runs["empty"] = passed_on if with_model else run
    times: dict[str, list[float]] = {arm: [] for arm in twins}
    batch, others, order = torch.ones(8, 8), torch.ones(2**21), random.Random(0)
    own_ns = time.process_time_ns() - time.thread_time_ns()
    for number in range(rounds + 100):
        for arm in order.sample(list(twins), len(twins)):
            net, optimizer = twins[arm]
            torch.autograd._engine_run_backward = runs[arm]
            if cold:
                others.sum()
            begun_ns = time.thread_time_ns()
            net(batch).sum().backward()
            optimizer.step()
            ended_ns = time.thread_time_ns()
            if number >= 100:
                times[arm].append((ended_ns - begun_ns) / 1e3)
    own_ns = time.process_time_ns() - time.thread_time_ns() - own_ns
    torch.autograd._engine_run_backward = runs["with"]
    monitor.close()
    figures = {}
    for kind, arm, base in (
        ("", "with", "absent"), ("over_empty_", "with", "empty"), ("empty_", "empty", "absent"),
        ("noise_", "again", "absent"),
    ):  # fmt: skip
        added = _added(times[arm], times[base])
        figures |= {f"{'cold_' if cold else ''}{kind}{key}": value for key, value in added.items()}
    return figures if cold else figures | {"reporting_us": own_ns / (rounds + 100) / 1e3, "load": os.getloadavg()[0]}


def _hook_nothing(net: nn.Module, optimizer: torch.optim.Optimizer, *, with_model: bool) -> None:
    """A function that does nothing wherever the library has one: what torch's own calls of them cost."""

    def nothing(*_: Any) -> None:
        pass

    def again(*_: Any) -> None:
        queue(nothing)

    queue = torch.autograd.Variable._execution_engine.queue_callback
    optimizer.register_step_pre_hook(nothing)
    optimizer.register_step_post_hook(nothing)
    done = nothing if with_model else again
    list(net.parameters())[-1].register_hook(lambda gradient: queue(done))
    if with_model:
        net.register_forward_pre_hook(nothing)


def _added(times: Sequence[float], without: Sequence[float]) -> dict[str, float]:
    """Median of the differences, with its 95 % interval; and the difference of the fastest tenths."""
    from scipy import stats

    added = sorted(one - other for one, other in zip(times, without, strict=True))
    below = int(stats.binom.ppf(0.025, len(added), 0.5))
    low, high = added[max(below - 1, 0)], added[len(added) - max(below, 1)]
    fastest = [sorted(values)[len(values) // 10] for values in (times, without)]
    return {"us": statistics.median(added), "low": low, "high": high, "undisturbed_us": fastest[0] - fastest[1]}


def show_parts(show: Callable[..., None], found: Mapping[str, Mapping[str, float]]) -> None:
    """Show what ``parts_of_a_step`` has found."""
    for arm, name in (("optimizer", "with the optimizer alone"), ("model", "with the model")):
        parts = found[arm]
        interval = f"95 % interval {parts['low']:.1f} to {parts['high']:.1f}"
        shown = f"{parts['us']:.1f} us ({interval}), undisturbed {parts['undisturbed_us']:.1f}"
        show(f"parts of a step, {name}", f"{shown}; load {parts['load']:.1f}", **parts)
        for prefix, what in (
            ("empty_", "of it by empty functions in the same places"),
            ("over_empty_", "the library's own"),
            ("cold_", "after other work"),
            ("cold_empty_", "after other work, of it by empty functions"),
            ("cold_over_empty_", "after other work, the library's own"),
            ("noise_", "the machine's noise, absent / absent"),
        ):
            us, low, high, fastest = (parts[f"{prefix}{key}"] for key in ("us", "low", "high", "undisturbed_us"))
            print(f"{'':<54} {what}: {us:.1f} us ({low:.1f} to {high:.1f}); undisturbed {fastest:.1f}")
