"""How long a step should take: equation 1 with exact counts, and in the paper's own form."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from overlap_callbacks.analysis.communication import equations
from overlap_callbacks.analysis.communication.floating_point import per_stage_flop
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.rows import MessageRow, ring_steps
from overlap_callbacks.analysis.communication.volumes import rank_rows

# Which bandwidth a dimension's messages have. The norm's few bytes and the embeddings go with the gradients.
_TERMS = {"tensor": "tensor", "pipeline": "pipeline"}


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What a job runs on.

    Attributes:
        tensor_bytes_per_s, pipeline_bytes_per_s, data_bytes_per_s: effective bandwidth of each dimension's messages.
        peak_flop_per_s: of one device, in the precision of the job.
        utilisation: fraction of the peak that the compute kernels reach.
        tensor_latency_s, pipeline_latency_s, data_latency_s: time of each step of a ring, and of a send or receive,
            beside that of its bytes. The paper has none.
    """

    tensor_bytes_per_s: float
    pipeline_bytes_per_s: float
    data_bytes_per_s: float
    peak_flop_per_s: float
    utilisation: float
    tensor_latency_s: float = 0.0
    pipeline_latency_s: float = 0.0
    data_latency_s: float = 0.0

    def check(self) -> None:
        """Refuse what no machine has.

        Raises:
            ValueError: something is wrong; the message names the parameter.
        """
        for name, option in (
            ("tensor_bytes_per_s", "tensor bandwidth"),
            ("pipeline_bytes_per_s", "pipeline bandwidth"),
            ("data_bytes_per_s", "data bandwidth"),
            ("peak_flop_per_s", "peak"),
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{option} must be a positive, finite number, got {value:g}")
        for name in ("tensor", "pipeline", "data"):
            latency_s = getattr(self, f"{name}_latency_s")
            if not (latency_s >= 0 and math.isfinite(latency_s)):
                raise ValueError(f"{name} latency must be a finite number of at least 0, got {latency_s:g}")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation must be a fraction above 0 and at most 1, got {self.utilisation:g}")


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of equation 1, in milliseconds: rank 0, nothing overlapped.

    Attributes:
        compute_ms, tensor_ms, pipeline_ms, data_ms: compute, and communication by dimension; ``data_ms`` has the
            embeddings' gradients and the norm of gradients too.
        bubble_ms: time in which rank 0 waits for other stages.
        iteration_ms: their sum.
        bubble_ratio: bubble over step, eq. 7.
        expected_bubble_ratio: (p-1)/(p-1+m), or with interleaving (p-1)/(p-1+vm).
    """

    compute_ms: float
    tensor_ms: float
    pipeline_ms: float
    data_ms: float
    bubble_ms: float
    iteration_ms: float
    bubble_ratio: float
    expected_bubble_ratio: float


def exact_step(job: JobShape, hardware: Hardware) -> StepTime:
    """Equation 1 with counted messages and FLOP; a stage's share of the bubble is its own micro-batch's time."""
    m, stride = job.micro_batches, job.t * job.d
    rate = hardware.utilisation * hardware.peak_flop_per_s
    compute = [flop / rate * equations.MS_PER_S for flop in per_stage_flop(job)]
    times = [communication_ms(rank_rows(job, stage * stride), hardware) for stage in range(job.p)]
    micro_batches = [compute[k] + (times[k]["tensor"] + times[k]["pipeline"]) / m for k in range(job.p)]
    return _step(
        job, m * compute[0], times[0]["tensor"], times[0]["pipeline"], times[0]["data"],
        sum(micro_batches[1:]) / job.chunks,
    )  # fmt: skip


def paper_step(job: JobShape, hardware: Hardware) -> StepTime:
    """Equation 1 in the paper's forms: equations 2 to 5, 8, 9, with the parameters of eq. 10. Width 16 bit as there."""
    model, m, p, t = job.model, job.micro_batches, job.p, job.t
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
    tensor = equations.tensor_ms(
        m=m, layers=model.layers, p=p, t=t, message_bytes=message, bytes_per_s=hardware.tensor_bytes_per_s,
        per_layer=6 if full else 4,
    )  # fmt: skip
    pipeline = equations.pipeline_ms(m=m, message_bytes=message, bytes_per_s=hardware.pipeline_bytes_per_s, p=p)
    data = equations.data_ms(parameters=number, p=p, t=t, d=job.d, bytes_per_s=hardware.data_bytes_per_s)
    bubble = equations.bubble_ms(p=p, micro_batch_ms=(compute + tensor + pipeline) / m)
    return _step(job, compute, tensor, pipeline, data, bubble, chunks=1)


def communication_ms(rows: Iterable[MessageRow], hardware: Hardware) -> dict[str, float]:
    """Time of a rank's messages by term of equation 1: bytes on the wire over the effective bandwidth, and latency."""
    found = {"tensor": 0.0, "pipeline": 0.0, "data": 0.0}
    for row in rows:
        term = _TERMS.get(row.dimension, "data")
        latency_s = row.messages * ring_steps(row.operator, row.group_size) * getattr(hardware, f"{term}_latency_s")
        wire_s = row.wire_bytes / getattr(hardware, f"{term}_bytes_per_s")
        found[term] += (latency_s + wire_s) * equations.MS_PER_S
    return found


def _step(
    job: JobShape,
    compute: float,
    tensor: float,
    pipeline: float,
    data: float,
    bubble: float,
    chunks: int | None = None,
) -> StepTime:
    whole = equations.iteration_ms(compute, tensor, pipeline, data, bubble)
    return StepTime(
        compute_ms=compute,
        tensor_ms=tensor,
        pipeline_ms=pipeline,
        data_ms=data,
        bubble_ms=bubble,
        iteration_ms=whole,
        bubble_ratio=equations.bubble_ratio(bubble_ms=bubble, iteration_ms=whole),
        expected_bubble_ratio=equations.expected_bubble_ratio(
            p=job.p, m=job.micro_batches, chunks=chunks or job.chunks
        ),
    )
