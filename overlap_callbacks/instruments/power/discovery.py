"""Identifies the devices that train, and finds each one's power source.

A device is found by its UUID or PCI address, never by its index: torch's indices depend on ``CUDA_VISIBLE_DEVICES`` and
similar variables, and NVML and AMD SMI use a different order.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_callbacks.instruments.power.rapl import POWERCAP, RaplSource
from overlap_callbacks.instruments.power.source import PowerSource, PowerUnavailableError

NVIDIA, AMD, CPU = "nvidia", "amd", "cpu"


@dataclass(frozen=True)
class DeviceIdentity:
    """Identifies a device.

    Attributes:
        vendor: ``nvidia``, ``amd`` or ``cpu``; torch's device type for another vendor's accelerator.
        uuid: with or without a prefix; empty if unknown.
        pci_bus_id: e.g. ``0000:3b:00.0``; empty if unknown.
        name: its name in torch.
    """

    vendor: str
    uuid: str = ""
    pci_bus_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class NoPower:
    """Why a device has no power source, in one line. Training and all other measurements continue."""

    reason: str


def identify(index: int | None = None) -> DeviceIdentity:
    """The identity of a torch device: by default the current one, or the CPU if the process uses none.

    Never creates a context.
    """
    import torch

    from overlap_callbacks.instruments import device

    used = device.in_use()
    if used is None:
        return DeviceIdentity(CPU, name=platform.processor() or platform.machine())
    if used.type != "cuda":
        return DeviceIdentity(used.type, name=device.name(used))
    of = used if index is None else torch.device(used.type, index)
    return from_properties(device.properties(of), hip=torch.version.hip is not None)


def from_properties(properties: Any, *, hip: bool) -> DeviceIdentity:
    """The identity of a device, from torch's properties, whose fields depend on the version."""
    bus = getattr(properties, "pci_bus_id", None)
    pci_bus_id = ""
    if bus is not None:
        domain = getattr(properties, "pci_domain_id", 0)
        pci_bus_id = f"{domain:04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
    return DeviceIdentity(
        vendor=AMD if hip else NVIDIA,
        uuid=str(getattr(properties, "uuid", "")),
        pci_bus_id=pci_bus_id,
        name=str(properties.name),
    )


def devices_to_read(per_node: bool) -> list[DeviceIdentity]:
    """The devices whose power this process reads: its own, by default.

    With ``per_node``, the first rank of a node reads all devices that the node's ranks use, and the others read none. A
    node's ranks belong to one launcher: ``torchrun`` and similar ones set ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``. They
    use the first devices that each of them sees. A process that sees fewer devices than ranks reads its own.
    """
    own = identify()
    rank, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not per_node or not (rank.isdigit() and size.isdigit()):
        return [own]
    if own.vendor == CPU:
        return [own] if rank == "0" else []
    from overlap_callbacks.instruments import device

    if device.count() < int(size):
        return [own]
    devices = [identify(index) for index in range(int(size))] if rank == "0" else []
    # Partitions of one AMD socket share a PCI address: read its sensor once.
    by_place = {(of.vendor == AMD and of.pci_bus_id) or index: of for index, of in reversed([*enumerate(devices)])}
    return [*by_place.values()][::-1]


def find_source(
    identity: DeviceIdentity, *, utilisation: bool = True, powercap: Path = POWERCAP
) -> PowerSource | NoPower:
    """The power source of a device, or the reason why there is none. CPU counters never stand in for a GPU's.

    Args:
        identity: of the device.
        utilisation: whether to read the utilisation of the device's parts too.
        powercap: folder of the CPU's energy counters.
    """
    try:
        if identity.vendor == NVIDIA:
            from overlap_callbacks.instruments.power.nvml import NvmlSource

            return NvmlSource(identity.uuid, identity.pci_bus_id, utilisation=utilisation)
        if identity.vendor == AMD:
            from overlap_callbacks.instruments.power.amd import AmdSource

            return AmdSource(identity.pci_bus_id)
        if identity.vendor == CPU:
            return RaplSource(powercap)
    except PowerUnavailableError as error:
        return NoPower(str(error))
    except Exception as error:  # a vendor's package may raise anything, and power is not worth losing a job
        return NoPower(f"no power: {type(error).__name__}: {error}")
    return NoPower(f"no power: nothing is known of devices by {identity.vendor!r}")
