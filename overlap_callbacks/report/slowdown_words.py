"""How to read the slowdowns in tables of kernels and pairs, in words for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from overlap_callbacks.analysis.beside_words import RAN_ALONE
from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.results.kernel_times import ALONE, KernelTime, PairTime

_Row = TypeVar("_Row", KernelTime, PairTime)

PAIRS_TITLE = "Slowdown by concurrent kernel"
OF_SHARES = "A kernel that ran beside several counts towards each by the share of time that it had of each."
WITH_WAITING = "A collective's time includes waiting for other ranks."


def together(kernels: Sequence[KernelTime], window: int, decimals: int) -> str:
    """What the compute kernels of a window add up to, and why that is not the run's figure.

    Args:
        kernels: all that compute.
        window: their window's number.
        decimals: with which times are shown.
    """
    lost, overlapped, sequential = (
        PLAIN.quantity(sum([getattr(kernel, name) for kernel in kernels]), "ms", decimals=decimals)
        for name in ("lost_ms", "overlapped_ms", "sequential_ms")
    )
    return (
        f"All of them lose {lost}: T_comp of window {window} is {overlapped} overlapped and {sequential} alone. The "
        "run's T_comp is the mean of all its windows."
    )


def ran_alone(pairs: Sequence[PairTime]) -> str:
    """A sentence where kernels are slower that ran beside nothing; else empty."""
    if not any(pair.beside == ALONE and pair.lost_ms > 0 for pair in pairs):
        return ""
    return (
        f'"{RAN_ALONE[0].upper()}{RAN_ALONE[1:]}" are kernels that ran beside nothing in overlapped steps either. If '
        "they are slower all the same, what ran beside them does not explain it."
    )


def with_losses(rows: Sequence[_Row], decimals: int) -> tuple[list[_Row], int]:
    """The rows whose lost time is not shown as zero, and how many are left out.

    Args:
        rows: of a table.
        decimals: with which times are shown.
    """
    shown = [row for row in rows if abs(row.lost_ms) >= 0.5 * 10**-decimals]
    return shown, len(rows) - len(shown)


def left_out_in_words(number: int, noun: str, decimals: int) -> str:
    """How many rows are left out, as a sentence; empty for none."""
    if not number:
        return ""
    verb, is_or_are = ("loses", "is") if number == 1 else ("lose", "are")
    return f" {count(number, noun)} that {verb} less than {0.5 * 10**-decimals:g} ms {is_or_are} left out."
