"""Kineto traces that are made here, in the forms in which torch has written them: for tests and benchmarks.

Training with two streams: compute on one, collectives on the other, each launched by the host a little before it runs.
All times are in whole nanoseconds, so that what is read back can be held against them exactly.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# As the files of 2024 and later have it; those before counted from 1970.
BASE_NS = 4_458_676_416_788_066

GEMM = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_nn>(Params)"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*, 3> >()"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

METADATA = {
    "Collective name": "allreduce", "In msg nelems": 1_000_000, "Out msg nelems": 1_000_000, "Group size": 2,
    "dtype": "Float", "In split size": "[]", "Out split size": "[]", "Process Group Name": "0",
    "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]",
}  # fmt: skip

Event = dict[str, Any]


class Nanoseconds(int):
    """A time that is written as microseconds: with three digits after the point, or none."""


def kernel(
    name: str, start: int, end: int, correlation: int, *, stream: int = 7, device: int = 0, grid: Any = (8, 1, 1),
    **args: Any,
) -> Event:  # fmt: skip
    """A kernel from ``start`` to ``end``, ns from the trace's beginning."""
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream,
        "ts": Nanoseconds(BASE_NS + start), "dur": Nanoseconds(end - start),
        "args": {
            "External id": correlation, "queued": 0, "device": device, "context": 1, "stream": stream,
            "correlation": correlation, "grid": list(grid), "block": [128, 1, 1], **args,
        },
    }  # fmt: skip


def launch(time: int, correlation: int, *, thread: int = 100) -> Event:
    """The host's call that launched a kernel."""
    return {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread,
        "ts": Nanoseconds(BASE_NS + time), "dur": Nanoseconds(4_000),
        "args": {"External id": correlation, "cbid": 211, "correlation": correlation},
    }  # fmt: skip


def host_range(
    name: str, start: int, end: int, *, cat: str = "user_annotation", thread: int = 100, **args: Any
) -> Event:
    """A range of the host: an operator (``cat="cpu_op"``), a step, a collective of torch's or Gloo's."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread,
        "ts": Nanoseconds(BASE_NS + start), "dur": Nanoseconds(end - start), "args": args,
    }  # fmt: skip


def step(number: int, start: int, end: int) -> Event:
    return host_range(f"ProfilerStep#{number}", start, end)


def job(rank: int = 0, world_size: int = 2) -> dict[str, Any]:
    """The fields before the events."""
    return {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}


def training(
    steps: int = 3, layers: int = 8, *, seed: int = 0, slowdown: float = 0.0, overlapped: bool = True,
    metadata: bool = True, operators: int = 3,
) -> Iterator[Event]:  # fmt: skip
    """Events of a training job: each layer a GEMM, a norm and an addition, and an all-reduce of its gradients.

    Args:
        slowdown: how much longer a kernel of compute takes for the part of it beside an all-reduce.
        overlapped: whether the all-reduces run beside the next layers; else between them, with compute waiting.
        operators: operators of the host for each kernel, and as many flow events: what a real trace is full of.
    """
    shape = random.Random(seed)
    durations = [[shape.randrange(20_000, 60_000), shape.randrange(5_000, 9_000), 4_321] for _ in range(layers)]
    correlations = itertools.count(1)
    now = 0
    for number in range(steps):
        begin = compute = comm = now
        yield host_range("Optimizer.step#SGD.step", begin, begin + 1_000, cat="cpu_op")
        for layer, times in enumerate(durations):
            for name, alone in zip((GEMM, NORM, ADD), times, strict=True):
                beside = max(0, min(comm, compute + alone) - compute)
                end = compute + alone + round(beside * slowdown)
                correlation = next(correlations)
                yield from _host_side(max(begin, compute - 9_000), correlation, operators)
                yield kernel(name, compute, end, correlation, grid=(layer + 1, 1, 1))
                compute = end + 500
            correlation = next(correlations)
            start = max(compute, comm + 1_000)
            comm = start + 45_000
            yield from _host_side(max(begin, start - 9_000), correlation, operators)
            yield host_range("nccl:all_reduce", max(begin, start - 9_500), start)
            yield kernel(ALL_REDUCE, start, comm, correlation, stream=20, **(METADATA if metadata else {}))
            if not overlapped:
                compute = comm + 500
        now = max(compute, comm) + 2_000
        yield step(number + 4, begin, now - 1)


def _host_side(time: int, correlation: int, operators: int) -> Iterator[Event]:
    for i in range(operators):
        yield host_range("aten::addmm", time + i, time + 7_000 - i, cat="cpu_op", **{"External id": correlation})
        yield {"ph": "s", "id": correlation, "pid": 1, "tid": 100, "ts": Nanoseconds(BASE_NS + time), "cat": "ac2g",
               "name": "ac2g"}  # fmt: skip
    yield launch(time + 1_000, correlation)


def text(events: Iterable[Event], *, style: str = "pretty", whole_us: bool = False, **head: Any) -> bytes:
    """A trace as torch writes it.

    Args:
        events: may hold ``Nanoseconds``.
        style: ``pretty`` (Kineto's own), ``line`` (all on one line), ``compact`` (without spaces), ``array`` (the
            events alone).
        whole_us: times in whole microseconds, as before 2024.
        head: other fields of the document.
    """
    separators = (",", ":") if style == "compact" else (", ", ": ")
    lines = [_dumps(event, separators, whole_us) for event in events]
    if style == "array":
        return ("[\n" + ",\n".join(lines) + "\n]").encode()
    fields = "".join(
        f"{json.dumps(name)}{separators[1]}{json.dumps(value)}{separators[0]}" for name, value in head.items()
    )
    if style != "pretty":
        body = separators[0].join(lines)
        return f'{{{fields}"traceEvents"{separators[1]}[{body}]{separators[0]}"traceName"{separators[1]}"t"}}'.encode()
    body = ",\n".join("  " + line.replace('"args": {', '\n    "args": {\n      ', 1) for line in lines)
    tail = '  ],\n  "traceName": "t.json",\n  "displayTimeUnit": "ms"\n}'
    return f'\n{{\n  {fields}\n  "traceEvents": [\n{body}\n{tail}'.encode()


def _dumps(event: Event, separators: tuple[str, str], whole_us: bool) -> str:
    marked = {key: f"@{value:d}@" if isinstance(value, Nanoseconds) else value for key, value in event.items()}

    def microseconds(found: re.Match[str]) -> str:
        nanoseconds = int(found.group(1))
        if whole_us:
            return str(nanoseconds // 1000)
        sign, magnitude = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
        return f"{sign}{magnitude // 1000}.{magnitude % 1000:03d}"

    return re.sub(r'"@(-?\d+)@"', microseconds, json.dumps(marked, separators=separators))


def write(path: Path, events: Iterable[Event], **options: Any) -> Path:
    """Write a trace; gzipped where the name ends so. Returns the path."""
    content = text(events, **options)
    path.write_bytes(gzip.compress(content, compresslevel=1) if path.suffix == ".gz" else content)
    return path
