"""Energy against time over configurations of one workload: the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_callbacks import _validation


@dataclass(frozen=True)
class TradeOffPoint:
    """One configuration, e.g. the cap ``300 W``, with time and energy of a step, over the devices that count."""

    name: str
    step_ms: float
    energy_j: float

    def __post_init__(self) -> None:
        _validation.positive("step_ms", self.step_ms)
        _validation.positive("energy_j", self.energy_j)

    def beats(self, other: TradeOffPoint) -> bool:
        """Whether it is at least as good in both, and better in one."""
        as_good = self.step_ms <= other.step_ms and self.energy_j <= other.energy_j
        return as_good and (self.step_ms, self.energy_j) != (other.step_ms, other.energy_j)


@dataclass(frozen=True)
class TradeOffRow:
    """A configuration compared with the baseline.

    Attributes:
        slowdown: its step time relative to the baseline, minus one.
        saving: energy per step that it saves relative to the baseline; negative if it needs more.
        power_w: mean power over a step.
        on_front: whether no other configuration beats it: it is on the Pareto front.
    """

    point: TradeOffPoint
    slowdown: float
    saving: float
    power_w: float
    on_front: bool


def trade_off(points: Sequence[TradeOffPoint], baseline: TradeOffPoint) -> list[TradeOffRow]:
    """Each configuration of a workload compared with one of them, usually the uncapped one; fastest first."""
    return [
        TradeOffRow(
            point=point,
            slowdown=point.step_ms / baseline.step_ms - 1,
            saving=1 - point.energy_j / baseline.energy_j,
            power_w=point.energy_j / point.step_ms * 1e3,
            on_front=not any(other.beats(point) for other in points),
        )
        for point in sorted(points, key=lambda point: (point.step_ms, point.energy_j))
    ]
