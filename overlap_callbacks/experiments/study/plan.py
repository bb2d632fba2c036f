"""Makes the plan of a study from what a user asked for and what this machine has. Pure."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.analysis.results.study import Configuration, StudyStart
from overlap_callbacks.experiments.capping import refuse_on_cpu
from overlap_callbacks.experiments.study.job_spec import WINDOW_STEPS
from overlap_callbacks.experiments.study.machine import Machine
from overlap_callbacks.experiments.study.models import MODELS
from overlap_callbacks.experiments.study.refusals import GLOO, NCCL

STRATEGIES = ("ddp", "fsdp2", "zero3", "tp", "pp")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
# Measured steps of each mode: the study's, and those of a quick look.
FULL_STEPS, QUICK_STEPS = 25, 10
# What a quick study takes at most.
QUICK_MINUTES = 5.0
# After so long a job has failed.
QUICK_TIMEOUT_S, FULL_TIMEOUT_S = 600.0, 3600.0
_MAX_CONFIGURATIONS, _MAX_RANKS, _MAX_BATCH, _MAX_STEPS = 500, 1024, 65_536, 1000
_MIN_SCALE = 0.01
# What two CPU cores train in some seconds.
_CPU_SCALE = 0.0625


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asked for; None, or empty, where nothing was said.

    Attributes:
        quick: whether the defaults are those of a few minutes.
        models, strategies, precisions, batches: to combine.
        power_caps_w, clock_caps_mhz: to combine with all of them.
        ranks, scale, steps: as in ``StudyStart``.
    """

    quick: bool = True
    models: Sequence[str] = ()
    strategies: Sequence[str] = ()
    precisions: Sequence[str] = ()
    batches: Sequence[int] = ()
    power_caps_w: Sequence[float | None] = ()
    clock_caps_mhz: Sequence[float | None] = ()
    ranks: int | None = None
    scale: float | None = None
    steps: int | None = None


def check(asked: Asked) -> None:
    """Refuse what no machine can do, before this one is looked at.

    Raises:
        TypeError, ValueError: the message names the option, what was given and what is allowed.
    """
    for option, values, allowed in (
        ("--model", asked.models, tuple(MODELS)),
        ("--strategy", asked.strategies, STRATEGIES),
        ("--precision", asked.precisions, PRECISIONS),
    ):
        for value in values:
            _validation.one_of(option, value, allowed)
    for batch in asked.batches:
        _validation.count("--batch", batch, minimum=1, maximum=_MAX_BATCH)
    if asked.ranks is not None:
        _validation.count("--ranks", asked.ranks, minimum=2, maximum=_MAX_RANKS)
    if asked.steps is not None:
        _validation.count("--steps", asked.steps, minimum=1, maximum=_MAX_STEPS)
    if asked.scale is not None and not _MIN_SCALE <= asked.scale <= 1:
        raise ValueError(f"--scale must be from {_MIN_SCALE:g} to 1, got {asked.scale:g}")


def make_start(asked: Asked, machine: Machine) -> StudyStart:
    """The first line of a study.

    Args:
        asked: what the user asked for; checked.
        machine: this one.

    Raises:
        ValueError: there are too many configurations, or too few GPUs.
    """
    on_gpu = machine.has_link
    if not on_gpu:
        refuse_on_cpu(asked.power_caps_w, asked.clock_caps_mhz)
    ranks = asked.ranks or (machine.num_gpus if on_gpu else 2)
    if on_gpu and ranks > machine.num_gpus:
        raise ValueError(f"--ranks must be at most the {machine.num_gpus} GPUs of this host, one a rank, got {ranks}")
    steps = asked.steps or (QUICK_STEPS if asked.quick else FULL_STEPS)
    return StudyStart(
        configurations=_configurations(asked, on_gpu),
        ranks=ranks,
        scale=asked.scale or (1.0 if on_gpu else _CPU_SCALE),
        # Whole windows.
        steps=WINDOW_STEPS * math.ceil(steps / WINDOW_STEPS),
        device=machine.device,
        link=NCCL if on_gpu else GLOO,
        versions=machine.versions,
        started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        options={"threads": max(1, machine.cores // ranks), "quick": asked.quick},
    )


def _configurations(asked: Asked, on_gpu: bool) -> tuple[Configuration, ...]:
    """All combinations, so ordered that those that are compared stand together."""
    defaults = _quick(on_gpu) if asked.quick else _full(on_gpu)
    found = [
        Configuration(
            model=model, strategy=strategy, batch=batch, precision=precision, power_cap_w=power, clock_cap_mhz=clock
        )
        for model, precision, batch, power, clock, strategy in itertools.product(
            _distinct(asked.models) or defaults["models"],
            _distinct(asked.precisions) or defaults["precisions"],
            _distinct(asked.batches) or defaults["batches"],
            _distinct(asked.power_caps_w) or (None,),
            _distinct(asked.clock_caps_mhz) or (None,),
            _distinct(asked.strategies) or defaults["strategies"],
        )
    ]
    if len(found) > _MAX_CONFIGURATIONS:
        raise ValueError(f"that makes {len(found)} configurations, and at most {_MAX_CONFIGURATIONS} are allowed")
    return tuple(found)


def _quick(on_gpu: bool) -> dict[str, Any]:
    return {
        "models": ("gpt3-xl",),
        "strategies": ("ddp", "fsdp2", "pp"),
        "precisions": ("bf16",) if on_gpu else ("fp32",),
        "batches": (1, 4),
    }


def _full(on_gpu: bool) -> dict[str, Any]:
    return {
        "models": ("gpt3-xl", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "llama2-13b"),
        "strategies": ("ddp", "fsdp2", "pp"),
        "precisions": ("bf16",) if on_gpu else ("fp32",),
        "batches": (8, 16, 32, 64) if on_gpu else (1, 2, 4, 8),
    }


def difference(start: StudyStart, machine: Machine) -> str:
    """Why a study that was begun cannot go on here, in a sentence; empty if it can."""
    if start.device != machine.device:
        return f"it was begun on {start.device}, and this is {machine.device}: begin a new study"
    for name in ("torch", "deepspeed"):
        was, now = start.versions.get(name, "none"), machine.versions.get(name, "none")
        if was != now:
            return f"it was begun with {name} {was}, and {now} is installed now: begin a new study"
    if start.link == NCCL and machine.num_gpus < start.ranks:
        return f"it was begun with {start.ranks} GPUs, and {machine.num_gpus} are here: begin a new study"
    return ""


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
