"""Windows of ranks: by chance, with all in which ranks may differ, or of kernels that are given; and their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.job.part import decode, encode, merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.by_collective import collective_calls
from overlap_callbacks.analysis.kernels.receives import Transfers
from overlap_callbacks.analysis.kernels.times import KernelSums, profiled_block
from overlap_callbacks.analysis.results.arrivals import ProfiledStep, TimedCall, TimedCalls
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, ModePower, SourceInfo, UnitUtilisation
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import (
    CollectiveTime,
    DimensionTime,
    MemoryPeak,
    ProfiledBlock,
    RankWindow,
    SmLoss,
    TimedBlock,
)
from tests.analysis.test_aggregate import rank_window
from tests.columns import columns
from tests.environments import gpu_rank
from tests.samples import OSSO, OV, SEQ, aggregate_windows, window

# Of the steps of ``measured``, each a block of its own.
ORDER = "OSSOSOOS"
MODES = [OV if letter == "O" else SEQ for letter in ORDER]


def some_windows(seed: int, number: int, *, odd: bool = True, shared: bool = True) -> list[RankWindow]:
    """The windows of so many ranks.

    Args:
        seed: of chance.
        number: of ranks.
        odd: whether some ranks lack blocks, end early, complain, or measured something else.
        shared: whether two ranks share each device.
    """
    chance = np.random.default_rng(seed)
    drift = chance.normal(0, 0.02, size=16)
    return [_window(chance, rank, drift, odd=odd, shared=shared) for rank in range(number)]


def _window(chance: np.random.Generator, rank: int, drift: Any, *, odd: bool, shared: bool) -> RankWindow:
    usual = 1 + 0.3 * chance.random()

    def around(value: float) -> float:
        return float(value * usual * np.exp(chance.normal(0, 0.01)))

    def lacks() -> bool:
        return odd and chance.random() < 0.05

    timed = tuple(
        TimedBlock(arm, n, tuple(around(100 * np.exp(drift[n]) * (1.2 if arm is SEQ else 1)) for _ in range(3)))
        for n, arm in enumerate(OSSO * 4)
        if not lacks()
    )
    few = odd and chance.random() < 0.05
    profiled = tuple(
        ProfiledBlock(
            arm, n, int(chance.integers(1, 3)), around(66 if arm is OV else 60), around(60), around(30), around(28),
            around(20) if arm is OV else around(0.1), around(22) if arm is OV else around(0.2), 0.0,
            around(1) if rank % 2 else 0.0, around(5), around(110), around(6) if rank % 7 else None,
        )
        for n, arm in enumerate(OSSO * 2)
        if not lacks() and not (few and arm is SEQ and n > 2)
    )  # fmt: skip
    if odd and chance.random() < 0.05:
        profiled = ()
    kernels = [
        KernelTime(f"kernel_{n}", False, 4, 4, around(10.0 + n), around(9.0 + n), int(chance.integers(0, 300)))
        for n in range(12)
        if chance.random() < 0.9
    ]
    kernels.append(
        KernelTime("ncclDevKernel_AllReduce_Sum", True, 4, 4, around(30), around(20), int(chance.integers(8, 33)))
    )
    group = f"tp ({rank // 4})"
    collectives = (
        CollectiveTime("allreduce_", "dp (1)", 8, "nccl", 4, 4000, 4000, around(9), "data", 4000.0, around(7), None, 0),
        CollectiveTime("allgather_", group, 4, "nccl", 4, 1000, 4000, around(5), "tensor", 4000.0, None, None,
                       rank - rank % 4),
    )  # fmt: skip
    problems, doubts, let_pass = [], [], []
    if odd:
        if chance.random() < 0.3:
            problems.append(f"{chance.integers(1, 4)} steps left out of {chance.integers(1, 3)} blocks")
        if chance.random() < 0.1:
            problems += ["the clock was late", f"{rank % 3} marks lost", f"{rank % 5} marks lost"]
        if chance.random() < 0.02:
            doubts.append(f"the profile lacks {chance.integers(1, 9)} kernels")
        if chance.random() < 0.1:
            let_pass.append(f"{chance.integers(1, 3)} sends passed")
    loss = SmLoss(132, around(20), around(20), around(15), around(1), around(2)) if chance.random() < 0.8 else None
    device = rank // 2 if shared else rank
    variables = {"NCCL_DEBUG": "WARN"} | (
        {"NCCL_MAX_CTAS": str(chance.integers(4, 7))} if chance.random() < 0.2 else {}
    )
    knows_cost = chance.random() < 0.6
    return window(
        rank,
        num_steps=65 - int(odd and chance.random() < 0.05),
        complete=not (odd and chance.random() < 0.01),
        backend="nccl",
        device="NVIDIA H200",
        wall_ms=around(9000),
        report_cpu_ms=around(500),
        lost_ms=float(chance.normal(2000, 1500)) if knows_cost else None,
        usual_step_ms=around(100) if knows_cost and chance.random() < 0.9 else 0.0,
        timed=timed,
        profiled=profiled,
        kernels=tuple(kernels) if profiled else (),
        pairs=tuple(
            PairTime(f"family_{n}", False, "all_reduce", around(4), around(8), around(30 + n), around(20))
            for n in range(4)
        ),
        dimension_pairs=(PairTime("gemm", False, "data", around(4), around(8), around(30), around(20)),),
        dimensions=(DimensionTime("data", 12, 900, around(25), around(6), around(27), around(22)),)
        + ((DimensionTime("tensor", 1, 100, around(3), around(2), around(3), around(2)),) if rank % 2 else ()),
        collectives=collectives,
        power=_power(chance, device, around) if rank % 9 else (),
        power_elsewhere=bool(rank % 2),
        problems=tuple(problems),
        doubts=tuple(doubts),
        let_pass=tuple(let_pass),
        num_sms=132,
        sm_loss=loss,
        environment=gpu_rank(rank, variables=variables, nccl="2.28.3" if rank % 11 else "2.27.1"),
        memory=tuple(
            MemoryPeak(mode, int(chance.integers(100, 200)), int(chance.integers(200, 300)) if rank % 3 else None)
            for mode in Mode
        ),
        terms="other" if odd and chance.random() < 0.01 else "usual",
    )


def _power(chance: np.random.Generator, device: int, around: Any) -> tuple[DevicePower, ...]:
    source = SourceInfo("nvml", "NVIDIA H200", f"gpu-{device}", "instantaneous", 0.1, 0.02, 0.1, tdp_w=700.0)
    measured = chance.random() < 0.9
    modes = tuple(
        ModePower(
            mode,
            avg_w=around(500) if measured else None,
            peak_w=around(600) if measured else None,
            avg_tdp_fraction=around(0.7) if measured else None,
            energy_per_step_j=around(40) if measured else None,
            avg_w_ci_low=around(490) if (with_interval := measured and chance.random() < 0.9) else None,
            avg_w_ci_high=around(510) if with_interval else None,
            energy_per_step_j_ci_low=around(39) if with_interval else None,
            energy_per_step_j_ci_high=around(41) if with_interval else None,
            energy_method=("counter" if chance.random() < 0.8 else "held samples") if measured else "",
            sm_clock_mhz=around(1500),
            throttle_fraction=float(chance.random()),
            reasons={"sw_power_cap": float(chance.random())} if chance.random() < 0.8 else None,
            parts=UnitUtilisation(0.9, None, around(0.4), around(0.3), None, around(20), 2.0),
            missing="" if measured else "blocks are too short",
            compute_clock_mhz=around(1500) if chance.random() < 0.9 else None,
            compute_clock_readings=int(chance.integers(5, 20)),
        )
        for mode in Mode
    )
    return (DevicePower(source, 0.1, 0.3, modes, problems=("late",) if chance.random() < 0.2 else ()),)


def copies(of: RankWindow, number: int) -> list[RankWindow]:
    """A real window on this many ranks, each a little slower or faster, with its own environment."""
    chance = np.random.default_rng(1)
    windows = []
    for rank in range(number):
        scale = float(np.exp(chance.normal(0, 0.02)))
        timed = tuple(
            msgspec.structs.replace(block, step_ms=tuple(time_ms * scale for time_ms in block.step_ms))
            for block in of.timed
        )
        own = {} if rank == 0 else {"pictures": (), "power_trace": None}
        windows.append(
            msgspec.structs.replace(
                of, rank=rank, timed=timed, environment=gpu_rank(rank), arrivals=timed_calls(rank, number), **own
            )
        )
    return windows


def timed_calls(rank: int, number: int) -> tuple[TimedCalls, ...]:
    """As many calls as a rank sends at most of a job of so many ranks: in its host, across hosts, and of all."""
    host = rank - rank % 8
    return tuple(
        [
            TimedCalls(operator, f"{dimension} {first}", first, size, dimension, calls)
            for dimension, first, size in (("tensor", host, 8), ("data", rank % 8, number // 8), ("world", 0, number))
            for operator in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")
            for calls in (tuple(TimedCall(20 + n // 4, n % 4, 4096 << n, 100 + rank % 7 + n) for n in range(32)),)
        ]
    )


def measured(
    rank: int, rows: Sequence[Any], issued: Mapping[int, Sequence[Any]], step_ms: Mapping[Mode, float]
) -> RankWindow:
    """What a rank measures of steps with ``MODES``, from the rows of its profile.

    Args:
        rank: its number.
        rows: as ``columns`` takes them.
        issued: the collectives that the gate saw, by step.
        step_ms: the time of a step of each mode.
    """
    of = {mode: np.array([step for step, own in enumerate(MODES) if own is mode]) for mode in Mode}
    aligned = align(columns(rows), issued, of[SEQ].tolist())
    sums, pairs = KernelSums(aligned.kernels), pair_times_of(aligned.kernels, of[OV], of[SEQ], aligned.dimensions)
    numbered = {step: ProfiledStep(100 + step, step, mode is SEQ) for step, mode in enumerate(MODES)}
    return rank_window(
        rank,
        timed=tuple([TimedBlock(mode, step, (step_ms[mode],) * 2) for step, mode in enumerate(MODES)]),
        profiled=tuple([profiled_block(mode, step, sums, [step], step_ms[mode]) for step, mode in enumerate(MODES)]),
        pairs=pairs.by_kind,
        dimension_pairs=pairs.by_dimension,
        calls=collective_calls(aligned, numbered, rank, Transfers(None, {})),
    )


def report(*windows_of_ranks: RankWindow) -> OverlapReport:
    return aggregate_windows(windows_of_ranks, world_size=len(windows_of_ranks), every_n_steps=500)


def values(found: OverlapReport) -> dict[str, float]:
    return {name: figure.value for name, figure in found.figures().items()}


def values_in_any_order(windows: Sequence[RankWindow]) -> dict[str, float]:
    """The figures of three ranks, which must be the same whichever two of them are merged first."""
    parts = [part_of(window) for window in windows]
    found = [
        values(report_of(merge([merge([decode(encode(parts[rank])) for rank in order[:2]]), parts[order[2]]]),
                         world_size=3, every_n_steps=500))
        for order in ((0, 1, 2), (2, 1, 0), (2, 0, 1))
    ]  # fmt: skip
    assert all(one == pytest.approx(other) for one, other in pairwise(found))
    return found[0]
