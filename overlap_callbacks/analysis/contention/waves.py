"""What a compute kernel should lose to the SMs that a collective's kernel holds, by the blocks of both.

A kernel runs its blocks in waves: as many at a time as the SMs hold. A collective's kernel holds SMs for as long as it
runs, so a wave has fewer blocks. That costs a kernel of many waves the share of the SMs that are taken. It costs a
kernel of few waves nothing, if its blocks still fit, or a whole wave more, if they do not. The second is known as
resource fragmentation, or wave quantisation. A kernel that fills all SMs once takes twice as long if one SM is missing.

The model takes each block of a collective's kernel to stand on an SM of its own, as the blocks of NCCL do. It leaves
out what only a measurement tells: blocks of unequal length, kernels that hand out their work while they run
(stream-K), and that a kernel which waits for memory does not need all SMs.
"""

from __future__ import annotations

from typing import NamedTuple

from overlap_callbacks.analysis.contention.occupancy import Chip, resident_beside, resident_blocks
from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape

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
