"""How fast the job trains: tokens and model FLOP a second, and the share of the devices' peak."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PAGE, count, page_text
from overlap_callbacks.analysis.results.report import Throughput
from overlap_callbacks.analysis.throughput import GIVEN, run_throughput
from overlap_callbacks.report.views.elements import Block, Note, Section, Tile, Tiles
from overlap_callbacks.report.views.run import RunView

# What is longer stands below the figures.
_MAX_REMARK = 80


def throughput(view: RunView) -> list[Section]:
    """Throughput over the windows that count; nothing where it is not known."""
    found = run_throughput(view.valid_windows)
    if found is None:
        return []
    tiles = [
        Tile(label, value, "", page_text(basis) if len(basis) <= _MAX_REMARK else "")
        for label, value, basis in throughput_facts(found)
    ]
    blocks: list[Block] = [Tiles(tuple(tiles))]
    sources = []
    if len(found.flop_basis) > _MAX_REMARK:
        sources.append(f"Model FLOP: {found.flop_basis}.")
    if found.peak_basis and found.peak_basis != GIVEN and found.mfu is not None:
        sources.append(f"The peak is from {found.peak_basis}.")
    if sources:
        blocks.append(Note(page_text(" ".join(sources))))
    known = "; ".join(f"{t.label} {t.value}" + (f" ({t.remark})" if t.remark else "") for t in tiles)
    answer = (
        f"{page_text(known)}. By the time of overlapped steps, mean over the windows that count. What is recomputed is "
        "no model FLOP."
    )
    return [Section("How fast does it train?", answer, blocks)]


# -- in words


_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def in_prefixes(value: float, unit: str = "") -> str:
    """A large number with the prefix of its unit, e.g. ``312.4 TFLOP/s``; without a unit ``312.4 T``."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if abs(value) >= size), (1.0, ""))
    return PAGE.quantity(value / size, f"{prefix}{unit}").rstrip()


def throughput_facts(throughput: Throughput) -> list[tuple[str, str, str]]:
    """What is known: label, value, and what it rests on."""
    facts = []
    if throughput.tokens_per_s is not None:
        facts.append(("Tokens a second", PAGE.number(throughput.tokens_per_s, 0), "the whole job"))
    if throughput.samples_per_s is not None:
        facts.append(("Samples a second", PAGE.number(throughput.samples_per_s, 1), "the whole job"))
    if throughput.flop_per_step is not None:
        facts.append(("Model FLOP per step", in_prefixes(throughput.flop_per_step), throughput.flop_basis))
    if throughput.flop_per_s_per_device is not None:
        value = in_prefixes(throughput.flop_per_s_per_device)
        facts.append(("Model FLOP/s per device", value, f"mean over {count(throughput.num_devices, 'device')}"))
    if throughput.mfu is not None and throughput.peak_flop_per_s is not None:
        facts.append(("Model FLOP utilisation (MFU)", PAGE.percent(throughput.mfu), _of_peak(throughput)))
    return facts


def _of_peak(throughput: Throughput) -> str:
    peak = in_prefixes(throughput.peak_flop_per_s or 0.0, "FLOP/s")
    if throughput.peak_basis == GIVEN:
        return f"of {peak}, as given"
    return f"of {peak}, dense {throughput.precision}"
