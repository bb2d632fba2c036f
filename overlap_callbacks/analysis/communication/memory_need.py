"""Memory that a rank needs for training, by a rule that is stated: it decides which layouts are feasible.

Model states: parameters and gradients in their widths, and 12 bytes a parameter of the optimizer (its 32-bit copy and
Adam's two moments; 8 where the parameters are in 32 bit themselves), divided by the ranks over which the layout splits
them. Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
equations 1 to 5, for the micro-batches that the first stage keeps. Neither fragments of the allocator nor buffers of
NCCL and of kernels are counted; leave 10 to 20 % for them.
"""

from __future__ import annotations

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.megatron import chunk_parameters
from overlap_callbacks.analysis.communication.parameters import elements, huggingface_parameters


def memory_bytes(job: JobShape) -> float:
    """Bytes that the rank with the highest need takes: model states and activations."""
    return max([_states(job, stage) + _activations(job, stage) for stage in range(job.p)])


def _states(job: JobShape, stage: int) -> float:
    d, width, gradient = job.d, job.bytes_per_value, job.bytes_per_gradient
    optimizer = 8 if job.dtype == "fp32" else 12
    if job.layout == "megatron":
        count = sum(map(elements, chunk_parameters(job, stage)))
        shards = d if job.distributed_optimizer else 1
        return count * (width + gradient + optimizer / shards)
    count = elements(huggingface_parameters(job.model))
    shards = d // job.replicas
    weights = shards if job.layout in ("fsdp2", "hsdp", "zero3") else 1
    gradients = shards if job.layout in ("fsdp2", "hsdp", "zero3", "zero2") else 1
    states = 1 if job.layout == "ddp" else shards
    return count * (width / weights + gradient / gradients + optimizer / states)


def _activations(job: JobShape, stage: int) -> float:
    model, t = job.model, job.t
    layers = sum([len(job.layers_of_chunk(stage, chunk)) for chunk in range(job.chunks)])
    token = job.micro_batch * model.sequence * model.hidden
    # In 16 bit; in 32 bit all is twice as large but for the masks of dropout, which stay as they are.
    scale = job.bytes_per_value / 2
    attention = 5 * model.heads * model.sequence / model.hidden
    if job.recompute == "full":
        layer: float = 2 * token
    else:
        replicated = 10 / t if job.sequence_parallel else 10
        layer = token * (replicated + 24 / t + (attention / t if job.recompute == "none" else 0))
    # 1F1B keeps as many micro-batches as stages follow; interleaving some more.
    kept = min(job.p - stage, job.micro_batches)
    extra = 1 + (job.p - 1) / (job.p * job.chunks) if job.chunks > 1 else 1
    return scale * layer * layers * kept * extra
