"""Which GPUs of its host one GPU reaches by NVLink, as NVML tells."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.instruments.power.nvml import NvmlLibrary
from overlap_callbacks.instruments.power.source import PowerUnavailableError


def nvlink_devices(uuid: str, pci_bus_id: str) -> tuple[str, ...] | None:
    """PCI addresses, e.g. ``0000:3b:00.0``, of the other GPUs of this host that a GPU reaches by NVLink.

    Args:
        uuid: of the GPU; empty if unknown.
        pci_bus_id: of the GPU; empty if unknown.

    Returns:
        None if NVML is not there, does not know the GPU, or does not tell of one of its neighbours.
    """
    try:
        library = NvmlLibrary()
    except PowerUnavailableError:
        return None
    nvml = library.pynvml
    try:
        own = library.device(uuid, pci_bus_id)
        own_address = _address(nvml, own)
        linked = []
        for index in range(nvml.nvmlDeviceGetCount()):
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            address = _address(nvml, other)
            if address == own_address:
                continue
            status = nvml.nvmlDeviceGetP2PStatus(own, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == nvml.NVML_P2P_STATUS_OK:
                linked.append(address)
        return tuple(linked)
    except (nvml.NVMLError, PowerUnavailableError, AttributeError):
        return None
    finally:
        library.close()


def _address(nvml: Any, handle: Any) -> str:
    """As torch has it: NVML writes the domain with eight digits, and in capitals."""
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    text = (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).lower()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"
