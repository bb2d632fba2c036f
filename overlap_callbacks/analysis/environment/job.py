"""The environment of the job, from those of its ranks: what differs, where they run, what carries their messages."""

from __future__ import annotations

from collections.abc import Iterator

from overlap_callbacks.analysis.environment.sums import EnvironmentSums, Values, all_found
from overlap_callbacks.analysis.formatting import DASH
from overlap_callbacks.analysis.results.environment import Difference, JobEnvironment, RanksValue, Transport

# What a record keeps of a large job. Counts are of all ranks.
MAX_DIFFERENCES = 40
MAX_VALUES = 8

# Of a transport that nothing shows.
UNKNOWN = "unknown"
WITHIN, BETWEEN = "ranks of one host", "hosts"


def pooled_environment(sums: EnvironmentSums, backend: str) -> JobEnvironment:
    """The environment of the job, from the sums over its ranks and the backend of the default process group."""
    crowded = all_found(sums).crowded
    return JobEnvironment(
        lowest_rank=sums.lowest,
        num_ranks=sums.ranks.count,
        num_hosts=sums.host_names.count,
        num_devices=sums.devices.count if sums.devices_known else None,
        places=sums.places,
        differing=tuple(list(_differences(sums))[:MAX_DIFFERENCES]),
        transports=_transports(sums, backend),
        crowded_host=crowded[1] if crowded else "",
    )


def _differences(sums: EnvironmentSums) -> Iterator[Difference]:
    for name, values in sums.values.items():
        if len(values.values) > 1 or values.num_more:
            yield _difference(name, values)


def _difference(name: str, values: Values) -> Difference:
    shown = []
    for value in values.values[:MAX_VALUES]:
        # E.g. ``ranks 0-6, 8``: of a job in which one rank differs, the others are most.
        ranks = f"{'rank' if value.ranks.count == 1 else 'ranks'} {value.ranks.in_words().replace(DASH, '-')}"
        shown.append(RanksValue(value.value, ranks, value.ranks.count))
    return Difference(name, tuple(shown), len(values.values) + values.num_more)


# -- transports: what carries messages between the ranks, by settings and hardware


def _transports(sums: EnvironmentSums, backend: str) -> tuple[Transport, ...]:
    """The transport between ranks that share a host, and between hosts, where there are such ranks."""
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
    if backend != "nccl":
        return _without_nccl(WITHIN, sums, backend)
    links = all_found(sums)
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
    if backend != "nccl":
        return _without_nccl(BETWEEN, sums, backend)
    network = _common(sums, "NCCL_NET")
    if network:
        known = {"socket": "TCP sockets", "ib": "InfiniBand or RoCE"}
        return Transport(BETWEEN, known.get(network.lower(), f"the network plugin {network}"), f"NCCL_NET={network}")
    if is_on(_common(sums, "NCCL_IB_DISABLE")):
        return Transport(BETWEEN, "not InfiniBand or RoCE: TCP sockets, or a network plugin", "NCCL_IB_DISABLE=1")
    return Transport(BETWEEN, UNKNOWN, "no variable tells which network NCCL takes")


def _without_nccl(between: str, sums: EnvironmentSums, backend: str) -> Transport:
    if backend != "gloo":
        return Transport(between, UNKNOWN, "nothing is known of this backend")
    named = _common(sums, "GLOO_DEVICE_TRANSPORT")
    if named:
        return Transport(between, f"Gloo's transport {named}", f"GLOO_DEVICE_TRANSPORT={named}")
    if "GLOO_DEVICE_TRANSPORT" in sums.values:
        return Transport(between, UNKNOWN, "GLOO_DEVICE_TRANSPORT is not alike on all ranks")
    return Transport(between, "TCP sockets", "Gloo's default on Linux")


def _common(sums: EnvironmentSums, name: str) -> str | None:
    """The value that a variable has on all ranks; None if it has none, or several."""
    values = sums.values.get(name)
    return None if values is None else values.common


def is_on(value: str | None) -> bool:
    """Whether a variable that is 1 or 0 switches something on."""
    return value is not None and value.strip().isdigit() and int(value) > 0
