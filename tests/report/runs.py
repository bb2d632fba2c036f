"""Synthetic runs: a small cluster's windows with every part that a report may have."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.power.cause import slowdown_shares
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.arrivals import Arrivals, DimensionWaiting, Lateness
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.experts import ExpertLoads
from overlap_callbacks.analysis.results.exposure import LAST, MIDDLE, SEVERAL, ExposedSum, ExposureSums
from overlap_callbacks.analysis.results.kernel_times import (
    MEMORY,
    SMS,
    UNEXPLAINED,
    WAVES,
    CallTimes,
    KernelTime,
    PairTime,
    SlowdownCause,
    SlowdownShare,
    SlowdownShares,
    StepDetail,
    StepTimeline,
)
from overlap_callbacks.analysis.results.messages import DimensionTraffic, Traffic
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import (
    JobModePower,
    JobPower,
    PowerTrace,
    SourceInfo,
    TraceSegment,
    UnitUtilisation,
)
from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from overlap_callbacks.analysis.results.report import OverlapReport, PipelineBubble, StageBubble, Throughput
from overlap_callbacks.analysis.results.window import (
    CollectiveTime,
    DimensionTime,
    MemoryPeak,
    ProfiledBlock,
    RankWindow,
    SmLoss,
    TimedBlock,
)
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import JsonlSink, RunInfo
from tests.samples import aggregate_windows

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
OSSO = (OV, SEQ, SEQ, OV)


def run_info(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "library_version": "0.1.0",
        "torch_version": "2.13.0+cu130",
        "python_version": "3.11.9",
        "started_at": "2026-11-21T14:00:00+00:00",
        "hostname": "node-1",
        "framework": "megatron 0.16.1",
        "world_size": 2,
        "backend": "nccl",
        "device": "NVIDIA H200",
        "schedule": Schedule().as_dict(),
        "units": {figure.name: figure.unit for figure in FIGURES},
        "meanings": {figure.name: figure.meaning for figure in FIGURES},
    }
    return RunInfo(**{**fields, **changes})


def rank_window(number: int = 0, rank: int = 0, *, slowdown: float = 0.14, **changes: Any) -> RankWindow:
    """One rank's window: steps of some 412 ms overlapped and 468 ms sequential, with noise that is always the same."""
    chance = random.Random(1000 * number + rank)

    def noise(scale: float = 0.004) -> float:
        return chance.gauss(1, scale)

    timed = tuple(
        TimedBlock(arm, i, tuple((412.0 if arm is OV else 468.0) * noise() for _ in range(2)))
        for i, arm in enumerate(OSSO * 4)
    )
    profiled = tuple(
        ProfiledBlock(
            mode=arm,
            block=i,
            num_steps=1,
            compute_ms=331.0 * (1 + slowdown if arm is OV else 1) * noise(),
            compute_busy_ms=325.0 * (1 + slowdown if arm is OV else 1),
            comm_ms=141.0 if arm is OV else 118.0 * noise(),
            comm_busy_ms=132.0 if arm is OV else 112.0,
            hidden_comm_ms=96.0 * noise() if arm is OV else 0.0,
            covered_compute_ms=104.0 if arm is OV else 0.4,
            copy_ms=1.0,
            p2p_ms=2.2 if arm is OV else 1.8,
            idle_ms=9.0,
            # Overlapped, the parts of the step add up to it.
            step_ms=(325.0 * (1 + slowdown) + 36.0 + 9.0) * noise(0.0) if arm is OV else 482.0 * noise(),
            bubble_ms=14.0,
        )
        for i, arm in enumerate(OSSO * 2)
    )
    fields: dict[str, Any] = {
        "rank": rank,
        "window": number,
        "first_step": 20 + 500 * number,
        "num_steps": 65,
        "complete": True,
        "backend": "nccl",
        "device": "NVIDIA H200",
        "wall_ms": 29_000.0,
        "timed": timed,
        "profiled": profiled,
        "kernels": KERNELS,
        "pairs": PAIRS,
        "dimension_pairs": DIMENSION_PAIRS,
        "dimensions": (
            DimensionTime("tensor", 192, 4_831_838_208, 61.0, 22.0, 63.0, 52.0),
            DimensionTime("data", 12, 5_368_709_120, 58.0, 9.5, 61.0, 49.0),
            DimensionTime("pipeline", 32, 268_435_456, 13.0, 4.5, 14.0, 14.0),
        ),
        "pictures": (picture(OV), picture(SEQ)) if rank == 0 else (),
        "exposure": exposure(number, rank),
        "collectives": (
            CollectiveTime("_reduce_scatter_base_", "data_parallel 7", 8, "nccl", 12, 5_368_709_120, 671_088_640, 24.4,
                           "data", 5_368_709_120.0),
            CollectiveTime("_allgather_base_", "data_parallel 7", 8, "nccl", 12, 671_088_640, 5_368_709_120, 24.8,
                           "data", 5_368_709_120.0),
            CollectiveTime("allreduce_", "tensor_parallel 3", 4, "nccl", 192, 4_831_838_208, 4_831_838_208, 52.3 + rank,
                           "tensor", 4_831_838_208.0),
        ),
    }  # fmt: skip
    return RankWindow(**{**fields, **changes})


KERNELS = (
    KernelTime("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", False, 192, 192, 171.2, 149.0),
    KernelTime("nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_TNN", False, 96, 96, 88.5, 76.9),
    KernelTime("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>(Flash_fwd_params)",
               False, 48, 48, 51.0, 48.2),
    KernelTime("void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<c10::BFloat16>>(int)",
               False, 384, 384, 31.4, 25.2),
    KernelTime("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, 192, 192, 63.0,
               52.3),
    KernelTime("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, 12, 12, 31.0,
               24.4),
)  # fmt: skip

PAIRS = (
    PairTime("gemm", False, "all_reduce", 140.0, 41.0, 121.0, 103.0),
    PairTime("gemm", False, "reduce_scatter", 44.0, 22.0, 61.0, 51.0),
    PairTime("attention", False, "reduce_scatter", 9.0, 5.0, 12.0, 11.1),
    PairTime("all_reduce", True, "gemm", 180.0, 41.0, 52.0, 43.0),
    PairTime("gemm", False, "(nothing)", 120.0, 0.0, 98.0, 97.2),
)


DIMENSION_PAIRS = (
    PairTime("gemm", False, "pipeline", 24.0, 9.0, 38.0, 27.4),
    PairTime("gemm", False, "tensor", 112.0, 39.0, 101.0, 88.0),
    PairTime("attention", False, "pipeline", 6.0, 2.5, 8.0, 7.1),
    PairTime("gemm", False, "data", 48.0, 44.0, 43.0, 41.8),
)


def exposure(number: int, rank: int) -> ExposureSums:
    """Of four profiled steps: the last reduce-scatter is exposed in two of them, on rank 1 for longer."""
    steps = tuple(range(520 + 500 * number, 524 + 500 * number))
    last_ns, middle_ns = 8e6 * (1 + rank), 2e6
    return ExposureSums(
        steps,
        rows=(
            ExposedSum("reduce_scatter", "data", 8, LAST, 67_108_864, 67_108_864, 67_108_864, 4, 2 * last_ns, 4e6, 0.0,
                       {steps[1]: last_ns, steps[3]: last_ns}),
            ExposedSum("all_reduce", "tensor", 4, MIDDLE, 25_165_824, 25_165_824, 25_165_824, 768, 4 * middle_ns, 2e8,
                       0.0, dict.fromkeys(steps, middle_ns)),
        ),
        names=(
            ExposedSum("reduce_scatter", "data", 8, "layers.0", SEVERAL, 67_108_864, 67_108_864, 4, 2 * last_ns, 4e6,
                       0.0, {steps[1]: last_ns, steps[3]: last_ns}, queued_ns=2 * last_ns),
            ExposedSum("all_reduce", "tensor", 4, "layers.7.mlp.linear_fc2", SEVERAL, 25_165_824, 25_165_824, 768,
                       4 * middle_ns, 2e8, 0.0, dict.fromkeys(steps, middle_ns), queued_ns=4 * middle_ns),
        ),
    )  # fmt: skip


def picture(arm: Mode) -> StepTimeline:
    """A forward and backward of 24 layers, with a bucket in flight every other layer of the backward."""
    compute: list[tuple[float, float]] = []
    communication: list[tuple[float, float]] = []
    now = 0.0
    for layer in range(48):
        length = 6.9 if layer < 16 else 8.2
        compute.append((now, now + length))
        now += length + 0.12
        if layer >= 16 and layer % 2:
            if arm is OV:
                communication.append((now + 1.5, now + 8.4))
            else:
                communication.append((now, now + 6.1))
                now += 6.2
    slices = [
        (name, 13 if name else 7, start, end - start, 67_108_864 if name else 0)
        for name, intervals in enumerate((compute, communication))
        for start, end in intervals
    ]
    names = ("gemm_bf16", "ncclDevKernel_AllReduce_Sum_bf16")
    detail = StepDetail(names, (False, True), tuple(sorted(slices, key=lambda item: item[2])))
    times = (6.9, 6.9, 8.2) if arm is OV else (6.2, 6.3, 7.9)
    return StepTimeline(
        arm, now + 5.0, tuple(compute), tuple(communication), 0.6, 0.0, detail,
        (CallTimes("gemm_bf16", False, 480, *times),),
    )  # fmt: skip


def window(number: int = 0, *, power: bool = False, slowdown: float = 0.14, **changes: Any) -> OverlapReport:
    """The report of two ranks."""
    found = aggregated(number, slowdown, **changes) if changes else _unchanged(number, slowdown)
    return with_power(found) if power else found


def aggregated(number: int, slowdown: float, **changes: Any) -> OverlapReport:
    ranks = [rank_window(number, rank, slowdown=slowdown, **changes) for rank in (0, 1)]
    return aggregate_windows(ranks, world_size=2, every_n_steps=500)


# Hundreds of tests ask for the same first ones, which take a tenth of a second each.
_unchanged = functools.lru_cache(maxsize=64)(aggregated)


def with_power(found: OverlapReport) -> OverlapReport:
    chance = random.Random(found.window)
    modes = tuple(
        JobModePower(
            mode, 2, 2 * watts, watts, min_sm_clock_mhz=clock - 15, max_throttle_fraction=0.5, peak_w=peak,
            p99_w=peak - 8, avg_tdp_fraction=watts / 700, peak_tdp_fraction=peak / 700, energy_per_step_j=joules,
            energy_method="counter", sm_clock_mhz=clock, throttle_fraction=throttled,
            reasons={"sw_power_cap": throttled},
            parts=UnitUtilisation(0.97, 0.41, tensor, 0.38, 61.0, 60.0, 1.0), compute_clock_mhz=clock - 20,
            compute_clock_readings=24,
        )
        for mode, watts, peak, joules, clock, throttled, tensor in (
            (OV, chance.gauss(641, 3), 718.0, chance.gauss(528, 1), 1695.0, 0.44, 0.52),
            (SEQ, chance.gauss(548, 3), 694.0, chance.gauss(513, 1), 1905.0, 0.06, 0.46),
        )
    )  # fmt: skip
    source = SourceInfo("nvml", "NVIDIA H200", "GPU-1", "instantaneous", 0.02, 0.1, 0.1, 700.0, 700.0)
    verdict = SlowdownCause(
        "clock throttled by power cap",
        ("SM clock 1695 MHz overlapped, 1905 MHz sequential: it explains at most 12.4% (88% of the slowdown)",),
        0.14,
        0.124,
        0.014,
        0.88,
    )
    power = JobPower(2, (0, 1), (), modes, (), source)
    slowdown = 0.14 if found.compute_slowdown is None else found.compute_slowdown.value
    shares = slowdown_shares(slowdown, 60.0, [SmLoss(132, 16.0, 30.0, 27.0, 0.3, 0.6)], modes[0], modes[1])
    return msgspec.structs.replace(
        found, power=power, power_trace=power_trace(), power_verdict=verdict, slowdown_shares=shares
    )


def full_report(**changes: Any) -> OverlapReport:
    """A report that has every figure that there is."""
    made = window(0, power=True)
    at_most = (MemoryPeak(OV, 8 * 2**30, 8 * 2**30), MemoryPeak(SEQ, 7 * 2**30, 9 * 2**30))
    mean = Estimate(0.75, 0.7, 0.8, 16, 8)
    unmeasured = [figure.name for figure in FIGURES if getattr(made, figure.name) is None]
    parts: dict[str, Any] = {
        **dict.fromkeys(unmeasured, mean),
        "exposed_on_host_ms": Estimate(0.0, 0.0, 0.0, 16, 8),
        "memory": at_most,
        "measurement_overhead_ci_low": 0.001,
        "measurement_overhead_ci_high": 0.004,
        "tokens_per_step": 4096,
        "traffic": Traffic((DimensionTraffic("data", 8, 800, 700.0, 100.0),), 16, 15),
        "throughput": Throughput(
            tokens_per_s=1.5e5,
            samples_per_s=36.6,
            flop_per_step=2.2e15,
            flop_per_s_per_device=8e13,
            mfu=0.081,
            num_devices=2,
        ),
        "experts": ExpertLoads("expert", 2, 2, 1, 0, 4.0, 100.0, 1.5, 0.5, 1.2, 0.2),
        "arrivals": Arrivals(
            8, (DimensionWaiting("data", 64, 3.0, 1.0),), (Lateness(1, 0, "data", 32, 20, 8, 7, 0.5, 2.0, 0.2),)
        ),
        "pipeline": PipelineBubble(2, 4, 1, (StageBubble(0, 1, 100.0, 20.0), StageBubble(1, 1, 100.0, 30.0))),
        "race": RaceCheck(RaceVerdict.EQUAL, took_ms=12.0),
        "slowdown_shares": SlowdownShares(
            0.14, tuple([SlowdownShare(cause, 0.035, "") for cause in (SMS, WAVES, MEMORY, UNEXPLAINED)])
        ),
    }
    return msgspec.structs.replace(made, **{**parts, **changes})


# In the last two blocks, as of profiled steps.
COMMUNICATION = tuple((10_900.0 + 60 * i, 10_940.0 + 60 * i) for i in range(32))


def power_trace() -> PowerTrace:
    """Ten blocks of 1.3 s."""
    arms = (OSSO * 3)[:10]
    segments = tuple(
        segment
        for i, arm in enumerate(arms)
        for segment in (
            TraceSegment(arm, 1300.0 * i, 1300.0 * i + 420, counted=False, profiled=i >= 8),
            TraceSegment(arm, 1300.0 * i + 420, 1300.0 * i + 1300, profiled=i >= 8),
        )
    )
    times = [20.0 * i for i in range(650)]
    power, clock = [], []
    for time in times:
        overlapped = arms[int(time // 1300)] is OV
        wave = math.sin(time / 61) + 0.5 * math.sin(time / 17)
        power.append((642.0 if overlapped else 550.0) + (28.0 if overlapped else 55.0) * wave)
        clock.append((1695.0 if overlapped else 1905.0) + 15 * math.sin(time / 90))
    both = tuple((a, b - 12.0) for a, b in COMMUNICATION if arms[int(a // 1300)] is OV)
    return PowerTrace(
        0, tuple(times), tuple(power), tuple(clock), 0.02, 700.0, 700.0, segments, 1300, COMMUNICATION, both
    )


def write(
    folder: Path,
    *windows: OverlapReport,
    run: RunInfo | None = None,
    arms: Sequence[ArmReport] = (),
    blocks: tuple[TimedBlock, ...] = (),
) -> Path:
    """A record, as the sink writes it."""
    sink = JsonlSink(folder)
    sink.open(run or run_info())
    for found in windows:
        sink.log(found)
    for arm in arms:
        sink.log_arm(arm)
    for block in blocks:
        sink.block(len(windows), 20 + 500 * len(windows), block)
    sink.close()
    return folder


def many(count: int) -> list[OverlapReport]:
    """So many windows, made fast: a few of them, renumbered."""
    some = [window(i, slowdown=0.14 + 0.01 * math.sin(i)) for i in range(12)]
    return [
        msgspec.structs.replace(some[i % len(some)], window=i, first_step=20 + 500 * i, valid=i % 37 != 5)
        for i in range(count)
    ]
