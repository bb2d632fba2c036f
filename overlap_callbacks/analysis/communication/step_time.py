"""Predicted step time, and which layouts of a job are possible and fastest.

Equation 1 is used with exact counts, and in the paper's own form. A layout is feasible if it fits into memory, by this
rule. Model states: parameters and gradients in their widths, and 12 bytes per parameter for the optimizer (its 32-bit
copy and Adam's two moments; 8 if parameters are in 32 bit), divided by the ranks over which the layout splits them.
Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equations 1 to
5, for the micro-batches that the first stage keeps. Leave 10 to 20 % for fragmentation and the buffers of NCCL and
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from overlap_callbacks import _validation
from overlap_callbacks.analysis.communication import equations
from overlap_callbacks.analysis.communication.bandwidths import DATA, PIPELINE, TENSOR, Link, term_of
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import elements, huggingface_parameters
from overlap_callbacks.analysis.communication.volumes import MessageRow, chunk_parameters, rank_rows
from overlap_callbacks.analysis.equations import ring_steps
from overlap_callbacks.analysis.name_rules import collective_of

# A forward pass is 1, its backward pass 2; recomputation adds another forward pass of the layers.
_PASSES = {"none": 3, "selective": 3, "full": 4}


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware of a job.

    Attributes:
        links: of ``tensor``, ``pipeline`` and ``data`` messages. The paper has no latency.
        peak_flop_per_s: of one device, in the precision of the job.
        utilisation: fraction of the peak reached by compute kernels.
        within, between: links within a host and between hosts, of messages without a link of their own.
        ranks_per_host: decides which of them.
    """

    links: dict[str, Link]
    peak_flop_per_s: float
    utilisation: float
    within: Link | None = None
    between: Link | None = None
    ranks_per_host: int = 1

    def links_of(self, job: JobShape) -> dict[str, Link]:
        """The links of a job's messages. Ranks are in the order tensor, data, pipeline, from host to host."""
        spans = {TENSOR: job.t, DATA: job.t * job.d, PIPELINE: job.world_size}
        found = {name: self.within if span <= self.ranks_per_host else self.between for name, span in spans.items()}
        return {name: link for name, link in found.items() if link is not None} | self.links

    def check(self) -> None:
        """Reject impossible hardware by a ValueError that names the parameter."""
        for name, link in (self.links | {"within": self.within, "between": self.between}).items():
            if link is None:
                continue
            _validation.positive(f"{name} bandwidth", link.bytes_per_s)
            _validation.seconds(f"{name} latency", link.latency_s, zero=True)
        _validation.positive("peak", self.peak_flop_per_s)
        _validation.fraction("utilisation", self.utilisation)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of equation 1, in milliseconds: rank 0, nothing overlapped.

    Attributes:
        compute_ms, tensor_ms, pipeline_ms, data_ms: compute, and communication by dimension; ``data_ms`` includes the
            embeddings' gradients and the norm of gradients.
        bubble_ms: time in which rank 0 waits for other stages.
        iteration_ms: their sum.
        hidden_ms: the step if communication overlaps compute as far as it can: the longer of the two, and the bubble.
        bubble_ratio: bubble over step, eq. 7.
        expected_bubble_ratio: (p-1)/(p-1+m), or with interleaving (p-1)/(p-1+vm).
    """

    compute_ms: float
    tensor_ms: float
    pipeline_ms: float
    data_ms: float
    bubble_ms: float
    iteration_ms: float
    hidden_ms: float
    bubble_ratio: float
    expected_bubble_ratio: float


def exact_step(job: JobShape, hardware: Hardware) -> StepTime:
    """Equation 1 with exact messages and FLOP; a stage's share of the bubble is its own micro-batch time."""
    m = job.micro_batches
    rate = hardware.utilisation * hardware.peak_flop_per_s
    compute = [flop / rate * equations.MS_PER_S for flop in per_stage_flop(job)]
    links = hardware.links_of(job)
    times = [communication_ms(rank_rows(job, stage * job.ranks_per_stage), links) for stage in range(job.p)]
    micro_batches = [compute[k] + (times[k][TENSOR] + times[k][PIPELINE]) / m for k in range(1, job.p)]
    return _step(job, m * compute[0], times[0], sum(micro_batches) / job.chunks, job.chunks)


def paper_step(job: JobShape, hardware: Hardware) -> StepTime:
    """Equation 1 in the paper's forms: equations 2 to 5, 8 and 9, with eq. 10's parameters, in 16 bit as there."""
    model, m, p, t = job.model, job.micro_batches, job.p, job.t
    rates = {name: link.bytes_per_s for name, link in hardware.links_of(job).items()}
    number = equations.parameters(
        layers=model.layers, hidden=model.hidden, vocabulary=model.vocabulary, sequence=model.sequence
    )
    message = equations.activation_bytes(job.micro_batch, model.sequence, model.hidden)
    full = job.recompute == "full"
    flop = equations.micro_batch_flop(
        parameters=number, p=p, t=t, micro_batch=job.micro_batch, sequence=model.sequence, recompute=full
    )
    compute = equations.compute_ms(
        m=m, micro_batch_flop=flop, utilisation=hardware.utilisation, peak_flop_per_s=hardware.peak_flop_per_s
    )
    times = {
        TENSOR: equations.tensor_ms(
            m=m, layers=model.layers, p=p, t=t, message_bytes=message, bytes_per_s=rates[TENSOR],
            per_layer=6 if full else 4,
        ),
        PIPELINE: equations.pipeline_ms(m=m, message_bytes=message, bytes_per_s=rates[PIPELINE], p=p),
        DATA: equations.data_ms(parameters=number, p=p, t=t, d=job.d, bytes_per_s=rates[DATA]),
    }  # fmt: skip
    bubble = equations.bubble_ms(p=p, micro_batch_ms=(compute + times[TENSOR] + times[PIPELINE]) / m)
    return _step(job, compute, times, bubble, chunks=1)


def communication_ms(rows: Iterable[MessageRow], links: Mapping[str, Link]) -> dict[str, float]:
    """Time of a rank's messages by term of equation 1: bytes on the wire over the effective bandwidth, and latency."""
    found = {TENSOR: 0.0, PIPELINE: 0.0, DATA: 0.0}
    for row in rows:
        link = links[term_of(row.dimension)]
        latency_s = row.messages * ring_steps(collective_of(row.operator), row.group_size) * link.latency_s
        found[term_of(row.dimension)] += (latency_s + row.wire_bytes / link.bytes_per_s) * equations.MS_PER_S
    return found


def _step(job: JobShape, compute: float, times: Mapping[str, float], bubble: float, chunks: int) -> StepTime:
    whole = equations.iteration_ms(compute, times[TENSOR], times[PIPELINE], times[DATA], bubble)
    return StepTime(
        compute_ms=compute,
        tensor_ms=times[TENSOR],
        pipeline_ms=times[PIPELINE],
        data_ms=times[DATA],
        bubble_ms=bubble,
        iteration_ms=whole,
        hidden_ms=max(compute, sum(times.values())) + bubble,
        bubble_ratio=equations.bubble_ratio(bubble_ms=bubble, iteration_ms=whole),
        expected_bubble_ratio=equations.expected_bubble_ratio(p=job.p, m=job.micro_batches, chunks=chunks),
    )


# -- FLOP, counted by the model's matrices; equation 11 is the same sum for an evenly split GPT


def per_stage_flop(job: JobShape) -> list[float]:
    """FLOP of one micro-batch, forward and backward, on a rank of each stage.

    Counts matrix products and attention, unmasked, like eq. 11. Selective recomputation repeats attention.
    """
    model, tokens = job.model, job.micro_batch * job.model.sequence
    attention = model.attention_flop(tokens)
    layer = _PASSES[job.recompute] * (2 * tokens * model.layer_weights + attention)
    if job.recompute == "selective":
        layer += attention
    stages = [layers * layer for layers in job.layers_of_stages]
    stages[-1] += 3 * 2 * tokens * model.hidden * model.vocabulary
    return [flop / job.t for flop in stages]


def step_flop(job: JobShape) -> float:
    """FLOP of a step on all ranks."""
    return job.d * job.micro_batches * job.t * sum(per_stage_flop(job))


# -- memory


def memory_bytes(job: JobShape) -> float:
    """Bytes on the rank that needs most: model states and activations."""
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
    token = job.micro_batch * model.sequence * model.hidden
    # In 16 bit; in 32 bit everything doubles except dropout masks.
    scale = job.bytes_per_value / 2
    attention = 5 * model.heads * model.sequence / model.hidden
    if job.recompute == "full":
        layer: float = 2 * token
    else:
        replicated = 10 / t if job.sequence_parallel else 10
        layer = token * (replicated + 24 / t + (attention / t if job.recompute == "none" else 0))
    # 1F1B keeps one micro-batch per following stage, its own included; interleaving keeps a few more.
    kept = min(job.p - stage, job.micro_batches)
    extra = 1 + (job.p - 1) / (job.p * job.chunks) if job.chunks > 1 else 1
    return scale * layer * job.layers_of_stages[stage] * kept * extra


# -- other ways to spread the job over the same ranks


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to spread a job over ``p``, ``t``, ``d`` ranks, see ``JobShape``.

    Attributes:
        infeasible: why it is impossible; empty if it is possible.
        memory_bytes: of the rank that needs most; None if it cannot be counted.
        step: predicted; None if impossible, or without hardware.
        is_asked: whether it is the job as it was described.
        saves_ms: of a step of that job, at least and at most: each may hide its communication or not. None if unknown.
    """

    p: int
    t: int
    d: int
    infeasible: str = ""
    memory_bytes: float | None = None
    step: StepTime | None = None
    is_asked: bool = False
    saves_ms: tuple[float, float] | None = None


def what_if(job: JobShape, hardware: Hardware | None, device_bytes: float | None = None) -> tuple[Choice, ...]:
    """Every (p, t, d) whose product is the number of ranks: feasible ones first, by step time.

    A manual split of layers is kept only for the job's own p. Without ``device_bytes`` memory is unlimited.
    """
    choices = [
        _choice(job, (p, t, job.world_size // (p * t)), hardware, device_bytes)
        for p in divisors(job.world_size)
        for t in divisors(job.world_size // p)
    ]

    def place(choice: Choice) -> tuple[bool, float, int, int]:
        return bool(choice.infeasible), choice.step.iteration_ms if choice.step else 0.0, choice.p, choice.t

    asked = next((choice.step for choice in choices if choice.is_asked), None)
    return tuple([_against(asked, choice) for choice in sorted(choices, key=place)])


def _against(asked: StepTime | None, choice: Choice) -> Choice:
    if asked is None or choice.step is None or choice.is_asked:
        return choice
    ends_ms = asked.hidden_ms - choice.step.iteration_ms, asked.iteration_ms - choice.step.hidden_ms
    return msgspec.structs.replace(choice, saves_ms=ends_ms)


def divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *[number // candidate for candidate in small]})


def in_layout(job: JobShape, sizes: tuple[int, int, int]) -> JobShape:
    """A job with other p, t and d."""
    p, t, d = sizes
    return msgspec.structs.replace(
        job, p=p, t=t, d=d, stages=job.stages if sizes == (job.p, job.t, job.d) else (),
        chunks=job.chunks if p > 1 else 1, sequence_parallel=job.sequence_parallel and t > 1,
    )  # fmt: skip


def _choice(
    job: JobShape, sizes: tuple[int, int, int], hardware: Hardware | None, device_bytes: float | None
) -> Choice:
    p, t, d = sizes
    own = sizes == (job.p, job.t, job.d)
    other = in_layout(job, sizes)
    try:
        other.check()
    except ValueError as error:
        return Choice(p=p, t=t, d=d, infeasible=str(error), is_asked=own)
    if not other.stages and job.model.layers % p:
        return Choice(p=p, t=t, d=d, infeasible=f"pp must divide the {job.model.layers} layers, got {p}", is_asked=own)
    need = memory_bytes(other)
    if device_bytes is not None and need > device_bytes:
        why = f"needs {need / 2**30:.1f} GiB, a device has {device_bytes / 2**30:.1f} GiB"
        return Choice(p=p, t=t, d=d, infeasible=why, memory_bytes=need, is_asked=own)
    step = exact_step(other, hardware) if hardware is not None else None
    return Choice(p=p, t=t, d=d, memory_bytes=need, step=step, is_asked=own)
