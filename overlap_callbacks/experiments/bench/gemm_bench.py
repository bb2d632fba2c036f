"""``overlap bench gemm-allreduce``: matrix products in each precision, and one point in one round.

A round has blocks of products, of all-reduces, and of both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from overlap_callbacks.analysis.results.bench import (
    BOTH,
    COMMUNICATION,
    COMPUTE,
    CONDITIONS,
    Block,
    GemmPoint,
    GemmRound,
)
from overlap_callbacks.experiments.bench.site import Call, Site

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
_TORCH = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# 8-bit products need Ada or Hopper, TF32 and BF16 need Ampere.
_NEEDS = {"fp8": (8, 9), "tf32": (8, 0), "bf16": (8, 0)}


def refusal(dtype: str, device: str) -> str:
    """Why a device cannot multiply in a precision; empty if it can."""
    if device == "cpu":
        if dtype in ("tf32", "fp8"):
            return f"--dtype {dtype} needs a GPU: a CPU multiplies in fp32, fp16 and bf16"
        return ""
    if dtype == "fp8" and torch.version.hip is not None:
        return "--dtype fp8 is for NVIDIA GPUs: AMD's have other 8-bit numbers"
    needed = _NEEDS.get(dtype)
    if needed is None or torch.version.hip is not None:
        return ""
    found = torch.cuda.get_device_capability()
    if found >= needed:
        return ""
    name = torch.cuda.get_device_name()
    return f"--dtype {dtype} needs compute capability {needed[0]}.{needed[1]}, {name} has {found[0]}.{found[1]}"


def usable(device: str) -> tuple[str, ...]:
    """The precisions supported by a device."""
    return tuple([dtype for dtype in DTYPES if not refusal(dtype, device)])


def message_dtype(dtype: str) -> torch.dtype:
    """The type of the numbers that are all-reduced during products of this precision."""
    return _TORCH.get(dtype, torch.bfloat16)


def product(dtype: str, n: int, device: torch.device) -> Callable[[], object]:
    """A function that multiplies two N x N matrices on a device, or enqueues that on the current stream."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    generator = torch.Generator(device).manual_seed(0)
    # Random numbers: products of zeros draw less power.
    left, right = (torch.randn(n, n, device=device, generator=generator) for _ in range(2))
    if dtype == "fp8":
        scale = torch.ones((), device=device)
        # The second operand is column-major, as the 8-bit units require.
        a, b = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    left, right = left.to(_TORCH[dtype]), right.to(_TORCH[dtype])
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def flop(n: int) -> int:
    """Floating-point operations of a product of two N x N matrices: N^3 terms, each a product and a sum."""
    return 2 * n**3


# -- one point

# A shorter call is lost in the overhead of timing.
_MIN_CALL_MS = 0.2
_MAX_GEMMS = 4096
# A trial's all-reduces last at least this many calls, so that a call that begins in the first half of them ends before
# they do.
_CALLS_BESIDE = 8
_MAX_TRANSFERS, _MAX_CALLS, _MAX_TRIALS = 64, 400, 200
_WARM_UP_CALLS, _LOOK = 2, 3


class Work(NamedTuple):
    """The work of a point: functions that run or issue one product and one all-reduce, and a product's FLOP."""

    product: Call
    transfer: Call
    flop: int


class Shape(NamedTuple):
    """Amount of work in a block; the same on all ranks.

    Attributes:
        gemms: products timed together as one call.
        calls: per trial.
        transfers: all-reduces per trial.
        trials: per block, by condition.
    """

    gemms: int
    calls: int
    transfers: int
    trials: dict[str, int]


class _Counted(NamedTuple):
    """Measurements of one rank in a block.

    Attributes:
        log_ms: sum over calls of the logarithm of a product's time.
        calls: number of counted calls.
        begun: calls that began in time to count; without transfers equal to ``calls``.
        chains_ms: duration of each trial's all-reduces.
        power_w, clock_mhz: of the device; None if not available.
    """

    log_ms: float
    calls: int
    begun: int
    chains_ms: list[float]
    power_w: float | None
    clock_mhz: float | None


def measure_gemm(point: GemmPoint, number: int, work: Work, site: Site, block_s: float) -> GemmRound:
    """Measure a point in one round. All ranks call it together, and get the same result."""
    shape = _shape(work, site, block_s)
    call = _calls_of(work.product, shape.gemms)
    blocks = [_block(condition, call, work.transfer, shape, site) for condition in CONDITIONS]
    return GemmRound(
        point=point,
        round=number,
        flop=work.flop,
        gemms_per_call=shape.gemms,
        all_reduces_per_trial=shape.transfers,
        blocks=tuple(blocks),
    )


def _shape(work: Work, site: Site, block_s: float) -> Shape:
    """Choose the amount of work in a block from a short run of each side alone; rank 0 decides. Also warms both up."""
    ranks, look = site.ranks, _WARM_UP_CALLS + _LOOK
    gemms = 1
    while True:
        call = _calls_of(work.product, gemms)
        ranks.barrier()
        times = [found.ms for found in site.trials.run(call, look, None, 0).calls[_WARM_UP_CALLS:]]
        call_ms = ranks.agree(max(statistics.median(times), 1e-6))
        if call_ms >= _MIN_CALL_MS or gemms >= _MAX_GEMMS:
            break
        gemms = min(_MAX_GEMMS, max(2 * gemms, math.ceil(gemms * _MIN_CALL_MS / call_ms)))
    ranks.barrier()
    looks = [found.ms for found in site.trials.run(None, 0, work.transfer, look).transfers[_WARM_UP_CALLS:]]
    transfer_ms = ranks.agree(max(min(looks), 1e-6))
    transfers = max(1, min(_MAX_TRANSFERS, math.ceil(_CALLS_BESIDE * call_ms / transfer_ms)))
    calls = max(1, min(_MAX_CALLS, math.ceil(transfers * transfer_ms / call_ms)))
    lengths_ms = {COMPUTE: calls * call_ms, COMMUNICATION: transfers * transfer_ms}
    lengths_ms[BOTH] = max(lengths_ms.values())
    counts = {name: max(1, min(_MAX_TRIALS, math.ceil(1e3 * block_s / ms))) for name, ms in lengths_ms.items()}
    return Shape(gemms, calls, transfers, ranks.agree(counts))


def _calls_of(product: Call, gemms: int) -> Call:
    if gemms == 1:
        return product

    def call() -> None:
        for _ in range(gemms):
            product()

    return call


def _block(condition: str, call: Call, transfer: Call, shape: Shape, site: Site) -> Block:
    site.ranks.barrier()
    start_ns = time.perf_counter_ns()
    log_ms, calls, begun, chains = 0.0, 0, 0, []
    for _ in range(shape.trials[condition]):
        site.ranks.barrier()
        trial = site.trials.run(
            None if condition == COMMUNICATION else call,
            shape.calls,
            None if condition == COMPUTE else transfer,
            shape.transfers,
        )
        counted = trial.covered()
        log_ms += sum(math.log(max(found.ms, 1e-6) / shape.gemms) for found in counted)
        calls += len(counted)
        begun += len(trial.begun_beside())
        if trial.transfers:
            chains.append(trial.transfers_ms)
    end_ns = time.perf_counter_ns()
    read = site.sensors.between(start_ns, end_ns)
    own = _Counted(log_ms, calls, begun, chains, read.power_w, read.clock_mhz)
    return _over_ranks(condition, site.ranks.gather(own), shape, (end_ns - start_ns) / 1e9)


def _over_ranks(condition: str, ranks: Sequence[_Counted], shape: Shape, length_s: float) -> Block:
    """One block of all ranks: products as a mean over ranks, all-reduces of the rank that waited least."""
    computed = [rank for rank in ranks if rank.calls]
    begun = sum(rank.begun for rank in ranks)
    counted = sum(rank.calls for rank in ranks)
    # An early rank's first all-reduce includes waiting for the others; the last rank waits for none.
    chains = [min(times) for times in zip(*[rank.chains_ms for rank in ranks], strict=True)]
    logs = [math.log(max(chain, 1e-6) / shape.transfers) for chain in chains]
    return Block(
        condition=condition,
        gemm_ms=math.exp(_mean([rank.log_ms / rank.calls for rank in computed])) if computed else None,
        gemms=counted * shape.gemms,
        covered=counted / begun if condition == BOTH and begun else None,
        all_reduce_ms=math.exp(_mean(logs)) if logs else None,
        all_reduces=len(logs) * shape.transfers,
        power_w=_mean_of(ranks, lambda rank: rank.power_w),
        sm_clock_mhz=_mean_of(ranks, lambda rank: rank.clock_mhz),
        length_s=length_s,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_of(ranks: Sequence[_Counted], read: Callable[[_Counted], float | None]) -> float | None:
    values = [value for rank in ranks if (value := read(rank)) is not None]
    return _mean(values) if values else None
