"""How many thread blocks of a kernel an SM holds at a time.

The limits are those of NVIDIA's "CUDA C++ Programming Guide", table "Technical Specifications per Compute Capability".
Registers are given out in units of 256 to a warp, and each of an SM's four parts has a quarter of them; from compute
capability 8.0 on, the system takes 1 KiB of shared memory for each block (``cuda_occupancy.h`` of the CUDA toolkit).
The compute units of AMD's devices follow other rules and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape

_WARP = 32
_REGISTERS = 65_536  # of an SM; the same for all compute capabilities here
_SM_PARTS = 4
_REGISTER_UNIT = 256
_KIB = 1024


@dataclass(frozen=True)
class SmLimits:
    """What one SM holds at a time.

    Attributes:
        threads, blocks: the most of each.
        shared_bytes: shared memory for all blocks.
        reserved_bytes: shared memory that the system takes for each block.
    """

    threads: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int = _KIB

    @property
    def shared_unit(self) -> int:
        """Shared memory is given out in units of so many bytes."""
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
    """A device of NVIDIA.

    Attributes:
        num_sms: its SMs.
        capability: its compute capability, e.g. (9, 0); None if unknown.
    """

    num_sms: int
    capability: tuple[int, int] | None = None

    @property
    def limits(self) -> SmLimits | None:
        """Limits of one SM; None if they are not known for this compute capability."""
        return None if self.capability is None else LIMITS.get(self.capability)


def resident_blocks(launch: LaunchShape, limits: SmLimits | None) -> int | None:
    """The blocks of a kernel that one SM holds at a time; None if that is not known.

    Without ``limits``, it is known for big blocks only: of blocks that take more than half of the registers, or more
    than half of the most shared memory that an SM of any known compute capability has, an SM holds one.

    Args:
        launch: how the kernel was launched. Registers of 0 count as unknown, and then do not limit.
        limits: of an SM.
    """
    if limits is None:
        registers = _registers_per_warp(launch) * _warps(launch)
        is_big = 2 * registers > _REGISTERS or 2 * launch.shared_memory_bytes > _MOST_SHARED_BYTES
        return 1 if is_big else None
    return _fit(launch, limits, None) or None  # none at all: the limits do not fit the device that it ran on


def resident_beside(launch: LaunchShape, limits: SmLimits | None, guest: LaunchShape) -> int:
    """The blocks of a kernel that one SM holds beside one block of another kernel.

    Where it is not known what that block takes, it counts as taking the whole SM.

    Args:
        launch: of the kernel.
        limits: of an SM.
        guest: how the other kernel was launched.
    """
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
