"""Every figure of a report: its name, unit and meaning."""

from __future__ import annotations

from typing import NamedTuple

# Overlap that is left in sequential steps, above which the two modes are not what they are taken for. Gloo's host
# threads hand over within scheduler latency, so a little always remains there.
RESIDUAL_LIMIT = 0.02


RESIDUAL_LIMIT_GLOO = 0.05


class Figure(NamedTuple):
    """A headline figure.

    Attributes:
        name: the field of the report; ``overlap/`` and the name is the metric's key.
        unit: ``ms`` or ``fraction``.
        meaning: its definition.
        compares: whether it rests on sequential steps, and so means nothing in an invalid window.
    """

    name: str
    unit: str
    meaning: str
    compares: bool = False

    @property
    def key(self) -> str:
        return f"overlap/{self.name}"


FIGURES = (
    Figure("compute_slowdown", "fraction", "eq. 1: (T_comp,ov - T_comp,iso) / T_comp,iso", compares=True),
    Figure("overlap_ratio", "fraction", "eq. 2: compute time during which communication is in flight / T_comp,ov"),
    Figure("e2e_overlapped_ms", "ms", "eq. 3: step time, overlapped, measured"),
    Figure("e2e_ideal_ms", "ms", "eq. 4: e2e_overlapped - (T_comp,ov - T_comp,iso)", compares=True),
    Figure("e2e_sequential_model_ms", "ms", "eq. 5: e2e_ideal + hidden communication time", compares=True),
    Figure("e2e_sequential_ms", "ms", "step time, sequential, measured", compares=True),
    Figure("speedup_vs_sequential", "fraction", "e2e_sequential / e2e_overlapped - 1", compares=True),
    Figure("gap_to_ideal", "fraction", "e2e_overlapped / e2e_ideal - 1", compares=True),
    Figure(
        "sequential_model_error",
        "fraction",
        "e2e_sequential_model / e2e_sequential - 1: checks the model",
        compares=True,
    ),
    Figure("compute_ms", "ms", "T_comp,ov: sum of compute kernel times of an overlapped step"),
    Figure("compute_isolated_ms", "ms", "T_comp,iso: the same of a sequential step", compares=True),
    Figure("compute_busy_ms", "ms", "union of the compute kernels' intervals, overlapped step"),
    Figure("compute_busy_isolated_ms", "ms", "the same of a sequential step", compares=True),
    Figure("comm_ms", "ms", "time in which communication is in flight in an overlapped step: hidden + exposed"),
    Figure("comm_isolated_ms", "ms", "the same in a sequential step", compares=True),
    Figure("hidden_comm_ms", "ms", "communication time beside compute, overlapped step"),
    Figure("exposed_comm_ms", "ms", "communication time without compute, overlapped step"),
    Figure("hidden_comm_fraction", "fraction", "hidden_comm / comm: the overlap efficiency"),
    Figure(
        "comm_slowdown",
        "fraction",
        "sum of communication kernel times, overlapped over sequential, less one",
        compares=True,
    ),
    Figure("comm_ratio", "fraction", "comm / e2e_overlapped"),
    Figure("p2p_ms", "ms", "time in which sends and receives are in flight, overlapped step"),
    Figure("idle_ms", "ms", "time without compute and communication, overlapped step: of a pipeline, its bubble"),
    Figure("residual_overlap", "fraction", "eq. 2 in sequential steps: must be near zero"),
)


_COMPARES = frozenset(figure.name for figure in FIGURES if figure.compares)
