"""The plan of a study, from the user's options and the machine; and what it cannot train. Pure."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Mapping
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.analysis.communication.model_shape import count_parameters
from overlap_callbacks.analysis.study import Configuration, StudyStart
from overlap_callbacks.experiments.capping import refuse_on_cpu
from overlap_callbacks.experiments.machine import Machine
from overlap_callbacks.experiments.study.models import MODELS, TABLE_II, WINDOW_STEPS, Model, Transformer
from overlap_callbacks.experiments.sweep import chosen

GLOO, NCCL = "gloo", "nccl"
STRATEGIES = ("ddp", "fsdp2", "zero3", "tp", "pp")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
# Measured steps of each mode: in the study, and in a quick run.
FULL_STEPS, QUICK_STEPS = 25, 10
# A job that takes longer has failed.
QUICK_TIMEOUT_S, FULL_TIMEOUT_S = 600.0, 3600.0
_MAX_CONFIGURATIONS, _MAX_RANKS, _MAX_BATCH, _MAX_STEPS = 500, 1024, 65_536, 1000
_MIN_SCALE = 0.01
# Small enough for two CPU cores to train in a few seconds.
_CPU_SCALE = 0.0625


def check(asked: Mapping[str, Any]) -> None:
    """Reject impossible options before the machine is examined; ``asked`` as in ``make_start``.

    A TypeError or ValueError names the option, its value and what is allowed.
    """
    found = chosen(asked)
    for option, name, allowed in (
        ("--model", "models", tuple(MODELS)),
        ("--strategy", "strategies", STRATEGIES),
        ("--precision", "precisions", PRECISIONS),
    ):
        for value in found.get(name, ()):
            _validation.one_of(option, value, allowed)
    for batch in found.get("batches", ()):
        _validation.count("--batch", batch, minimum=1, maximum=_MAX_BATCH)
    if "ranks" in found:
        _validation.count("--ranks", found["ranks"], minimum=2, maximum=_MAX_RANKS)
    if "steps" in found:
        _validation.count("--steps", found["steps"], minimum=1, maximum=_MAX_STEPS)
    if "scale" in found and not _MIN_SCALE <= found["scale"] <= 1:
        raise ValueError(f"--scale must be from {_MIN_SCALE:g} to 1, got {found['scale']:g}")


def make_start(asked: Mapping[str, Any], machine: Machine, *, quick: bool = True) -> StudyStart:
    """The first line of a study.

    Args:
        asked: the user's options, checked: ``models``, ``strategies``, ``precisions``, ``batches``, ``power_caps_w``
            and ``clock_caps_mhz`` to combine; ``ranks``, ``scale`` and ``steps`` as in ``StudyStart``.
        machine: this one.
        quick: whether the defaults are those of a few minutes.

    Raises:
        ValueError: there are too many configurations, or too few GPUs.
    """
    on_gpu = machine.has_link
    found = chosen(asked)
    if not on_gpu:
        refuse_on_cpu(found)
    found = {**_defaults(machine, quick=quick), **found}
    ranks = found["ranks"]
    if on_gpu and ranks > machine.num_gpus:
        raise ValueError(f"--ranks must be at most the {machine.num_gpus} GPUs of this host, one a rank, got {ranks}")
    return StudyStart(
        configurations=_configurations(found),
        ranks=ranks,
        scale=found["scale"],
        # Whole windows.
        steps=WINDOW_STEPS * math.ceil(found["steps"] / WINDOW_STEPS),
        device=machine.device,
        link=NCCL if on_gpu else GLOO,
        versions=machine.versions,
        started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        options={"threads": max(1, machine.cores // ranks), "quick": quick},
    )


def _defaults(machine: Machine, *, quick: bool) -> dict[str, Any]:
    on_gpu = machine.has_link
    batches = (8, 16, 32, 64) if on_gpu else (1, 2, 4, 8)
    return {
        "models": TABLE_II[:1] if quick else TABLE_II,
        "strategies": ("ddp", "fsdp2", "pp"),
        "precisions": ("bf16",) if on_gpu else ("fp32",),
        "batches": (1, 4) if quick else batches,
        "power_caps_w": (None,),
        "clock_caps_mhz": (None,),
        "ranks": machine.num_gpus if on_gpu else 2,
        "scale": 1.0 if on_gpu else _CPU_SCALE,
        "steps": QUICK_STEPS if quick else FULL_STEPS,
    }


def _configurations(combined: Mapping[str, Any]) -> tuple[Configuration, ...]:
    """All combinations, ordered so that those to compare are adjacent."""
    names = ("models", "precisions", "batches", "power_caps_w", "clock_caps_mhz", "strategies")
    found = [
        Configuration(
            model=model, strategy=strategy, batch=batch, precision=precision, power_cap_w=power, clock_cap_mhz=clock
        )
        for model, precision, batch, power, clock, strategy in itertools.product(*[combined[name] for name in names])
    ]
    if len(found) > _MAX_CONFIGURATIONS:
        raise ValueError(f"that makes {len(found)} configurations, and at most {_MAX_CONFIGURATIONS} are allowed")
    return tuple(found)


def difference(start: StudyStart, machine: Machine) -> str:
    """Why a study cannot be resumed here; empty if it can."""
    if start.device != machine.device:
        return f"it was begun on {start.device}, and this is {machine.device}: begin a new study"
    for name in ("torch", "deepspeed"):
        was, now = start.versions.get(name, "none"), machine.versions.get(name, "none")
        if was != now:
            return f"it was begun with {name} {was}, and {now} is installed now: begin a new study"
    if start.link == NCCL and machine.num_gpus < start.ranks:
        return f"it was begun with {start.ranks} GPUs, and {machine.num_gpus} are here: begin a new study"
    return ""


# -- what a machine cannot train, as far as that is known before trying

# NVIDIA supports TF32 and BF16 from Ampere on.
_NEEDED = {"tf32": (8, 0), "bf16": (8, 0)}
# Strategies in which each rank holds only its part of the weights.
_DIVIDED = ("fsdp2", "zero3", "tp", "pp")
# Bytes per weight in 32 bit: itself, its gradient, and AdamW's two moments.
_WEIGHT_BYTES = 16
# Bytes of activations per token, layer and unit of width in 32 bit: inputs of eight matrix products, of the norms and
# of the activation function ("Reducing Activation Recomputation in Large Transformer Models" (2022), eq. 1 without the
# part of unfused attention, at twice the bytes).
_ACTIVATION_BYTES = 68
# Maximum share of free memory that a job may take.
_MEMORY_SHARE = 0.8
_GIB = 2**30


def why_not(configuration: Configuration, model: Model, ranks: int, link: str, machine: Machine) -> str:
    """Why a machine cannot train a configuration of a model over a link; empty if it may work."""
    return (
        _precision(configuration, link, machine)
        or _strategy(configuration, model, ranks, machine)
        or _memory(configuration, model, ranks, link, machine)
    )


def _precision(configuration: Configuration, link: str, machine: Machine) -> str:
    precision = configuration.precision
    if link == GLOO:
        return "tf32 needs a GPU: a CPU multiplies in fp32, fp16 and bf16" if precision == "tf32" else ""
    if precision == "tf32" and machine.is_amd:
        return f"tf32 is for NVIDIA GPUs, and this is {machine.device}"
    needed = _NEEDED.get(precision)
    if needed is None or machine.capability is None or machine.capability >= needed:
        return ""
    found = ".".join(map(str, machine.capability))
    return f"{precision} needs compute capability {needed[0]}.{needed[1]}, {machine.device} has {found}"


def _strategy(configuration: Configuration, model: Model, ranks: int, machine: Machine) -> str:
    strategy = configuration.strategy
    if strategy == "zero3" and "deepspeed" not in machine.versions:
        return "DeepSpeed is not installed: pip install deepspeed"
    if strategy == "tp":
        if not isinstance(model, Transformer):
            return f"tensor parallelism splits attention and MLP, and a {model.kind} has neither"
        heads = model.shape.kv_heads or model.shape.heads
        if heads % ranks:
            return f"tensor parallelism gives each rank whole heads, and {heads} do not divide by {ranks}"
    if strategy == "pp" and model.num_blocks < ranks:
        return f"{model.num_blocks} blocks do not make {ranks} stages of a pipeline"
    return ""


def _memory(configuration: Configuration, model: Model, ranks: int, link: str, machine: Machine) -> str:
    """CPU only: a GPU reports too little memory itself, but a host that runs out ends other programs too."""
    if link != GLOO or machine.free_bytes is None or not isinstance(model, Transformer):
        return ""
    shape = model.shape
    holders = 1 if configuration.strategy in _DIVIDED else ranks
    tokens = configuration.batch * shape.sequence * ranks
    # Logits, their logarithms and their gradient.
    activations = tokens * (shape.layers * shape.hidden * _ACTIVATION_BYTES + 3 * 4 * shape.vocabulary)
    needed = _WEIGHT_BYTES * count_parameters(shape) * holders + activations
    if needed <= _MEMORY_SHARE * machine.free_bytes:
        return ""
    return (
        f"it needs some {needed / _GIB:,.1f} GiB of memory, and {machine.free_bytes / _GIB:,.1f} GiB are free: "
        "lower --scale or --batch"
    )
