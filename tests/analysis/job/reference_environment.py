"""The reference: the environment of the job from those of all ranks at once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from overlap_callbacks.analysis.formatting import DASH, ranges
from overlap_callbacks.analysis.results.environment import (
    Difference,
    JobEnvironment,
    RankEnvironment,
    RankPlace,
    RanksValue,
    Transport,
)
from overlap_callbacks.analysis.results.window import RankWindow

# What a record keeps of a large job. Counts are of all ranks.
MAX_PLACES = 64
MAX_DIFFERENCES = 40
MAX_VALUES = 8

_COMPARED = ("torch", "cuda", "hip", "nccl", "driver", "device")


def job_environment(windows: Sequence[RankWindow]) -> JobEnvironment | None:
    """The environment of the ranks that sent theirs; None if none did.

    Args:
        windows: by rank, ascending.
    """
    by_rank = {window.rank: window.environment for window in windows if window.environment is not None}
    if not by_rank:
        return None
    lowest_rank = by_rank[min(by_rank)]
    hosts = {host_of(environment) for environment in by_rank.values()}
    return JobEnvironment(
        lowest_rank=lowest_rank,
        num_ranks=len(by_rank),
        num_hosts=len(hosts),
        num_devices=_num_devices(by_rank),
        places=tuple(
            [
                RankPlace(rank, e.hostname, e.device, e.device_uuid, e.pci_bus_id)
                for rank, e in list(by_rank.items())[:MAX_PLACES]
            ]
        ),
        differing=tuple(list(_differences(by_rank))[:MAX_DIFFERENCES]),
        transports=transports(by_rank, windows[0].backend),
        crowded_host=_crowded_host(by_rank),
    )


def host_of(environment: RankEnvironment) -> str:
    """What identifies the machine of a rank."""
    return environment.host_id or environment.hostname


def _num_devices(by_rank: Mapping[int, RankEnvironment]) -> int | None:
    identities = set()
    for environment in by_rank.values():
        if environment.device == "cpu" or not (environment.device_uuid or environment.pci_bus_id):
            return None
        identities.add(environment.device_uuid or (host_of(environment), environment.pci_bus_id))
    return len(identities)


def _differences(by_rank: Mapping[int, RankEnvironment]) -> Iterator[Difference]:
    for name in _COMPARED:
        difference = _difference(name, {rank: str(getattr(e, name)) or None for rank, e in by_rank.items()})
        if difference is not None:
            yield difference
    for name in sorted({name for environment in by_rank.values() for name in environment.variables}):
        difference = _difference(name, {rank: e.variables.get(name) for rank, e in by_rank.items()})
        if difference is not None:
            yield difference


def _difference(name: str, value_of: Mapping[int, str | None]) -> Difference | None:
    ranks_of: dict[str | None, list[int]] = {}
    for rank, value in value_of.items():
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) == 1:
        return None
    values = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    shown = tuple([RanksValue(value, _in_words(ranks), len(ranks)) for value, ranks in values[:MAX_VALUES]])
    return Difference(name, shown, len(values))


def _in_words(ranks: Sequence[int]) -> str:
    """E.g. ``ranks 0-6, 8``: of a job in which one rank differs, the others are most."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks).replace(DASH, '-')}"


def _crowded_host(by_rank: Mapping[int, RankEnvironment]) -> str:
    """The first host whose ranks together have more threads than CPUs that any of them may use."""
    ranks_of: dict[str, list[RankEnvironment]] = defaultdict(list)
    for environment in by_rank.values():
        ranks_of[host_of(environment)].append(environment)
    for ranks in ranks_of.values():
        if not all(environment.cpus and environment.num_threads for environment in ranks):
            continue
        threads = sum(environment.num_threads for environment in ranks)
        cpus = len(set().union(*[cpus_of(environment.cpus) for environment in ranks]))
        if threads > cpus:
            return f"{len(ranks)} ranks on {ranks[0].hostname} have {threads} threads for {cpus} CPUs"
    return ""


def cpus_of(cpu_list: str) -> set[int]:
    """The CPUs of a list such as ``0-3,8``; those that can be read."""
    cpus: set[int] = set()
    for part in cpu_list.split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high or low).isdigit():
            cpus.update(range(int(low), int(high or low) + 1))
    return cpus


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
        return Transport(between, UNKNOWN, "GLOO_DEVICE_TRANSPORT differs between ranks")
    return Transport(between, "TCP sockets", "Gloo's default on Linux")


def _common(environments: list[RankEnvironment], name: str) -> str | None:
    """The value that a variable has on all ranks; None if it has none, or several."""
    values = {environment.variables.get(name) for environment in environments}
    return values.pop() if len(values) == 1 else None


def is_on(value: str | None) -> bool:
    """Whether a variable that is 1 or 0 switches something on."""
    return value is not None and value.strip().isdigit() and int(value) > 0
