"""Throughput in words, for the terminal and the page."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN, Style, count
from overlap_callbacks.analysis.results.workload import Throughput
from overlap_callbacks.analysis.throughput import GIVEN

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def in_prefixes(value: float, unit: str = "", style: Style = PLAIN) -> str:
    """A large number with the prefix of its unit, e.g. ``312.4 TFLOP/s``; without a unit ``312.4 T``."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if abs(value) >= size), (1.0, ""))
    return style.quantity(value / size, f"{prefix}{unit}").rstrip()


def throughput_facts(throughput: Throughput, style: Style = PLAIN) -> list[tuple[str, str, str]]:
    """What is known: label, value, and what it rests on."""
    facts = []
    if throughput.tokens_per_s is not None:
        facts.append(("Tokens a second", style.number(throughput.tokens_per_s, 0), "the whole job"))
    if throughput.samples_per_s is not None:
        facts.append(("Samples a second", style.number(throughput.samples_per_s, 1), "the whole job"))
    if throughput.flop_per_step is not None:
        facts.append(("Model FLOP per step", in_prefixes(throughput.flop_per_step, style=style), throughput.flop_basis))
    if throughput.flop_per_s_per_device is not None:
        value = in_prefixes(throughput.flop_per_s_per_device, style=style)
        facts.append(("Model FLOP/s per device", value, f"mean over {count(throughput.num_devices, 'device')}"))
    if throughput.mfu is not None and throughput.peak_flop_per_s is not None:
        facts.append(("Model FLOP utilisation (MFU)", style.percent(throughput.mfu), _of_peak(throughput, style)))
    return facts


def _of_peak(throughput: Throughput, style: Style) -> str:
    peak = in_prefixes(throughput.peak_flop_per_s or 0.0, "FLOP/s", style)
    if throughput.peak_basis == GIVEN:
        return f"of {peak}, as given"
    return f"of {peak}, dense {throughput.precision}"
