"""How to read the slowdowns in tables of kernels and pairs, in words for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.results.kernel_times import ALONE, PairTime

# Lost times must add up, so tables compare arithmetic means; the figures must not hang on one slow step.
OF_MEAN_TIMES = (
    "The table compares arithmetic means over the profiled steps of a window. The compute and communication slowdowns "
    "of the run compare geometric means, which single slow steps raise less. Where times vary much, the two differ."
)


def beside_nothing(pairs: Sequence[PairTime]) -> str:
    """A sentence where kernels are slower that ran beside nothing; else empty."""
    if not any(pair.beside == ALONE and pair.lost_ms > 0 for pair in pairs):
        return ""
    return (
        f"{ALONE} stands for kernels that ran beside nothing in overlapped steps either. If they are slower all the "
        "same, what ran beside them does not explain it."
    )
