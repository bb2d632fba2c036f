"""Power of a window as a table for the terminal, and in words."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobModePower
from overlap_callbacks.analysis.results.power_metrics import energy_saving
from overlap_callbacks.analysis.results.report import OverlapReport

_ENERGY = "energy of a step"
_Row = tuple[str, str, Callable[[JobModePower], "float | None"]]
_ROWS: tuple[_Row, ...] = (
    ("mean power of a device", "{:.0f} W", lambda m: m.mean_avg_w),
    ("highest power", "{:.0f} W", lambda m: m.peak_w),
    ("mean, of TDP", "{:.0%}", lambda m: m.avg_tdp_fraction),
    ("highest, of TDP", "{:.0%}", lambda m: m.peak_tdp_fraction),
    (_ENERGY, "{:.1f} J", lambda m: m.energy_per_step_j),
    ("SM clock", "{:.0f} MHz", lambda m: m.sm_clock_mhz),
    ("clock held back", "{:.0%}", lambda m: m.throttle_fraction),
    ("SMs busy", "{:.0%}", lambda m: m.parts.sm if m.parts else None),
    ("tensor cores busy", "{:.0%}", lambda m: m.parts.tensor if m.parts else None),
    ("memory bandwidth used", "{:.0%}", lambda m: m.parts.dram if m.parts else None),
)


def power_parts(window: OverlapReport) -> list[RenderableType]:
    """The table of a window, and what it says in words; nothing where no power was measured."""
    power = window.power
    if power is None or not power.modes:
        return []
    modes = [mode for mode in power.modes if window.valid or mode.mode is Mode.OVERLAPPED]
    of = power.source
    source = "" if of is None else f", {of.name}, {of.power_kind}"
    devices = f"{power.num_devices} device{'s' if power.num_devices != 1 else ''}"
    table = Table(title=f"Power of {devices} (window {window.window}{source})", title_justify="left")
    table.add_column("")
    for mode in modes:
        table.add_column(mode.mode.value, justify="right")
    both = len(modes) == 2
    if both:
        table.add_column("overlap's change", justify="right")
    for label, form, value in _ROWS:
        values = [value(mode) for mode in modes]
        if all(v is None for v in values):
            continue
        cells = ["not measured" if v is None else form.format(v) for v in values]
        if both:
            cells.append("" if "%" in form else _change(*values))  # the change of a share is none of its power
        method = modes[0].energy_method if label == _ENERGY else ""
        table.add_row(f"{label}, by {method}" if method else label, *cells)
    words = power_words(window)
    return [Text(), table, *([Text(words)] if words else [])]


def power_words(window: OverlapReport) -> str:
    """What power says of overlap: energy beside time, and what the slowdown is due to."""
    if window.control:
        return ""  # both arms ran overlapped: every difference is chance
    sentences = []
    saving = energy_saving(window.power) if window.power is not None and window.valid else None
    if saving is not None:
        more_or_less = "more" if saving >= 0 else "less"
        sentences.append(f"Without overlap a step takes {abs(saving):.1%} {more_or_less} energy.")
        overlapped = window.power.of(Mode.OVERLAPPED) if window.power is not None else None
        if window.tokens_per_step and overlapped is not None and overlapped.energy_per_step_j is not None:
            sentences.append(f"A token costs {overlapped.energy_per_step_j / window.tokens_per_step:.3g} J.")
    found = window.power_verdict
    if found is not None:
        sentences.append(f"Compute slowdown: {found.verdict} ({'; '.join(found.evidence)}).")
    return " ".join(sentences)


def _change(overlapped: float | None, sequential: float | None) -> str:
    if overlapped is None or not sequential:
        return ""
    return f"{overlapped / sequential - 1:+.1%}"
