"""Power of a window as a table for the terminal, and in words."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN, change_in_words, count
from overlap_callbacks.analysis.results.catalogue import POWER_METRICS
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.report_parts import energy_saving, peak_rise
from overlap_callbacks.report.power_words import cause_sentence, evidence_sentence

_ENERGY = "energy_per_step_j"
# What the table shows; the page shows everything.
_SHOWN = (
    "avg_w", "peak_w", "avg_tdp_fraction", "peak_tdp_fraction", _ENERGY, "sm_clock_mhz", "throttle_fraction",
    "sm_busy_fraction", "tensor_busy_fraction", "dram_busy_fraction",
)  # fmt: skip
_ROWS = tuple(metric for name in _SHOWN for metric in POWER_METRICS if metric.name == name)


def power_parts(window: OverlapReport) -> list[RenderableType]:
    """The table of a window, and what it says in words; nothing where no power was measured."""
    power = window.power
    if power is None or not power.modes:
        return []
    modes = [mode for mode in power.modes if window.valid or mode.mode is Mode.OVERLAPPED]
    source = "" if power.source is None else f", {power.source.name}, {power.source.power_kind}"
    devices = count(power.num_devices, "device")
    table = Table(title=f"Power of {devices} (window {window.window}{source})", title_justify="left")
    table.add_column("")
    for mode in modes:
        table.add_column(mode.mode.value, justify="right")
    both = len(modes) == 2
    if both:
        table.add_column("overlap's change", justify="right")
    for metric in _ROWS:
        values = [metric.number(mode) for mode in modes]
        if not any(value is not None and PLAIN.shows(value, metric.unit) for value in values):
            continue
        cells = [_shown(metric, value) for value in values]
        if both:
            # The relative change of a share says nothing that its two values do not.
            cells.append("" if metric.unit == "fraction" else _change(*values))
        method = modes[0].energy_method if metric.name == _ENERGY else ""
        table.add_row(f"{metric.label}, by {method}" if method else metric.label, *cells)
    why, words = cause_words(window), power_words(window)
    return [Text(), *([Text(why, style="bold")] if why else []), table, *([Text(words)] if words else [])]


def cause_words(window: OverlapReport) -> str:
    """What the compute slowdown is due to; empty where that is not known."""
    return "" if window.control or window.power_verdict is None else cause_sentence(window.power_verdict)


def power_words(window: OverlapReport) -> str:
    """What power says of overlap: energy beside time, and what the cause of the slowdown rests on."""
    if window.control:
        return ""  # both arms ran overlapped: every difference is chance
    sentences = []
    saving = energy_saving(window.power) if window.power is not None and window.valid else None
    if saving is not None:
        sentences.append(f"With overlap a step takes {change_in_words(-saving, 'more', 'less')} energy.")
        overlapped = window.power.of(Mode.OVERLAPPED) if window.power is not None else None
        if window.tokens_per_step and overlapped is not None and overlapped.energy_per_step_j is not None:
            sentences.append(f"A token costs {overlapped.energy_per_step_j / window.tokens_per_step:.3g} J.")
    rise = peak_rise(window.power) if window.power is not None and window.valid else None
    if rise is not None:
        sentences.append(f"The highest power is {change_in_words(rise, 'higher', 'lower')} with overlap.")
    if window.power_verdict is not None:
        sentences.append(evidence_sentence(window.power_verdict, of_window=window.window))
    return " ".join(sentences)


def _shown(metric: Figure, value: float | None) -> str:
    if value is None:
        return "not measured"
    return PLAIN.quantity(value, metric.unit)


def _change(overlapped: float | None, sequential: float | None) -> str:
    if overlapped is None or not sequential:
        return ""
    return PLAIN.percent(overlapped / sequential - 1, signed=True)
