"""What tables say of arms, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overlap_callbacks.analysis.arm_summary import ArmSummary
from overlap_callbacks.analysis.formatting import PLAIN, Style

SPEEDUP_IN_WORDS = "Speed-up: step time as configured over that with the arm, less one. Above zero the arm wins."
RESULTS_DIFFER = "changes results: losses and weights are not those of the job without it."


@dataclass(frozen=True)
class ArmColumn:
    """A column that is shown where any arm has it.

    Attributes:
        title: its head.
        values: with the arm and as configured; None where not measured.
        unit: of both.
    """

    title: str
    values: Callable[[ArmSummary], tuple[float | None, float | None]]
    unit: str

    def of(self, row: ArmSummary, style: Style = PLAIN) -> str:
        """Both, e.g. ``21.0 (24.0) W``; empty without a value with the arm."""
        value, configured = self.values(row)
        if value is None:
            return ""
        shown = style.quantity(value, self.unit)
        if configured is None:
            return shown
        number, _, unit = shown.partition(style.space)
        before = style.quantity(configured, self.unit).partition(style.space)[0]
        return f"{number} ({before}){style.space}{unit}" if unit else f"{number} ({before})"


def _figures(name: str) -> Callable[[ArmSummary], tuple[float | None, float | None]]:
    def values(row: ArmSummary) -> tuple[float | None, float | None]:
        pair = row.figures.get(name), row.figures.get(f"configured_{name}")
        return pair[0].value if pair[0] else None, pair[1].value if pair[1] else None

    return values


OPTIONAL_ARM_COLUMNS = (
    ArmColumn("compute", _figures("compute_ms"), "ms"),
    ArmColumn("exposed comm.", _figures("exposed_comm_ms"), "ms"),
    ArmColumn("power", lambda row: (row.avg_w, row.configured_avg_w), "W"),
    ArmColumn("energy of a step", lambda row: (row.energy_per_step_j, row.configured_energy_per_step_j), "J"),
    ArmColumn(
        "peak memory",
        lambda row: (_gib(row.peak_memory_bytes), _gib(row.configured_peak_memory_bytes)),
        "GiB",
    ),
)


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 2**30
