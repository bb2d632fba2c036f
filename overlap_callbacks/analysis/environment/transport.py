"""What carries messages between the ranks, as far as settings and hardware tell. What nothing tells is ``unknown``."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

from overlap_callbacks.analysis.results.environment import RankEnvironment, Transport

UNKNOWN = "unknown"
WITHIN, BETWEEN = "ranks of one host", "hosts"


def transports(by_rank: Mapping[int, RankEnvironment], backend: str) -> tuple[Transport, ...]:
    """The transport between ranks that share a host, and between hosts, where there are such ranks.

    Args:
        by_rank: environments of the ranks.
        backend: of the default process group.
    """
    if "nccl" in backend:
        # A group with a backend for each kind of device communicates by that of the device that trains.
        backend = "gloo" if all(e.device == "cpu" for e in by_rank.values()) and "gloo" in backend else "nccl"
    hosts: dict[str, list[RankEnvironment]] = defaultdict(list)
    for environment in by_rank.values():
        hosts[environment.host_id or environment.hostname].append(environment)
    found = []
    if any(len(ranks) > 1 for ranks in hosts.values()):
        found.append(_within(hosts, backend))
    if len(hosts) > 1:
        found.append(_between(by_rank, backend))
    return tuple(found)


def _within(hosts: Mapping[str, list[RankEnvironment]], backend: str) -> Transport:
    environments = [environment for ranks in hosts.values() for environment in ranks]
    if backend == "gloo":
        return _gloo(WITHIN, environments)
    if backend != "nccl":
        return Transport(WITHIN, UNKNOWN, "nothing is known of this backend")
    if is_on(_common(environments, "NCCL_P2P_DISABLE")):
        return Transport(WITHIN, "no direct access between GPUs: host memory, or the network", "NCCL_P2P_DISABLE=1")
    pairs = [pair for ranks in hosts.values() for pair in itertools.combinations(ranks, 2)]
    linked = [_linked(a, b) for a, b in pairs]
    basis = "NVML, for each pair of GPUs; which path NCCL takes is its choice"
    if None in linked or not linked:
        return Transport(WITHIN, UNKNOWN, "NVML does not tell whether NVLink connects the GPUs")
    if all(linked):
        return Transport(WITHIN, "NVLink connects all GPUs of a host", basis)
    if any(linked):
        return Transport(WITHIN, "NVLink connects some GPUs of a host", basis)
    return Transport(WITHIN, "no NVLink connects the GPUs of a host", basis)


def _linked(a: RankEnvironment, b: RankEnvironment) -> bool | None:
    if a.nvlink_devices is None or b.nvlink_devices is None or not (a.pci_bus_id and b.pci_bus_id):
        return None
    return a.pci_bus_id == b.pci_bus_id or b.pci_bus_id in a.nvlink_devices


def _between(by_rank: Mapping[int, RankEnvironment], backend: str) -> Transport:
    environments = list(by_rank.values())
    if backend == "gloo":
        return _gloo(BETWEEN, environments)
    if backend != "nccl":
        return Transport(BETWEEN, UNKNOWN, "nothing is known of this backend")
    network = _common(environments, "NCCL_NET")
    if network is not None and network.lower() == "socket":
        return Transport(BETWEEN, "TCP sockets", f"NCCL_NET={network}")
    if network is not None and network.lower() == "ib":
        return Transport(BETWEEN, "InfiniBand or RoCE", f"NCCL_NET={network}")
    if network:
        return Transport(BETWEEN, f"the network plugin {network}", f"NCCL_NET={network}")
    if is_on(_common(environments, "NCCL_IB_DISABLE")):
        return Transport(BETWEEN, "not InfiniBand or RoCE: TCP sockets, or a network plugin", "NCCL_IB_DISABLE=1")
    return Transport(BETWEEN, UNKNOWN, "no variable tells which network NCCL takes")


def _gloo(between: str, environments: list[RankEnvironment]) -> Transport:
    named = _common(environments, "GLOO_DEVICE_TRANSPORT")
    if named:
        return Transport(between, f"Gloo's transport {named}", f"GLOO_DEVICE_TRANSPORT={named}")
    if any("GLOO_DEVICE_TRANSPORT" in environment.variables for environment in environments):
        return Transport(between, UNKNOWN, "GLOO_DEVICE_TRANSPORT is not alike on all ranks")
    return Transport(between, "TCP sockets", "Gloo's default on Linux")


def _common(environments: list[RankEnvironment], name: str) -> str | None:
    """The value that a variable has on all ranks; None if it has none, or several."""
    values = {environment.variables.get(name) for environment in environments}
    return values.pop() if len(values) == 1 else None


def is_on(value: str | None) -> bool:
    """Whether a variable that is 1 or 0 switches something on."""
    return value is not None and value.strip().isdigit() and int(value) > 0
