"""Why a machine cannot train a configuration, as far as that can be told before it is tried. Pure."""

from __future__ import annotations

from overlap_callbacks.analysis.communication.model_shape import count_parameters
from overlap_callbacks.analysis.results.study import Configuration
from overlap_callbacks.experiments.study.machine import Machine
from overlap_callbacks.experiments.study.models import Model, Transformer

GLOO, NCCL = "gloo", "nccl"
# Ampere was NVIDIA's first with TF32 and BF16.
_NEEDED = {"tf32": (8, 0), "bf16": (8, 0)}
# Strategies in which each rank holds its part of the weights only.
_DIVIDED = ("fsdp2", "zero3", "tp", "pp")
# Bytes that a weight takes in 32 bit: itself, its gradient, and AdamW's two moments.
_WEIGHT_BYTES = 16
# Bytes of activations that a token leaves in a layer, for each of its numbers, in 32 bit: inputs of eight matrix
# products, of the norms and of the activation function ("Reducing Activation Recomputation in Large Transformer
# Models" (2022), eq. 1 without the part of unfused attention, at twice the bytes).
_ACTIVATION_BYTES = 68
# Share of the free memory that a job may take.
_MEMORY_SHARE = 0.8
_GIB = 2**30


def why_not(configuration: Configuration, model: Model, ranks: int, link: str, machine: Machine) -> str:
    """The reason, in a line; empty where it may work.

    Args:
        configuration: to train.
        model: as it would be trained.
        ranks: of the job.
        link: ``gloo`` or ``nccl``.
        machine: this one.
    """
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
        if model.shape.heads % ranks:
            return f"tensor parallelism gives each rank whole heads, and {model.shape.heads} do not divide by {ranks}"
    if strategy == "pp" and model.num_blocks < ranks:
        return f"{model.num_blocks} blocks do not make {ranks} stages of a pipeline"
    return ""


def _memory(configuration: Configuration, model: Model, ranks: int, link: str, machine: Machine) -> str:
    """Of a CPU. A GPU that has too little says so itself; a host that has too little ends other programs too."""
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
