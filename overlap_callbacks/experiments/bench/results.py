"""The points of a benchmark and their measurements, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_callbacks.analysis.bench import GemmFigures, TransferFigures, gemm_figures, size_in_words, transfer_figures
from overlap_callbacks.analysis.results.bench import (
    FILE_NAME,
    GEMM,
    GLOO,
    LOOPBACK,
    SCHEMA,
    Failed,
    GemmPoint,
    GemmRound,
    Plan,
    Resumed,
    Start,
    TransferPoint,
    TransferRound,
)
from overlap_callbacks.experiments.sweep import Point, Sweep

WORLD = "world"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
# Collectives send 32-bit numbers.
ELEMENT_BYTES = 4


@dataclass
class Bench(Sweep[Start, GemmRound | TransferRound | Failed | Resumed]):
    """A benchmark. Its settings are points, each measured once per round."""

    COMMAND, FILE_NAME, SCHEMA, START = "bench", FILE_NAME, SCHEMA, Start
    LINE = GemmRound | TransferRound | Failed | Resumed

    @property
    def settings(self) -> tuple[GemmPoint | TransferPoint, ...]:
        return points_of(self.start.plan)

    @property
    def repeats(self) -> int:
        return self.start.plan.rounds

    def point_of(self, line: GemmRound | TransferRound | Failed | Resumed) -> Point | None:
        if isinstance(line, Resumed):
            return None
        return Point(line.gemm or line.transfer) if isinstance(line, Failed) else Point(line.point, line.round)

    def failure_of(self, line: GemmRound | TransferRound | Failed | Resumed) -> str:
        return (line.reason or "no reason") if isinstance(line, Failed) else ""

    def name(self, setting: GemmPoint | TransferPoint | None) -> str:
        if setting is None:
            return "a point"
        size = size_in_words(setting.message_bytes)
        if isinstance(setting, TransferPoint):
            return f"{setting.kind} of {size}"
        cap = f", {setting.cap_in_words}" if setting.cap_in_words else ""
        return f"N {setting.n}, {setting.dtype}, all-reduce of {size}{cap}"

    @property
    def rounds(self) -> list[GemmRound | TransferRound]:
        return [line for line in self.lines if isinstance(line, (GemmRound, TransferRound))]

    @property
    def failed(self) -> list[Failed]:
        return [line for line in self.lines if isinstance(line, Failed)]

    @property
    def resumed(self) -> list[Resumed]:
        return [line for line in self.lines if isinstance(line, Resumed)]

    @property
    def gemms(self) -> tuple[GemmFigures, ...]:
        """The figures of ``gemm-allreduce``; empty for another benchmark."""
        return gemm_figures([line for line in self.lines if isinstance(line, GemmRound)], self.start.plan.ranks)

    @property
    def transfers(self) -> tuple[TransferFigures, ...]:
        """The figures of ``collectives``; empty for another benchmark."""
        return transfer_figures([line for line in self.lines if isinstance(line, TransferRound)])

    @property
    def link_in_words(self) -> str:
        """What connects the ranks, in a few words."""
        plan = self.start.plan
        if plan.link == LOOPBACK:
            return "a loopback link on " + ("one GPU" if plan.device == "cuda" else "the CPU")
        return "Gloo on the CPU" if plan.link == GLOO else "NCCL"


def points_of(plan: Plan) -> tuple[GemmPoint | TransferPoint, ...]:
    """The points of a plan, in the order of its first round."""
    if plan.bench == GEMM:
        return tuple(
            [
                GemmPoint(dtype, ctas, size, n, power_w, clock_mhz)
                # Outermost: changing them takes time, and devices respond slowly.
                for power_w in plan.power_caps_w
                for clock_mhz in plan.clock_caps_mhz
                for dtype in plan.dtypes
                for ctas in plan.ctas
                for size in plan.message_bytes
                for n in plan.sizes
            ]
        )
    found = [
        TransferPoint(kind, group, whole_bytes(size, len(ranks_of(group, plan.ranks)[0])))
        for group in plan.groups
        for kind in plan.kinds
        for size in plan.message_bytes
    ]
    return tuple(dict.fromkeys(found))


def whole_bytes(size: int, ranks: int) -> int:
    """The smallest size of at least ``size`` bytes with the same number of whole elements for each rank."""
    unit = ELEMENT_BYTES * ranks
    return -(-size // unit) * unit


def ranks_of(group: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group described by a text; together they are all ranks.

    The text is ``world``, ``N`` for groups of N neighbours, or ``N:S`` for groups of N ranks that are S apart.

    Raises:
        ValueError: the text does not describe groups of this many ranks.
    """
    if group == WORLD:
        return (tuple(range(ranks)),)
    size, _, apart = group.partition(":")
    if not (size.isdigit() and (apart or "1").isdigit()):
        raise ValueError(f"--groups must be world, N or N:S with whole numbers, got {group!r}")
    count, step = int(size), int(apart or "1")
    if count < 2 or step < 1 or ranks % (count * step):
        raise ValueError(
            f"--groups {group} must have at least 2 ranks, and their number times their distance must divide the "
            f"{ranks} ranks"
        )
    return tuple(
        [
            tuple(range(first + place, first + place + count * step, step))
            for first in range(0, ranks, count * step)
            for place in range(step)
        ]
    )
