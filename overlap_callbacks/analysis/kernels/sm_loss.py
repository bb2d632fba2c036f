"""Predicted loss of a profile's compute kernels to the SMs that communication holds, per step.

A kernel runs its blocks in waves: as many at a time as the SMs hold. A collective's kernel holds SMs while it runs.
That costs a kernel of many waves the share of SMs that are taken. It costs a kernel of few waves nothing, if its blocks
still fit, or a whole wave, if they do not (wave quantisation): one that fills all SMs once takes twice as long if one
SM is missing.

The model assumes that each block of a collective's kernel has its own SM, as NCCL's blocks do. It ignores what only a
measurement shows: blocks of unequal length, stream-K, and kernels that wait for memory and do not need all SMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.calls import Calls, alone_ns
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, LaunchShape
from overlap_callbacks.analysis.results.window import SmLoss

# Blocks do not all end at once. After some waves they are out of phase, and the last wave is no longer a separate step.
# From this many waves on, only the share of SMs counts. A judgement, not a published figure.
FEW_WAVES = 8


def sm_loss(
    kernels: KernelTable,
    launches: Sequence[LaunchShape | None],
    chip: Chip | None,
    overlapped: Indices,
    sequential: Indices,
) -> SmLoss | None:
    """The predicted loss of a profile, as means per step.

    A call loses its time alone, times its predicted loss, times the share of its time during which communication ran.
    None if no compute kernel that overlapped has a known launch; ``launches`` maps the numbers in ``kernels.shape``.
    """
    if chip is None or not len(overlapped) or not len(sequential) or len(launches) != len(kernels.shapes):
        return None
    calls = Calls.of(kernels)
    computes = (calls.kind == Kind.COMPUTE) & np.isin(calls.step, overlapped)
    beside_ns = calls.covered_ns(kernels.union_of(Kind.COMMUNICATION))
    wanted = computes & (beside_ns > 0)
    alone = alone_ns(calls, wanted, calls, np.isin(calls.step, sequential))
    rows = np.flatnonzero(wanted & np.isfinite(alone))
    if not len(rows):
        return None
    distinct, index = np.unique(kernels.shape[calls.row[rows]], return_inverse=True)
    index = index.reshape(-1)
    modelled_ns, held_ns = np.zeros(len(rows)), np.zeros(len(rows))
    lost_ns = np.zeros((len(rows), 2))  # from SMs, from waves
    communicates = kernels.kind == Kind.COMMUNICATION
    for number in distinct_values(kernels.shape[communicates]).tolist():
        beside = launches[number]
        if beside is None:
            continue
        losses = [None if (own := launches[n]) is None else predicted_loss(own, beside, chip) for n in distinct]
        loss = np.array([(np.nan, np.nan) if found is None else tuple(found) for found in losses])[index]
        known = np.isfinite(loss[:, 0])
        covered_ns = calls.covered_ns(kernels.intervals[communicates & (kernels.shape == number)])[rows]
        share = np.where(known, covered_ns / np.maximum(calls.duration_ns[rows], 1), 0.0)
        lost_ns += (alone[rows] * share)[:, None] * np.where(known[:, None], loss, 0.0)
        modelled_ns += np.where(known, covered_ns, 0)
        held_ns += np.where(known, covered_ns * min(beside.num_blocks, chip.num_sms), 0)
    # If two communication kernels run at once, the shared time counts once.
    modelled_ns = np.minimum(modelled_ns, beside_ns[rows])
    if not modelled_ns.any():
        return None
    per_step_ms = 1 / len(overlapped) / 1e6
    from_sms_ns, from_waves_ns = lost_ns.sum(axis=0).tolist()
    return SmLoss(
        num_sms=chip.num_sms,
        sms_held=float(held_ns.sum() / modelled_ns.sum()),
        concurrent_ms=float(beside_ns[computes].sum()) * per_step_ms,
        modelled_ms=float(modelled_ns.sum()) * per_step_ms,
        from_sms_ms=from_sms_ns * per_step_ms,
        from_waves_ms=from_waves_ns * per_step_ms,
    )


class Loss(NamedTuple):
    """Extra time of a kernel, as fractions of its time alone: from fewer blocks at a time, and from an extra wave."""

    from_sms: float
    from_waves: float


def predicted_loss(launch: LaunchShape, beside: LaunchShape, chip: Chip) -> Loss | None:
    """Predicted loss of a compute kernel while a communication kernel runs on the same chip.

    None if the number of its blocks that an SM holds is unknown, or if none fits next to the other kernel.
    """
    limits = chip.limits
    per_sm = resident_blocks(launch, limits)
    if per_sm is None or chip.num_sms < 1 or launch.num_blocks < 1:
        return None
    taken = min(beside.num_blocks, chip.num_sms)
    capacity = per_sm * chip.num_sms
    capacity_beside = per_sm * (chip.num_sms - taken) + resident_next_to(launch, limits, beside) * taken
    if capacity_beside < 1:
        return None
    by_share = capacity / capacity_beside
    waves = -(-launch.num_blocks // capacity)
    if waves >= FEW_WAVES:
        return Loss(by_share - 1, 0.0)
    longer = -(-launch.num_blocks // capacity_beside) / waves
    # An incomplete last wave absorbs some or all of the displaced blocks.
    from_sms = min(by_share, longer)
    return Loss(from_sms - 1, longer - from_sms)


# -- how many thread blocks of a kernel an SM holds at a time. The limits are those of NVIDIA's "CUDA C++ Programming
# Guide", table "Technical Specifications per Compute Capability". Registers are allocated in units of 256 per warp, and
# each of an SM's four parts has a quarter of them; from compute capability 8.0 on, the system reserves 1 KiB of shared
# memory per block (``cuda_occupancy.h`` of the CUDA toolkit). AMD's compute units follow other rules and are left out.

_WARP = 32
_REGISTERS = 65_536  # of an SM; the same for all compute capabilities here
_SM_PARTS = 4
_REGISTER_UNIT = 256
_KIB = 1024


@dataclass(frozen=True)
class SmLimits:
    """What one SM holds at a time; the system reserves some shared memory per block."""

    threads: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int = _KIB

    @property
    def shared_unit(self) -> int:
        """Allocation unit of shared memory, in bytes."""
        return 128 if self.reserved_bytes else 256


LIMITS: dict[tuple[int, int], SmLimits] = {
    (7, 0): SmLimits(2048, 32, 96 * _KIB, reserved_bytes=0),
    (7, 5): SmLimits(1024, 16, 64 * _KIB, reserved_bytes=0),
    (8, 0): SmLimits(2048, 32, 164 * _KIB),
    (8, 6): SmLimits(1536, 16, 100 * _KIB),
    (8, 7): SmLimits(1536, 16, 164 * _KIB),
    (8, 9): SmLimits(1536, 24, 100 * _KIB),
    (9, 0): SmLimits(2048, 32, 228 * _KIB),
    (10, 0): SmLimits(2048, 32, 228 * _KIB),
}
_MOST_SHARED_BYTES = max(limits.shared_bytes for limits in LIMITS.values())


@dataclass(frozen=True)
class Chip:
    """An NVIDIA device: its SMs, and its compute capability, e.g. (9, 0), if known."""

    num_sms: int
    capability: tuple[int, int] | None = None

    @property
    def limits(self) -> SmLimits | None:
        """Limits of one SM; None if not known for this compute capability."""
        return None if self.capability is None else LIMITS.get(self.capability)


def resident_blocks(launch: LaunchShape, limits: SmLimits | None) -> int | None:
    """Number of a kernel's blocks that one SM holds at a time; None if unknown.

    Without ``limits``, it is 1 for blocks that take more than half of the registers, or of the shared memory of any
    known SM, and unknown for others. Zero registers count as unknown, and do not limit.
    """
    if limits is None:
        registers = _registers_per_warp(launch) * _warps(launch)
        is_big = 2 * registers > _REGISTERS or 2 * launch.shared_memory_bytes > _MOST_SHARED_BYTES
        return 1 if is_big else None
    return _fit(launch, limits, None) or None  # none at all: the limits do not match the actual device


def resident_next_to(launch: LaunchShape, limits: SmLimits | None, guest: LaunchShape) -> int:
    """Number of a kernel's blocks that one SM holds next to one block of another: none if its needs are unknown."""
    if limits is None or not guest.registers_per_thread:
        return 0
    return max(0, _fit(launch, limits, guest))


def _fit(launch: LaunchShape, limits: SmLimits, guest: LaunchShape | None) -> int:
    warps, guest_warps = _warps(launch), 0 if guest is None else _warps(guest)
    by_warps = (limits.threads // _WARP - guest_warps) // warps
    by_blocks = limits.blocks - (guest is not None)
    shared_bytes = _shared_bytes(launch, limits)
    shared_left = limits.shared_bytes - (0 if guest is None else _shared_bytes(guest, limits))
    fits = [by_warps, by_blocks]
    if shared_bytes:
        fits.append(shared_left // shared_bytes)
    if launch.registers_per_thread:
        registers_left = _REGISTERS // _SM_PARTS
        if guest is not None:
            registers_left -= _registers_per_warp(guest) * -(-guest_warps // _SM_PARTS)
        fits.append(_SM_PARTS * (registers_left // _registers_per_warp(launch)) // warps)
    return min(fits)


def _warps(launch: LaunchShape) -> int:
    return max(1, -(-launch.threads_per_block // _WARP))


def _registers_per_warp(launch: LaunchShape) -> int:
    return -(-launch.registers_per_thread * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT


def _shared_bytes(launch: LaunchShape, limits: SmLimits) -> int:
    return -(-launch.shared_memory_bytes // limits.shared_unit) * limits.shared_unit + limits.reserved_bytes
