"""What a kernel ran beside, as people read it."""

from __future__ import annotations

from overlap_callbacks.analysis.results.kernel_times import ALONE, UNMATCHED

RAN_ALONE = "ran alone, unexplained"
# What records call them, and what people read.
_BESIDE = {ALONE: RAN_ALONE, UNMATCHED: "in one mode alone"}


def beside_in_words(beside: str) -> str:
    """The family or dimension as it is; of kernels that ran beside nothing or have no partner, what they are."""
    return _BESIDE.get(beside, beside)
