"""Figures of ``overlap bench`` with 95 % intervals, and the sizes of its messages as text. Pure.

The unit of analysis is the block: each gives one mean logarithm, and intervals are Welch's over the blocks
(``overlap_callbacks.analysis.statistics``). A figure that was not measured is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.equations import bus_factor
from overlap_callbacks.analysis.formatting import PLAIN, Style, three_digits, unit_of
from overlap_callbacks.analysis.results.bench import (
    BOTH,
    COMMUNICATION,
    COMPUTE,
    Block,
    GemmPoint,
    GemmRound,
    TransferPoint,
    TransferRound,
)
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import Sample, estimate
from overlap_callbacks.analysis.sums import grouped

_MS_PER_S, _TERA, _BYTES_PER_MS = 1e3, 1e12, 1e6


class GemmFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a point of ``gemm-allreduce``.

    Attributes:
        point: what was measured.
        flop: of a product.
        rounds: number of rounds measured.
        gemm_alone_ms, gemm_beside_ms: a product alone, and during an all-reduce.
        slowdown: of products during an all-reduce, equation 1 of arXiv 2507.03114.
        alone_tflop_s, beside_tflop_s: 10^12 floating-point operations a second of one rank.
        all_reduce_alone_ms, all_reduce_beside_ms: an all-reduce alone, and during products.
        all_reduce_slowdown: of all-reduces during products.
        alone_busbw_gb_s, beside_busbw_gb_s: bus bandwidth as nccl-tests define it, in 10^9 bytes a second.
        speedup: work done at once over that done one after the other in the same time, less 1: the rates of products
            and all-reduces beside each other, as shares of those alone, add up to 1 more. 0 if nothing is gained.
        covered: share of the products that began in the first half of the communication and ended within it. Below 1,
            long products are missing, and the slowdown is too small.
        compute_w, communication_w, both_w: mean power of a device.
        compute_mhz, communication_mhz, both_mhz: its clock.
    """

    point: GemmPoint
    flop: int
    rounds: int
    gemm_alone_ms: Estimate | None = None
    gemm_beside_ms: Estimate | None = None
    slowdown: Estimate | None = None
    alone_tflop_s: Estimate | None = None
    beside_tflop_s: Estimate | None = None
    all_reduce_alone_ms: Estimate | None = None
    all_reduce_beside_ms: Estimate | None = None
    all_reduce_slowdown: Estimate | None = None
    alone_busbw_gb_s: Estimate | None = None
    beside_busbw_gb_s: Estimate | None = None
    speedup: Estimate | None = None
    covered: float | None = None
    compute_w: Estimate | None = None
    communication_w: Estimate | None = None
    both_w: Estimate | None = None
    compute_mhz: Estimate | None = None
    communication_mhz: Estimate | None = None
    both_mhz: Estimate | None = None


class TransferFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a point of ``collectives``: time of a call, and bandwidth in 10^9 bytes a second.

    ``busbw_gb_s`` is the bus bandwidth as defined by nccl-tests: the rate on a rank's link.
    """

    point: TransferPoint
    group_size: int
    rounds: int
    time_ms: Estimate
    algbw_gb_s: Estimate
    busbw_gb_s: Estimate


def gemm_figures(rounds: Iterable[GemmRound], ranks: int) -> tuple[GemmFigures, ...]:
    """The figures of each point, in order; ``ranks`` take part in an all-reduce."""
    found: dict[GemmPoint, list[GemmRound]] = grouped(rounds, lambda measured: measured.point)
    return tuple([_of_gemm(point, found[point], ranks) for point in sorted(found, key=_place)])


def _place(point: GemmPoint) -> tuple[object, ...]:
    caps = (point.power_cap_w, point.clock_cap_mhz)
    # Points that differ only in caps are adjacent: without a cap first, then from the highest down.
    return point.dtype, point.ctas, point.message_bytes, point.n, *[0.0 if cap is None else 1 / cap for cap in caps]


def transfer_figures(rounds: Iterable[TransferRound]) -> tuple[TransferFigures, ...]:
    """The figures of each point: kinds and groups in the order of their first line, sizes ascending."""
    found: dict[TransferPoint, list[TransferRound]] = grouped(rounds, lambda measured: measured.point)
    places: dict[tuple[str, str], int] = {}
    for point in found:
        places.setdefault((point.group, point.kind), len(places))
    order = sorted(found, key=lambda point: (places[point.group, point.kind], point.message_bytes))
    return tuple([made for point in order if (made := _of_transfer(point, found[point])) is not None])


def _of_gemm(point: GemmPoint, rounds: Sequence[GemmRound], ranks: int) -> GemmFigures:
    blocks = [block for measured in rounds for block in measured.blocks]
    flop = rounds[0].flop
    gemm, beside = _logs(blocks, COMPUTE, "gemm_ms"), _logs(blocks, BOTH, "gemm_ms")
    alone, under = _logs(blocks, COMMUNICATION, "all_reduce_ms"), _logs(blocks, BOTH, "all_reduce_ms")
    wire = point.message_bytes * (bus_factor("all_reduce", ranks) or 0.0)
    flop_rate = _log(flop / _TERA * _MS_PER_S)
    bandwidth = _log(wire / _BYTES_PER_MS)
    covered = [block.covered for block in blocks if block.condition == BOTH and block.covered is not None]

    def speedup(gemm_alone: np.ndarray, comm_alone: np.ndarray, both: np.ndarray) -> float:
        return math.log(math.exp(gemm_alone[0] - both[0]) + math.exp(comm_alone[0] - both[1]))

    return GemmFigures(
        point=point,
        flop=flop,
        rounds=len(rounds),
        gemm_alone_ms=_mean(gemm),
        gemm_beside_ms=_mean(beside),
        slowdown=_change(beside, gemm),
        alone_tflop_s=_rate(flop_rate, gemm),
        beside_tflop_s=_rate(flop_rate, beside),
        all_reduce_alone_ms=_mean(alone),
        all_reduce_beside_ms=_mean(under),
        all_reduce_slowdown=_change(under, alone),
        alone_busbw_gb_s=_rate(bandwidth, alone) if wire else None,
        beside_busbw_gb_s=_rate(bandwidth, under) if wire else None,
        speedup=estimate(speedup, gemm, alone, _pairs(blocks), scale=math.expm1),
        covered=sum(covered) / len(covered) if covered else None,
        compute_w=_plain(blocks, COMPUTE, "power_w"),
        communication_w=_plain(blocks, COMMUNICATION, "power_w"),
        both_w=_plain(blocks, BOTH, "power_w"),
        compute_mhz=_plain(blocks, COMPUTE, "sm_clock_mhz"),
        communication_mhz=_plain(blocks, COMMUNICATION, "sm_clock_mhz"),
        both_mhz=_plain(blocks, BOTH, "sm_clock_mhz"),
    )


def _of_transfer(point: TransferPoint, rounds: Sequence[TransferRound]) -> TransferFigures | None:
    size = rounds[0].group_size
    logs = Sample(np.array([[_log(measured.time_ms)] for measured in rounds]), sum(found.calls for found in rounds))
    factor = bus_factor(point.kind, size)
    time = _mean(logs)
    rate = _log(point.message_bytes / _BYTES_PER_MS)
    algbw, busbw = _rate(rate, logs), _rate(rate + _log(factor or 0.0), logs)
    if time is None or algbw is None or busbw is None:
        return None
    return TransferFigures(
        point=point, group_size=size, rounds=len(rounds), time_ms=time, algbw_gb_s=algbw, busbw_gb_s=busbw
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


def _logs(blocks: Sequence[Block], condition: str, name: str) -> Sample:
    """Logarithms of a quantity of the blocks of one condition that have it."""
    chosen = [block for block in blocks if block.condition == condition and getattr(block, name) is not None]
    counts = [block.gemms if name == "gemm_ms" else block.all_reduces for block in chosen]
    values = [[_log(getattr(block, name))] for block in chosen]
    return Sample(np.array(values, dtype=np.float64).reshape(-1, 1), sum(counts))


def _pairs(blocks: Sequence[Block]) -> Sample:
    """Logarithms of both times, of the blocks in which products and all-reduces ran at the same time."""
    rows = [
        (_log(block.gemm_ms), _log(block.all_reduce_ms))
        for block in blocks
        if block.condition == BOTH and block.gemm_ms is not None and block.all_reduce_ms is not None
    ]
    return Sample(np.array(rows, dtype=np.float64).reshape(-1, 2), len(rows))


def _mean(sample: Sample) -> Estimate | None:
    return estimate(lambda means: float(means[0]), sample, scale=math.exp)


def _rate(work: float, sample: Sample) -> Estimate | None:
    """Work, as a logarithm, over time."""
    return estimate(lambda means: work - float(means[0]), sample, scale=math.exp)


def _change(beside: Sample, alone: Sample) -> Estimate | None:
    change: Callable[..., float] = lambda after, before: float(after[0] - before[0])  # noqa: E731 - one line, used once
    return estimate(change, beside, alone, scale=math.expm1)


def _plain(blocks: Sequence[Block], condition: str, name: str) -> Estimate | None:
    values = [
        [value] for block in blocks if block.condition == condition and (value := getattr(block, name)) is not None
    ]
    return estimate(
        lambda means: float(means[0]), Sample(np.array(values, dtype=np.float64).reshape(-1, 1), len(values))
    )


# -- sizes of messages, and bandwidths, as text

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST = 2**40
_RATES = (("GB/s", 1.0), ("MB/s", 1e-3), ("kB/s", 1e-6), ("B/s", 1e-9))


def bytes_of(text: str, option: str) -> int:
    """A size such as ``8``, ``64KiB`` or ``1GB`` in bytes; ValueError (naming ``option``) for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)?\s*", text, re.IGNORECASE)
    unit = _UNITS.get((found[2] or "").upper()) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if not 1 <= size <= _MOST or size != int(size):
        raise ValueError(f"{option} must be a whole number of bytes such as 8, 64KiB or 1GB, up to 1 TiB; got {text!r}")
    return int(size)


def size_in_words(size: float, space: str = " ") -> str:
    """A readable size, whole where it can be: ``16 MiB``, ``72 B``, ``953.7 MiB``."""
    name, unit = unit_of(size)
    return f"{size / unit:,.4g}{space}{name}" if unit > 1 else f"{size:.0f}{space}B"


def rate_in_words(gb_s: float, style: Style = PLAIN) -> str:
    """A bandwidth with three significant digits: ``7.43 kB/s``, ``1.66 GB/s``."""
    shown = float(f"{gb_s:.3g}")
    name, unit = next(((name, unit) for name, unit in _RATES if shown >= unit), _RATES[-1])
    return f"{three_digits(shown / unit, style)}{style.space}{name}"


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """The powers of two from ``low`` to ``high``; if there are none, ``low`` itself."""
    return tuple([2**exponent for exponent in range((low - 1).bit_length(), high.bit_length())]) or (low,)
