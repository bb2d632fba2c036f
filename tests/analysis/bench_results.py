"""Results of benchmarks, made by hand."""

from __future__ import annotations

from pathlib import Path

from overlap_callbacks.analysis.results.bench import (
    BOTH,
    COLLECTIVES,
    COMMUNICATION,
    COMPUTE,
    CONDITIONS,
    GEMM,
    GLOO,
    SCHEMA,
    Block,
    GemmPoint,
    GemmRound,
    Plan,
    Start,
    TransferPoint,
    TransferRound,
)
from overlap_callbacks.experiments.bench.results import Bench, ranks_of

MIB = 2**20
HERE = Path("run")


def gemm_plan(**changes: object) -> Plan:
    given: dict[str, object] = {
        "bench": GEMM, "link": GLOO, "device": "cpu", "ranks": 2, "threads": 1, "rounds": 2, "block_s": 0.1,
        "message_bytes": (MIB,), "sizes": (256, 512), "dtypes": ("fp32",),
    }  # fmt: skip
    return Plan(**(given | changes))  # type: ignore[arg-type]


def collectives_plan(**changes: object) -> Plan:
    given: dict[str, object] = {
        "bench": COLLECTIVES, "link": GLOO, "device": "cpu", "ranks": 2, "threads": 1, "rounds": 5, "block_s": 0.01,
        "message_bytes": (1024, MIB), "kinds": ("all_reduce", "send_recv"), "groups": ("world",),
    }  # fmt: skip
    return Plan(**(given | changes))  # type: ignore[arg-type]


def start_of(plan: Plan) -> Start:
    return Start(
        schema=SCHEMA,
        plan=plan,
        command="overlap bench",
        started_at="2026-11-23T08:00:00+00:00",
        library_version="0.1.0",
        torch_version="2.13.0",
        python_version="3.11.7",
        device_name="a CPU",
        power_missing="no power of the CPU",
    )


def gemm_round(
    point: GemmPoint, number: int, *, gemm_ms: float, all_reduce_ms: float, slowdown: float, comm_slowdown: float
) -> GemmRound:
    """A round in which both slow each other down by known fractions."""
    blocks = []
    for condition in CONDITIONS:
        beside = condition == BOTH
        blocks.append(
            Block(
                condition=condition,
                gemm_ms=None if condition == COMMUNICATION else gemm_ms * (1 + slowdown * beside),
                gemms=0 if condition == COMMUNICATION else 10,
                covered=1.0 if beside else None,
                all_reduce_ms=None if condition == COMPUTE else all_reduce_ms * (1 + comm_slowdown * beside),
                all_reduces=0 if condition == COMPUTE else 5,
                length_s=0.1,
            )
        )
    return GemmRound(
        point=point,
        round=number,
        flop=2 * point.n**3,
        gemms_per_call=1,
        all_reduces_per_trial=5,
        blocks=tuple(blocks),
    )


def gemm_results(**changes: object) -> Bench:
    """Products that are 25 % slower during all-reduces, and these 50 % slower during products."""
    plan = gemm_plan(**changes)
    rounds = [
        gemm_round(GemmPoint(dtype, ctas, size, n), number, gemm_ms=2.0 * (1 + 0.01 * number), all_reduce_ms=4.0,
                   slowdown=0.25, comm_slowdown=0.5)
        for number in range(plan.rounds)
        for dtype in plan.dtypes
        for ctas in plan.ctas
        for size in plan.message_bytes
        for n in plan.sizes
    ]  # fmt: skip
    return Bench(HERE, start_of(plan), [*rounds])


def transfer_results(latency_ms: float = 0.1, gb_s: float = 2.0, **changes: object) -> Bench:
    """Collectives on a link of known latency and bus bandwidth."""
    plan = collectives_plan(**changes)
    rounds = []
    for number in range(plan.rounds):
        for group in plan.groups:
            ranks = len(ranks_of(group, plan.ranks)[0])
            for kind in plan.kinds:
                for size in plan.message_bytes:
                    wire = size * (2 * (ranks - 1) / ranks if kind == "all_reduce" else 1.0)
                    time_ms = (latency_ms + wire / gb_s / 1e6) * (1 + 0.001 * number)
                    point = TransferPoint(kind, group, size)
                    rounds.append(TransferRound(point=point, round=number, group_size=ranks, time_ms=time_ms, calls=10))
    return Bench(HERE, start_of(plan), [*rounds])
