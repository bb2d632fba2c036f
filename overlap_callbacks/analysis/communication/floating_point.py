"""FLOP of a step, counted by the model's matrices; equation 11 is the same sum for a GPT that is split evenly."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape

# A forward pass is 1, its backward pass 2; recomputation adds another forward pass of the layers.
_PASSES = {"none": 3, "selective": 3, "full": 4}


def micro_batch_flop(job: JobShape, stage: int) -> float:
    """FLOP of one micro-batch, forward and backward, on a rank of a stage.

    Counted are matrix products and attention's, which are counted whole although half is masked, as eq. 11 does.
    Selective recomputation repeats attention's. Logits are not computed again.
    """
    model, tokens = job.model, job.micro_batch * job.model.sequence
    layers = sum([len(job.layers_of_chunk(stage, chunk)) for chunk in range(job.chunks)])
    attention = _attention_flop(model, tokens)
    found = layers * _PASSES[job.recompute] * (2 * tokens * model.layer_weights + attention)
    if job.recompute == "selective":
        found += layers * attention
    if stage == job.p - 1:
        found += 3 * 2 * tokens * model.hidden * model.vocabulary
    return found / job.t


def step_flop(job: JobShape) -> float:
    """FLOP of a step on all ranks."""
    return job.d * job.micro_batches * job.t * sum(per_stage_flop(job))


def per_stage_flop(job: JobShape) -> Sequence[float]:
    """``micro_batch_flop`` of every stage."""
    return [micro_batch_flop(job, stage) for stage in range(job.p)]


def token_flop(model: ModelShape) -> float:
    """Model FLOP of a token, forward and backward: what a step has for each of its tokens if nothing is recomputed."""
    layers = model.layers * (2 * model.layer_weights + _attention_flop(model, 1))
    return 3 * (layers + 2 * model.hidden * model.vocabulary)


def _attention_flop(model: ModelShape, tokens: int) -> float:
    """Of a forward pass: queries times keys, and weights times values."""
    return 4 * tokens * model.sequence * model.hidden
