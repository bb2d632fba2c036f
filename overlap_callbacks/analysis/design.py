"""The design of a window: the weight of each block in the mean of its mode, by least squares.

A block's mean depends on its mode, but also on its place in the window (clocks, heat and caches make steps faster or
slower), on how many of its steps are hits of the job's rhythms, and on how many are of another kind. The design removes
these effects. It is the same for every quantity, so quantities that add up in each block also add up in the means.

The mean of a mode uses only that mode's blocks. Both means are taken at the same trend and the same share of hits and
of each kind: where both modes are known best. So their difference is that of least squares with a column for the mode.
Without further columns, they are plain means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, Rhythm, TimedBlock

Floats = npt.NDArray[np.float64]

MAX_RHYTHMS = 3
MAX_KINDS = 3
NUM_COVARIATES = MAX_RHYTHMS + MAX_KINDS
# The degree of the trend by the number of blocks, so that a bend is as long in a long window: a clock that changes now
# and then is followed, at 2 % wider intervals of white noise. Fewer blocks would tell nothing of what is left.
_DEGREES = ((28, 7), (12, 3), (6, 1))
MIN_BLOCKS_OF_TREND = _DEGREES[-1][0]
# Degrees of freedom that a column must leave.
_MIN_LEFT = 2
# What is left of equal values, as a share of them.
_ROUNDING = 1e-12
# The least fraction of a column's square that the columns before it may leave.
_MIN_NEW = 1e-6


@dataclass(frozen=True)
class Design:
    """The least squares of n blocks.

    Attributes:
        of_mode: the blocks of each mode, in the order of ``Mode``; shape (modes, n).
        weights: of each block in the mean of its mode, adding up to 1 over each mode that has blocks; shape (n,).
        degrees: degrees of freedom of the residuals in each mode's blocks; shape (modes,).
        roots: square roots of the blocks' weights in the least squares; shape (n,).
        basis: orthonormal columns that span the design, in units of ``roots``; shape (n, columns).
    """

    of_mode: npt.NDArray[np.bool_]
    weights: Floats
    degrees: Floats
    roots: Floats
    basis: Floats

    def means(self, values: Floats) -> Floats:
        """The mean of each quantity in each mode, 0 for a mode without blocks. Shapes (n, quantities), (modes, ...)."""
        return np.stack([self.weights[own] @ values[own] for own in self.of_mode])  # apart: NaN stays in its mode

    def residuals(self, values: Floats) -> Floats:
        """The residuals of each quantity, in units of ``roots``; shape (n, quantities)."""
        scaled = self.roots[:, None] * values
        left = scaled - self.basis @ (self.basis.T @ scaled)
        for quantity in np.flatnonzero(np.isnan(left).any(axis=0)).tolist():  # unknown in some blocks of a mode
            for own in self.of_mode:
                basis, of_own = self.basis[own], scaled[own, quantity]
                left[own, quantity] = of_own - basis @ (np.linalg.pinv(basis) @ of_own)
        left[np.abs(left) <= _ROUNDING * np.abs(scaled).max(axis=0, initial=0.0)] = 0.0
        return np.asarray(left)

    def spread(self) -> Floats:
        """The variance of each mode's mean over that of a step of weight 1; 0 without blocks. Shape (modes,)."""
        return np.asarray((self.of_mode * (self.weights / self.roots) ** 2).sum(axis=1))

    def covariances(self, values: Floats) -> list[Floats]:
        """Of each mode's means, from the residuals of its blocks; NaN without degrees of freedom."""
        left = self.residuals(values)
        parts = zip(self.of_mode, self.degrees, self.spread(), strict=True)
        return [
            left[own].T @ left[own] * (spread / degrees if degrees > 0 else np.nan) for own, degrees, spread in parts
        ]


def design_of(modes: Sequence[Mode], places: Sequence[int], num_steps: Sequence[float], covariates: Floats) -> Design:
    """The design of n blocks, by mode and number, weighted by their counted steps.

    ``covariates`` are other influences, the most important first; shape (n, covariates).
    """
    of_mode = np.array([[mode is each for mode in modes] for each in Mode], dtype=bool).reshape(len(Mode), -1)
    roots = np.sqrt(np.maximum(np.array(num_steps, dtype=np.float64), 1e-9))
    weights = (of_mode * roots**2).sum(axis=0)
    weights = weights / np.maximum(of_mode @ weights, 1e-300)[of_mode.argmax(axis=0)]
    present = [own for own in of_mode if own.any()]
    basis = _orthonormal((roots * own for own in present), len(roots))
    if len(present) == len(Mode):
        others = [roots]
        for column in _columns(places, covariates):
            extended = _extended(basis, roots * column)
            if extended is not basis:
                basis = extended
                others.append(roots * column)
        # The part of the mode's indicator that the other columns do not explain: the contrast between the modes.
        others_basis = _orthonormal(others, len(roots))
        indicator = roots * of_mode[0]
        contrast = indicator - others_basis @ (others_basis.T @ indicator)
        weights = np.where(of_mode[0], 1.0, -1.0) * roots * contrast / (contrast @ contrast)
    degrees = (of_mode * (1 - (basis**2).sum(axis=1))).sum(axis=1)
    return Design(of_mode, weights, degrees, roots, basis)


def _columns(places: Sequence[int], covariates: Floats) -> list[Floats]:
    degree = next((degree for least, degree in _DEGREES if len(places) >= least), 0)
    place = np.array(places, dtype=np.float64)
    place = 2 * (place - place.min()) / max(1.0, float(np.ptp(place))) - 1
    return [*(place**power for power in range(1, degree + 1)), *covariates.T]


def _orthonormal(columns: Iterable[Floats], rows: int) -> Floats:
    basis = np.empty((rows, 0))
    for column in columns:
        basis = _extended(basis, column, least=0)
    return basis


def _extended(basis: Floats, column: Floats, least: int = _MIN_LEFT) -> Floats:
    """With one more column, if it is new and leaves enough degrees of freedom."""
    new = column - basis @ (basis.T @ column)
    new = new - basis @ (basis.T @ new)  # twice, for accuracy
    square = float(new @ new)
    if len(column) - basis.shape[1] - 1 < least or not square > _MIN_NEW * float(column @ column):
        return basis
    return np.column_stack([basis, new / np.sqrt(square)])


def covariates_of(block: TimedBlock | ProfiledBlock, rhythms: Sequence[Rhythm]) -> tuple[float, ...]:
    """The fraction of a block's counted steps that are hits of each rhythm, then of each kind but the commonest."""
    hits = [
        sum([step % rhythm.period == rhythm.phase for step in block.steps]) / len(block.steps)
        for rhythm in rhythms[:MAX_RHYTHMS]
        if block.steps and rhythm.period > 1
    ]
    kinds = [block.kinds.count(kind) / len(block.kinds) if block.kinds else 0.0 for kind in range(1, MAX_KINDS + 1)]
    return (*hits, *[0.0] * (MAX_RHYTHMS - len(hits)), *kinds)


def rank_weights(
    blocks: Sequence[TimedBlock | ProfiledBlock], num_steps: Sequence[int], rhythms: Sequence[Rhythm]
) -> list[float]:
    """The weight of each of a rank's blocks in the mean of its mode."""
    if not blocks:
        return []
    covariates = np.array([covariates_of(block, rhythms) for block in blocks])
    design = design_of([block.mode for block in blocks], [block.block for block in blocks], num_steps, covariates)
    return design.weights.tolist()  # type: ignore[no-any-return]
