"""From the device that trains to the source of its power.

A device is found by what it is, its UUID or its PCI address, never by its number: the number that torch uses depends on
``CUDA_VISIBLE_DEVICES`` and its relatives, and counts in another order than NVML and AMD SMI do. torch knows the device
behind its number, whatever those variables say, so nothing here reads them.
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
    """What a device is.

    Attributes:
        vendor: ``nvidia``, ``amd`` or ``cpu``.
        uuid: with or without a prefix; empty where it is not known.
        pci_bus_id: such as ``0000:3b:00.0``; empty where it is not known.
        name: as torch calls it.
    """

    vendor: str
    uuid: str = ""
    pci_bus_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class NoPower:
    """There is no source; training and all else go on.

    Attributes:
        reason: why not, in one line.
    """

    reason: str


def identify(device: Any = None) -> DeviceIdentity:
    """What a torch device is. Never creates a CUDA context: a process that uses no CUDA is taken to train on the CPU.

    Args:
        device: a CUDA ``torch.device`` or its index; None for the current one.
    """
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return DeviceIdentity(CPU, name=platform.processor() or platform.machine())
    index = torch.cuda.current_device() if device is None else device
    return from_properties(torch.cuda.get_device_properties(index), hip=torch.version.hip is not None)


def from_properties(properties: Any, *, hip: bool) -> DeviceIdentity:
    """What a device is, by what torch says of it.

    Args:
        properties: of ``torch.cuda.get_device_properties``.
        hip: whether torch was built for ROCm.
    """
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
    """The devices whose power this process reads: its own, or, of one process of a node, all that the node's ranks use.

    A node's ranks are those of one launcher (``torchrun`` and its like set ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``),
    and use the first devices that each of them sees. A process that sees fewer reads its own.

    Args:
        per_node: read for the whole node, in its first rank.
    """
    own = identify()
    rank, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not per_node or not (rank.isdigit() and size.isdigit()):
        return [own]
    if own.vendor == CPU:
        return [own] if rank == "0" else []
    import torch

    if torch.cuda.device_count() < int(size):
        return [own]
    return [identify(index) for index in range(int(size))] if rank == "0" else []


def find_source(
    identity: DeviceIdentity, *, utilisation: bool = True, powercap: Path = POWERCAP
) -> PowerSource | NoPower:
    """The source of a device's power.

    The CPU's counters do not stand in for those of a GPU: they would be another device's.

    Args:
        identity: of the device.
        utilisation: read how busy the parts of the device are too, where it can tell.
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
    except Exception as error:  # a vendor's package may raise anything: power is not worth a job
        return NoPower(f"no power: {type(error).__name__}: {error}")
    return NoPower(f"no power: nothing is known of devices by {identity.vendor!r}")
