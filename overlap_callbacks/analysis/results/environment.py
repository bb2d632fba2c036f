"""A job's software, settings and machines, and problems with them: plain data."""

from __future__ import annotations

from enum import StrEnum

import msgspec

# ``RankEnvironment.host_link`` of a device on its host's PCI bus.
PCIE = "PCIe"


class RankEnvironment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank's environment. Unknown texts are empty, unknown numbers 0.

    Attributes:
        host_id: digest of the machine's boot, the same in all containers of one machine.
        cpus: CPUs that the process may use, as a list of ranges, e.g. ``0-15,32-47``.
        num_threads: threads of torch's operators on the CPU.
        cuda, hip: version of CUDA or HIP that torch was built for.
        nccl: version of NCCL, or of RCCL in a build for ROCm.
        device: name of the device; ``cpu`` for a job on the host.
        compute_capability: NVIDIA: e.g. ``9.0``; AMD: the architecture, e.g. ``gfx942``.
        num_sms: SMs (AMD: compute units) of the device.
        pci_bus_id: PCI address of the device, e.g. ``0000:3b:00.0``.
        nvlink_devices: PCI addresses of the host's other GPUs that this one reaches by NVLink; None if unknown.
        framework: the adapter in use, with its framework's version.
        variables: environment variables, by name; ``analysis/environment/privacy.py`` selects them.
        host_link: what connects the device to its host, ``PCIe`` if known.
    """

    hostname: str
    host_id: str = ""
    cpus: str = ""
    num_threads: int = 0
    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    driver: str = ""
    device: str = "cpu"
    compute_capability: str = ""
    num_sms: int = 0
    memory_bytes: int = 0
    device_uuid: str = ""
    pci_bus_id: str = ""
    nvlink_devices: tuple[str, ...] | None = None
    framework: str = ""
    variables: dict[str, str] = {}
    host_link: str = ""


class RankPlace(msgspec.Struct, frozen=True):
    """Where one rank runs; ``device_uuid`` and ``pci_bus_id`` are empty if unknown."""

    rank: int
    hostname: str
    device: str
    device_uuid: str = ""
    pci_bus_id: str = ""


class RanksValue(msgspec.Struct, frozen=True):
    """A value that some of the ranks have; None if not set. ``ranks`` names the first of them."""

    value: str | None
    ranks: str
    num_ranks: int


class Difference(msgspec.Struct, frozen=True):
    """An environment variable, or a field of ``RankEnvironment``, that differs between ranks.

    ``values``: most frequent first, limited to the first few; there are ``num_values``.
    """

    name: str
    values: tuple[RanksValue, ...]
    num_values: int


class Transport(msgspec.Struct, frozen=True):
    """The transport of messages between ``ranks of one host`` or ``hosts``, as text, and the evidence for it."""

    between: str
    transport: str
    basis: str


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks' environments, of limited size: only the first of many places and differences.

    Attributes:
        lowest_rank: environment of the lowest rank that reported. What ``differing`` does not name is the same on all
            ranks.
        num_devices: distinct devices in use; None on CPU, or if a device has no known identity.
        crowded_host: a host whose ranks have more threads than CPUs, as text; empty if there is none.
    """

    lowest_rank: RankEnvironment
    num_ranks: int
    num_hosts: int
    num_devices: int | None
    places: tuple[RankPlace, ...] = ()
    differing: tuple[Difference, ...] = ()
    transports: tuple[Transport, ...] = ()
    crowded_host: str = ""


class Severity(StrEnum):
    SERIOUS = "serious"  # distorts the figures
    WARNING = "warning"  # costs time, or may
    NOTE = "note"  # worth knowing


class Finding(msgspec.Struct, frozen=True):
    """A setting that costs performance, or that changes the meaning of figures, and what to do about it.

    ``source``: address of its documentation.
    """

    rule: str
    severity: Severity
    message: str
    action: str
    source: str
