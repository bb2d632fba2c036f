"""A configuration and its outcome in words."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.study import Configuration, StudyRow

STEP_MS = "overlap/e2e_overlapped_ms"


def in_words(configuration: Configuration) -> str:
    """E.g. ``gpt3-xl, ddp, batch 4, bf16, 300 W``."""
    words = [configuration.model, configuration.strategy, f"batch {configuration.batch}", configuration.precision]
    if configuration.power_cap_w is not None:
        words.append(f"{configuration.power_cap_w:g} W")
    if configuration.clock_cap_mhz is not None:
        words.append(f"{configuration.clock_cap_mhz:g} MHz")
    return ", ".join(words)


def outcome_in_words(row: StudyRow) -> str:
    """E.g. ``gpt3-xl, ddp, batch 4, bf16: 91.20 ms a step (the job took 31 s)``."""
    name = in_words(row.configuration)
    if row.figures is None:
        return f"{name} failed: {row.failure}"
    step = row.figures.values.get(STEP_MS)
    said = "measured" if step is None else f"{PLAIN.quantity(step.value, 'ms')} a step"
    return f"{name}: {said} (the job took {row.seconds:.0f} s)"
