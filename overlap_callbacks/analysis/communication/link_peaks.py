"""Peak bandwidths of the links between devices, the links of a job, and the share of their peak that messages reach.

A peak is per device and direction, in 10^9 bytes a second, without protocol overhead, like nccl-tests' bus bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from overlap_callbacks.analysis.environment.job import UNKNOWN, WITHIN
from overlap_callbacks.analysis.equations import wire_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SEVERAL_HOSTS, SizeTransfer
from overlap_callbacks.analysis.results.environment import JobEnvironment


class Link(NamedTuple):
    """A link: its common name, its peak, its components, and the address of its documentation."""

    name: str
    gb_s: float
    what: str
    source: str


_NVLINK = "https://www.nvidia.com/en-us/data-center/nvlink/"
_PCIE = "https://pcisig.com/faq?field_category_value%5B%5D=pci_express_5.0"
_INFINIBAND = "https://www.infinibandta.org/infiniband-roadmap/"
_ETHERNET = "https://ethernetalliance.org/technology/ethernet-roadmap/"
_INSTINCT = "https://rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi300.html"
_INSTINCT_350 = "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html"

LINKS = (
    Link("nvlink1", 80.0, "4 links of 20 GB/s (P100)", _NVLINK),
    Link("nvlink2", 150.0, "6 links of 25 GB/s (V100)", _NVLINK),
    Link("nvlink3", 300.0, "12 links of 25 GB/s (A100)", _NVLINK),
    Link("nvlink4", 450.0, "18 links of 25 GB/s (H100, H200)", _NVLINK),
    Link("nvlink5", 900.0, "18 links of 50 GB/s (B200, GB200)", _NVLINK),
    Link("nvlink-8x25", 200.0, "8 links of 25 GB/s (A800, H800)", _NVLINK),
    Link("infinity-fabric-mi300x", 448.0, "7 links of 64 GB/s (MI300X, MI325X)", _INSTINCT),
    Link("infinity-fabric-mi350x", 537.6, "7 links of 76.8 GB/s (MI350X, MI355X)", _INSTINCT_350),
    Link("pcie3", 15.75, "16 lanes of 8 GT/s", _PCIE),
    Link("pcie4", 31.5, "16 lanes of 16 GT/s", _PCIE),
    Link("pcie5", 63.0, "16 lanes of 32 GT/s", _PCIE),
    Link("ib-edr", 12.5, "4 lanes, 100 Gbit/s", _INFINIBAND),
    Link("ib-hdr", 25.0, "4 lanes, 200 Gbit/s", _INFINIBAND),
    Link("ib-ndr", 50.0, "4 lanes, 400 Gbit/s", _INFINIBAND),
    Link("ib-xdr", 100.0, "4 lanes, 800 Gbit/s", _INFINIBAND),
    Link("ethernet-10", 1.25, "10 Gbit/s, RoCE too", _ETHERNET),
    Link("ethernet-25", 3.125, "25 Gbit/s, RoCE too", _ETHERNET),
    Link("ethernet-40", 5.0, "40 Gbit/s, RoCE too", _ETHERNET),
    Link("ethernet-100", 12.5, "100 Gbit/s, RoCE too", _ETHERNET),
    Link("ethernet-200", 25.0, "200 Gbit/s, RoCE too", _ETHERNET),
    Link("ethernet-400", 50.0, "400 Gbit/s, RoCE too", _ETHERNET),
    Link("ethernet-800", 100.0, "800 Gbit/s, RoCE too", _ETHERNET),
)
_BY_NAME = {link.name: link for link in LINKS}

# By device name; the first match counts. Cards that an NVLink bridge can only join in pairs have none here.
_NVLINK_OF = (
    (r"\b[AH]800\b", "nvlink-8x25"),
    (r"PCIe|NVL\b|A10\b|A16\b|A30\b|A40\b|RTX", ""),
    (r"\bP100\b", "nvlink1"),
    (r"\bV100\b", "nvlink2"),
    (r"\bA100\b", "nvlink3"),
    (r"\bG?H[12]00\b|\bH20\b", "nvlink4"),
    (r"\bG?B[23]00\b", "nvlink5"),
)
_FABRIC_OF = ((r"MI3(00X|25X)", "infinity-fabric-mi300x"), (r"MI35[05]X", "infinity-fabric-mi350x"))
_PCIE_OF = (
    (r"\b(P100|V100|T4|RTX 20\d\d)\b|Quadro RTX", "pcie3"),
    (r"\b(A100|A800|A30|A40|A10|A16|L4|L40S?|RTX [34]0\d\d|RTX A\d+)\b|Ada", "pcie4"),
    (r"\b(H100|H200|H800|RTX 50\d\d)\b|RTX PRO", "pcie5"),
)
_MAX_GB_S = 1e6


class Gpu(NamedTuple):
    """A GPU by its common name: torch's name for it, and its memory."""

    device: str
    memory_gib: float

    @property
    def link(self) -> Link | None:
        """The link between GPUs of one host."""
        return next(filter(None, [_named(self.device, rules) for rules in (_NVLINK_OF, _FABRIC_OF, _PCIE_OF)]), None)


GPUS = {
    "v100": Gpu("V100-SXM2-32GB", 32),
    "a100": Gpu("A100-SXM4-80GB", 80),
    "a100-40gb": Gpu("A100-SXM4-40GB", 40),
    "a800": Gpu("A800-SXM4-80GB", 80),
    "l40s": Gpu("L40S", 48),
    "h100": Gpu("H100 80GB HBM3", 80),
    "h100-pcie": Gpu("H100 PCIe", 80),
    "h800": Gpu("H800 80GB HBM3", 80),
    "h200": Gpu("H200", 141),
    "b200": Gpu("B200", 180),
    "gb200": Gpu("GB200", 186),
    "mi300x": Gpu("Instinct MI300X", 192),
    "mi325x": Gpu("Instinct MI325X", 256),
}


class Peaks(NamedTuple):
    """The links that a job's messages take within a host and between hosts; None where unknown."""

    within: Link | None = None
    between: Link | None = None


def peaks_of(job: JobEnvironment | None, own: Peaks = Peaks()) -> Peaks:  # noqa: B008 - it is immutable
    """The links of a job: the user's, else from the record's transport and device. Only users know their network."""
    within = own.within
    if within is None and job is not None:
        transport = next((row.transport for row in job.transports if row.between == WITHIN), "")
        device = job.lowest_rank.device
        if transport.startswith("NVLink connects all"):
            within = _named(device, _NVLINK_OF)
        elif transport.startswith("PCIe (no NVLink"):
            within = _named(device, _PCIE_OF)
        elif transport == UNKNOWN and job.lowest_rank.hip:
            within = _named(device, _FABRIC_OF)
    return Peaks(within, own.between)


def link_of(text: str, option: str) -> Link:
    """A link by its name in ``LINKS``, or by a number of GB/s; ValueError (naming ``option``) for anything else."""
    if text.lower() in _BY_NAME:
        return _BY_NAME[text.lower()]
    try:
        gb_s = float(text)
    except ValueError:
        gb_s = 0.0
    if not 0 < gb_s <= _MAX_GB_S:
        names = ", ".join(_BY_NAME)
        raise ValueError(f"{option} must be a positive number of GB/s, or one of {names}; got {text!r}")
    return Link(f"{gb_s:g} GB/s", gb_s, "given", "")


def _named(device: str, rules: tuple[tuple[str, str], ...]) -> Link | None:
    return next((_BY_NAME.get(name) for pattern, name in rules if re.search(pattern, device)), None)


# -- by size

_BYTES_PER_MS = 1e6  # at 1 GB/s


class SizeBandwidth(NamedTuple):
    """Messages of one size: mean size, time of one (shortest over its ranks), bus bandwidth, and share of the peak."""

    transfer: SizeTransfer
    mean_bytes: float
    transfer_ms: float
    gb_s: float
    peak_fraction: float | None


def bandwidths(transfers: Iterable[SizeTransfer], peaks: Peaks) -> list[SizeBandwidth]:
    """The bandwidth of each plausible size; groups on several hosts are compared with the link between hosts."""
    found = []
    for row in transfers:
        factor = wire_factor(collective_of(row.operator), row.group_size) if row.is_valid else 0.0
        if factor <= 0:
            continue
        link = {ONE_HOST: peaks.within, SEVERAL_HOSTS: peaks.between}.get(row.reach)
        gb_s = row.bytes * factor / row.transfer_ms / _BYTES_PER_MS
        share = None if link is None else gb_s / link.gb_s
        found.append(SizeBandwidth(row, row.bytes / row.calls, row.transfer_ms / row.calls, gb_s, share))
    return found
