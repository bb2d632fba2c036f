"""What the compute kernels of a profile should lose to the SMs that communication holds, per step.

The price of one call is its time alone, times the predicted loss (``waves``), times the share of its time that it ran
beside communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.contention.occupancy import Chip, resident_beside, resident_blocks
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape
from overlap_callbacks.analysis.kernels.same_calls import match
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.window import SmLoss


def sm_loss(
    kernels: KernelTable,
    launches: Sequence[LaunchShape | None],
    chip: Chip | None,
    overlapped: Indices,
    sequential: Indices,
) -> SmLoss | None:
    """The predicted loss of a profile.

    Args:
        kernels: the whole profile.
        launches: what each number of ``kernels.shape`` stands for; shape (len(kernels.shapes),).
        chip: on which it ran; None on CPU, and on AMD.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential profiled steps.

    Returns:
        Means per step; None if no compute kernel that ran beside communication has a known launch.
    """
    if chip is None or not len(overlapped) or not len(sequential) or len(launches) != len(kernels.shapes):
        return None
    calls = Calls.of(kernels)
    computes = (calls.kind == Kind.COMPUTE) & np.isin(calls.step, overlapped)
    beside_ns = calls.covered_ns(kernels.of(Kind.COMMUNICATION))
    wanted = computes & (beside_ns > 0)
    alone_ns = match(calls, wanted, calls, np.isin(calls.step, sequential)).alone_ns
    rows = np.flatnonzero(wanted & np.isfinite(alone_ns))
    if not len(rows):
        return None
    per_call = _PerCall(kernels, launches, chip, calls, rows)
    modelled_ns, held_ns = np.zeros(len(rows)), np.zeros(len(rows))
    from_sms_ns, from_waves_ns = np.zeros(len(rows)), np.zeros(len(rows))
    communicates = kernels.kind == Kind.COMMUNICATION
    for number in distinct_values(kernels.shape[communicates]).tolist():
        launch = launches[number]
        if launch is None:
            continue
        covered_ns = calls.covered_ns(kernels.intervals[communicates & (kernels.shape == number)])[rows]
        losses = per_call.losses(launch)
        known = np.isfinite(losses[:, 0])
        share = np.where(known, covered_ns / np.maximum(calls.duration_ns[rows], 1), 0.0)
        from_sms_ns += alone_ns[rows] * share * np.where(known, losses[:, 0], 0.0)
        from_waves_ns += alone_ns[rows] * share * np.where(known, losses[:, 1], 0.0)
        modelled_ns += np.where(known, covered_ns, 0)
        held_ns += np.where(known, covered_ns * min(launch.num_blocks, chip.num_sms), 0)
    # Where two communication kernels run at once, the time beside them counts once.
    modelled_ns = np.minimum(modelled_ns, beside_ns[rows])
    if not modelled_ns.any():
        return None
    per_step_ms = 1 / len(overlapped) / 1e6
    return SmLoss(
        num_sms=chip.num_sms,
        sms_held=float(held_ns.sum() / modelled_ns.sum()),
        concurrent_ms=float(beside_ns[computes].sum()) * per_step_ms,
        modelled_ms=float(modelled_ns.sum()) * per_step_ms,
        from_sms_ms=float(from_sms_ns.sum()) * per_step_ms,
        from_waves_ms=float(from_waves_ns.sum()) * per_step_ms,
    )


class _PerCall:
    """The predicted losses of some calls, each distinct launch computed once."""

    def __init__(
        self, kernels: KernelTable, launches: Sequence[LaunchShape | None], chip: Chip, calls: Calls, rows: Indices
    ) -> None:
        self._chip = chip
        distinct, self._index = np.unique(kernels.shape[calls.row[rows]], return_inverse=True)
        self._launches = [launches[number] for number in distinct.tolist()]

    def losses(self, beside: LaunchShape) -> npt.NDArray[np.float64]:
        """``Loss`` of each call beside a communication kernel, NaN where it is not known; shape (calls, 2)."""
        found = [None if launch is None else predicted_loss(launch, beside, self._chip) for launch in self._launches]
        table = np.array([(np.nan, np.nan) if loss is None else tuple(loss) for loss in found])
        return table[self._index.reshape(-1)]


# -- waves
# What a compute kernel should lose to the SMs that a collective's kernel holds, by the blocks of both.
#
# A kernel runs its blocks in waves: as many at a time as the SMs hold. A collective's kernel holds SMs for as long as
# it runs, so a wave has fewer blocks. That costs a kernel of many waves the share of the SMs that are taken. It costs a
# kernel of few waves nothing, if its blocks still fit, or a whole wave more, if they do not. The second is known as
# resource fragmentation, or wave quantisation. A kernel that fills all SMs once takes twice as long if one SM is
# missing. The model takes each block of a collective's kernel to stand on an SM of its own, as the blocks of NCCL do.
# It leaves out what only a measurement tells: blocks of unequal length, kernels that hand out their work while they run
# (stream-K), and that a kernel which waits for memory does not need all SMs.


# Blocks do not end all at once. After some waves they are out of step, and the last wave is no longer a step of its
# own. From so many waves on, only the share of the SMs counts. A judgement, not a published figure.
FEW_WAVES = 8


class Loss(NamedTuple):
    """How much longer a kernel should take while a collective's kernel holds SMs.

    Attributes:
        from_sms: since fewer blocks run at a time, as a fraction of its time alone.
        from_waves: since a wave is needed beyond that, as a fraction of its time alone; adds to ``from_sms``.
    """

    from_sms: float
    from_waves: float


def predicted_loss(launch: LaunchShape, beside: LaunchShape, chip: Chip) -> Loss | None:
    """What a compute kernel should lose while a communication kernel runs.

    Args:
        launch: of the compute kernel.
        beside: of the communication kernel.
        chip: on which both run.

    Returns:
        The loss; None if it is not known how many of the blocks an SM holds, or if no block fits beside the other
        kernel.
    """
    limits = chip.limits
    per_sm = resident_blocks(launch, limits)
    if per_sm is None or chip.num_sms < 1 or launch.num_blocks < 1:
        return None
    taken = min(beside.num_blocks, chip.num_sms)
    capacity = per_sm * chip.num_sms
    capacity_beside = per_sm * (chip.num_sms - taken) + resident_beside(launch, limits, beside) * taken
    if capacity_beside < 1:
        return None
    by_share = capacity / capacity_beside
    waves = -(-launch.num_blocks // capacity)
    if waves >= FEW_WAVES:
        return Loss(by_share - 1, 0.0)
    longer = -(-launch.num_blocks // capacity_beside) / waves
    # A last wave that is not full takes some or all of the blocks that found no place.
    from_sms = min(by_share, longer)
    return Loss(from_sms - 1, longer - from_sms)
