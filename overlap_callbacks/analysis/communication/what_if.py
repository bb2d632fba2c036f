"""The same job spread over the same ranks in other ways: (p, t, d), sorted by predicted step time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.memory_need import memory_bytes
from overlap_callbacks.analysis.communication.step_time import Hardware, StepTime, exact_step


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to spread a job.

    Attributes:
        p, t, d: pipeline stages, tensor-parallel ranks, data-parallel ranks.
        infeasible: why it cannot be, in words; empty if it can.
        memory_bytes: need of the rank with the highest, by the rule of ``memory_need``; None if it cannot be counted.
        step: predicted; None where it cannot be, or where no hardware was given.
    """

    p: int
    t: int
    d: int
    infeasible: str = ""
    memory_bytes: float | None = None
    step: StepTime | None = None


def what_if(job: JobShape, hardware: Hardware | None, device_bytes: float | None = None) -> tuple[Choice, ...]:
    """Every (p, t, d) whose product is the job's ranks: the feasible ones first, by step time.

    Args:
        job: model, batches and options; its own p, t and d give the number of ranks. A split of layers by hand is left
            out, since it fits one p only.
        hardware: for step times.
        device_bytes: memory of a device; None for no limit.
    """
    choices = [_choice(job, sizes, hardware, device_bytes) for sizes in _sizes(job.world_size)]
    return tuple(
        sorted(
            choices,
            key=lambda choice: (
                bool(choice.infeasible), choice.step.iteration_ms if choice.step else 0.0, choice.p, choice.t,
            ),
        )
    )  # fmt: skip


def _sizes(ranks: int) -> Iterator[tuple[int, int, int]]:
    for p in divisors(ranks):
        for t in divisors(ranks // p):
            yield p, t, ranks // (p * t)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in order."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *[number // candidate for candidate in small]})


def _choice(
    job: JobShape, sizes: tuple[int, int, int], hardware: Hardware | None, device_bytes: float | None
) -> Choice:
    p, t, d = sizes
    own = sizes == (job.p, job.t, job.d)
    other = msgspec.structs.replace(
        job, p=p, t=t, d=d, stages=job.stages if own else (), chunks=job.chunks if p > 1 else 1,
        sequence_parallel=job.sequence_parallel and t > 1,
    )  # fmt: skip
    try:
        other.check()
    except ValueError as error:
        return Choice(p=p, t=t, d=d, infeasible=str(error))
    if not other.stages and job.model.layers % p:
        return Choice(p=p, t=t, d=d, infeasible=f"pp must divide the {job.model.layers} layers, got {p}")
    need = memory_bytes(other)
    if device_bytes is not None and need > device_bytes:
        why = f"needs {need / 2**30:.1f} GiB, a device has {device_bytes / 2**30:.1f} GiB"
        return Choice(p=p, t=t, d=d, infeasible=why, memory_bytes=need)
    step = exact_step(other, hardware) if hardware is not None else None
    return Choice(p=p, t=t, d=d, memory_bytes=need, step=step)
