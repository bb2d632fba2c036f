"""What carries messages between the ranks, as far as settings and hardware tell. What nothing tells is ``unknown``."""

from __future__ import annotations

from overlap_callbacks.analysis.environment.sums import EnvironmentSums, all_found
from overlap_callbacks.analysis.results.environment import Transport

UNKNOWN = "unknown"
WITHIN, BETWEEN = "ranks of one host", "hosts"


def transports(sums: EnvironmentSums, backend: str) -> tuple[Transport, ...]:
    """The transport between ranks that share a host, and between hosts, where there are such ranks.

    Args:
        sums: environments of the ranks.
        backend: of the default process group.
    """
    if "nccl" in backend:
        # A group with a backend for each kind of device communicates by that of the device that trains.
        backend = "gloo" if sums.on_cpu and "gloo" in backend else "nccl"
    found = []
    if all_found(sums).shared:
        found.append(_within(sums, backend))
    if sums.host_names.count > 1:
        found.append(_between(sums, backend))
    return tuple(found)


def _within(sums: EnvironmentSums, backend: str) -> Transport:
    if backend == "gloo":
        return _gloo(WITHIN, sums)
    if backend != "nccl":
        return Transport(WITHIN, UNKNOWN, "nothing is known of this backend")
    links = all_found(sums).links
    if is_on(_common(sums, "NCCL_P2P_DISABLE")):
        if is_on(_common(sums, "NCCL_SHM_DISABLE")):
            return Transport(WITHIN, "the network, also within a host", "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1")
        through = "host memory" if links.no_pcie else "PCIe to host memory"
        return Transport(WITHIN, f"no direct access between GPUs: {through}, or the network", "NCCL_P2P_DISABLE=1")
    basis = "NVML, for each pair of GPUs; which path NCCL takes is its choice"
    if links.rank_unknown:
        return Transport(WITHIN, UNKNOWN, "NVML does not tell whether NVLink connects the GPUs")
    if not links.not_linked:
        return Transport(WITHIN, "NVLink connects all GPUs of a host", basis)
    if links.linked:
        others = "" if links.no_pcie else ", PCIe the others"
        return Transport(WITHIN, f"NVLink connects some GPUs of a host{others}", basis)
    if links.no_pcie:
        return Transport(WITHIN, "no NVLink connects the GPUs of a host", basis)
    return Transport(
        WITHIN,
        "PCIe (no NVLink seen)",
        "NVML, for each pair of GPUs; from GPU to GPU, through host memory, or the network: that is NCCL's choice",
    )


def _between(sums: EnvironmentSums, backend: str) -> Transport:
    if backend == "gloo":
        return _gloo(BETWEEN, sums)
    if backend != "nccl":
        return Transport(BETWEEN, UNKNOWN, "nothing is known of this backend")
    network = _common(sums, "NCCL_NET")
    if network is not None and network.lower() == "socket":
        return Transport(BETWEEN, "TCP sockets", f"NCCL_NET={network}")
    if network is not None and network.lower() == "ib":
        return Transport(BETWEEN, "InfiniBand or RoCE", f"NCCL_NET={network}")
    if network:
        return Transport(BETWEEN, f"the network plugin {network}", f"NCCL_NET={network}")
    if is_on(_common(sums, "NCCL_IB_DISABLE")):
        return Transport(BETWEEN, "not InfiniBand or RoCE: TCP sockets, or a network plugin", "NCCL_IB_DISABLE=1")
    return Transport(BETWEEN, UNKNOWN, "no variable tells which network NCCL takes")


def _gloo(between: str, sums: EnvironmentSums) -> Transport:
    named = _common(sums, "GLOO_DEVICE_TRANSPORT")
    if named:
        return Transport(between, f"Gloo's transport {named}", f"GLOO_DEVICE_TRANSPORT={named}")
    if "GLOO_DEVICE_TRANSPORT" in sums.variables:
        return Transport(between, UNKNOWN, "GLOO_DEVICE_TRANSPORT is not alike on all ranks")
    return Transport(between, "TCP sockets", "Gloo's default on Linux")


def _common(sums: EnvironmentSums, name: str) -> str | None:
    """The value that a variable has on all ranks; None if it has none, or several."""
    values = sums.variables.get(name)
    return None if values is None else values.common


def is_on(value: str | None) -> bool:
    """Whether a variable that is 1 or 0 switches something on."""
    return value is not None and value.strip().isdigit() and int(value) > 0
