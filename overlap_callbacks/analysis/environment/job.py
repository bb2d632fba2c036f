"""Merges the ranks' environments into the job's: differences, places, and the transports of messages.

A few hosts are kept one by one, because the ranks of one host may report through different leaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec.structs import replace

from overlap_callbacks.analysis.formatting import DASH
from overlap_callbacks.analysis.rank_set import RankSet, union
from overlap_callbacks.analysis.results.environment import (
    PCIE,
    Difference,
    JobEnvironment,
    RankEnvironment,
    RankPlace,
    RanksValue,
    Transport,
)
from overlap_callbacks.analysis.sums import (
    Identities,
    add_identities,
    digest,
    distinct,
    first,
    of_lowest,
    struct_sum,
    table_sum,
)

# Limits of the record in a large job. Counts are of all ranks.
MAX_PLACES = 64
# Maximum hosts kept one by one: a leader has up to 64 members.
MAX_HOSTS = 64
# Maximum values kept per name (those of most ranks), and maximum names of variables.
MAX_VALUES_KEPT = 12
MAX_NAMES = 128
# Up to this many variables with several values keep all runs of ranks of a set; others keep only a few.
_MAX_DIFFERING = 24
_FEW_RUNS = 3

COMPARED = ("torch", "cuda", "hip", "nccl", "driver", "device")


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value, None if not set, and the ranks that have it."""

    value: str | None
    ranks: Annotated[RankSet, union]


class Values(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The values of a name, those of most ranks, and the number not kept; each part counts what it dropped."""

    values: tuple[Value, ...]
    num_more: int = 0

    @property
    def common(self) -> str | None:
        """The value that all ranks have; None if they differ, or it is not set."""
        return self.values[0].value if len(self.values) == 1 and not self.num_more else None


class HostsFound(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts about hosts.

    Attributes:
        shared: whether ranks share a host.
        linked, not_linked: whether two of these are on GPUs connected by NVLink (or on one GPU), and whether two are
            not.
        rank_unknown: whether one of them does not know its GPU, or its NVLink connections.
        no_pcie: whether the GPU of one is not known to be connected to its host by PCIe.
        crowded: lowest rank of the first host whose ranks have more threads than CPUs, and a description; None without.
    """

    shared: Annotated[bool, any] = False
    linked: Annotated[bool, any] = False
    not_linked: Annotated[bool, any] = False
    rank_unknown: Annotated[bool, any] = False
    no_pcie: Annotated[bool, any] = False
    crowded: Annotated[tuple[int, str] | None, of_lowest] = None


add_found = struct_sum(HostsFound)


class Host(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ranks of one host.

    Attributes:
        identity: of the machine.
        lowest: its lowest rank, and the host's name there.
        num_ranks: its ranks.
        num_threads: total threads of their operators.
        threads_known: whether every rank reported its threads and CPUs.
        cpus: the lists of CPUs that they may use.
        num_known: ranks that know their GPU and its NVLink neighbours.
        gpus: PCI addresses of the GPUs of these.
        reached: GPUs that any of these reaches by NVLink.
        reached_by_all: GPUs that each of these reaches by NVLink, or is; None without such ranks.
        no_pcie: as in ``HostsFound``.
    """

    identity: str
    lowest: Annotated[tuple[int, str], min]
    num_ranks: int
    num_threads: int
    threads_known: Annotated[bool, all]
    cpus: Annotated[tuple[str, ...], distinct]
    num_known: int
    gpus: Annotated[tuple[str, ...], distinct]
    reached: Annotated[tuple[str, ...], distinct]
    reached_by_all: Annotated[tuple[str, ...] | None, _in_all]
    no_pcie: Annotated[bool, any]


def _in_all(parts: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    known = [set(part) for part in parts if part is not None]
    return tuple(sorted(set.intersection(*known))) if known else None


class EnvironmentSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The environments of ranks.

    Attributes:
        ranks: ranks included.
        lowest: the environment of the lowest rank.
        places: where the lowest ranks run.
        values: of ``COMPARED``, then of the environment variables that any rank has, the first in the alphabet.
        on_cpu: whether all train on CPU.
        devices: distinct devices.
        devices_known: whether every rank's device has an identity.
        host_names: distinct hosts.
        hosts: the hosts, if there are few.
        found: facts about the hosts that are not kept.
    """

    ranks: Annotated[RankSet, union]
    lowest: Annotated[RankEnvironment, first]
    places: Annotated[tuple[RankPlace, ...], _places]
    values: Annotated[dict[str, Values], first]  # not merged in this way
    on_cpu: Annotated[bool, all]
    devices: Annotated[Identities, add_identities]
    devices_known: Annotated[bool, all]
    host_names: Annotated[Identities, add_identities]
    hosts: Annotated[tuple[Host, ...], _hosts]
    found: Annotated[HostsFound, add_found] = HostsFound()


_add_values = table_sum(Value, 1, order=lambda value: (-value.ranks.count, value.ranks.lowest))
_places = table_sum(RankPlace, 5, limit=MAX_PLACES)
_hosts = table_sum(Host, 1, order=lambda host: host.lowest)
_add = struct_sum(EnvironmentSums)


def host_of(environment: RankEnvironment) -> str:
    """Identifies a rank's machine."""
    return environment.host_id or environment.hostname


def environment_of(rank: int, environment: RankEnvironment) -> EnvironmentSums:
    own, host, gpu = RankSet.of((rank, rank)), host_of(environment), environment.pci_bus_id
    device = environment.device_uuid or (f"{host} {gpu}" if gpu else "")
    has_device = environment.device != "cpu" and bool(device)
    compared = {name: str(getattr(environment, name)) or None for name in COMPARED}
    variables = dict(sorted(environment.variables.items())[:MAX_NAMES])
    reached = environment.nvlink_devices if gpu else None
    return EnvironmentSums(
        ranks=own,
        lowest=environment,
        places=(RankPlace(rank, environment.hostname, environment.device, environment.device_uuid, gpu),),
        values={name: Values((Value(content, own),)) for name, content in (compared | variables).items()},
        on_cpu=environment.device == "cpu",
        devices=Identities((digest(device),) if has_device else ()),
        devices_known=has_device,
        host_names=Identities((digest(host),)),
        hosts=(
            Host(
                identity=host,
                lowest=(rank, environment.hostname),
                num_ranks=1,
                num_threads=environment.num_threads,
                threads_known=bool(environment.cpus and environment.num_threads),
                cpus=(environment.cpus,),
                num_known=int(reached is not None),
                gpus=() if reached is None else (gpu,),
                reached=tuple(sorted(set(reached or ()) - {gpu})),
                reached_by_all=None if reached is None else tuple(sorted({gpu, *reached})),
                no_pcie=environment.host_link != PCIE,
            ),
        ),
    )


def add_environments(parts: Sequence[EnvironmentSums]) -> EnvironmentSums:
    """The merged environments of all parts (at least one)."""
    parts = sorted(parts, key=lambda part: part.ranks.lowest)
    added = _add(parts)
    names = [*COMPARED, *sorted(set().union(*[part.values for part in parts]) - set(COMPARED))[:MAX_NAMES]]
    unset = [Values((Value(None, part.ranks),)) for part in parts]
    values, num_differing = {}, 0
    for name in names:
        of_name = [part.values.get(name, lacking) for part, lacking in zip(parts, unset, strict=True)]
        rows = _add_values([of.values for of in of_name])
        num_more = sum(of.num_more for of in of_name) + max(0, len(rows) - MAX_VALUES_KEPT)
        num_differing += len(rows) > 1 and name not in COMPARED
        if len(rows) > 1 and num_differing > _MAX_DIFFERING:
            rows = tuple([Value(row.value, row.ranks.cut(_FEW_RUNS)) for row in rows])
        values[name] = Values(rows[:MAX_VALUES_KEPT], num_more)
    if len(added.hosts) > MAX_HOSTS:
        added = replace(added, hosts=(), found=all_found(added))
    return replace(added, values=values)


def all_found(sums: EnvironmentSums) -> HostsFound:
    return add_found([sums.found, *map(_found_on, sums.hosts)])


def _found_on(host: Host) -> HostsFound:
    """Facts about a complete host."""
    rank, name = host.lowest
    cpus = len(set().union(*[cpus_of(cpus) for cpus in host.cpus]))
    crowded = None
    if host.threads_known and host.num_threads > cpus:
        words = f"{host.num_ranks} ranks on {name} have {host.num_threads} threads for {cpus} CPUs"
        crowded = rank, words
    if host.num_ranks == 1:
        return HostsFound(crowded=crowded)
    return HostsFound(
        shared=True,
        linked=host.num_known > len(host.gpus) or not set(host.gpus).isdisjoint(host.reached),
        not_linked=not set(host.gpus) <= set(host.reached_by_all or ()),
        rank_unknown=host.num_known < host.num_ranks,
        no_pcie=host.no_pcie,
        crowded=crowded,
    )


def cpus_of(cpu_list: str) -> set[int]:
    """The CPUs of a list such as ``0-3,8``; unreadable parts are skipped."""
    cpus: set[int] = set()
    for part in cpu_list.split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high or low).isdigit():
            cpus.update(range(int(low), int(high or low) + 1))
    return cpus


# Limit of the record in a large job. Counts are of all ranks.
MAX_DIFFERENCES = 40
MAX_VALUES = 8

# For a transport without evidence.
UNKNOWN = "unknown"
WITHIN, BETWEEN = "ranks of one host", "hosts"


def pooled_environment(sums: EnvironmentSums, backend: str) -> JobEnvironment:
    """The job's environment, from the sums over its ranks and the backend of the default process group."""
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
        # E.g. ``ranks 0-6, 8``, if one rank of a job differs from the rest.
        ranks = f"{'rank' if value.ranks.count == 1 else 'ranks'} {value.ranks.in_words().replace(DASH, '-')}"
        shown.append(RanksValue(value.value, ranks, value.ranks.count))
    return Difference(name, tuple(shown), len(values.values) + values.num_more)


# -- transports between the ranks, from settings and hardware


def _transports(sums: EnvironmentSums, backend: str) -> tuple[Transport, ...]:
    """The transport between ranks on one host, and between hosts, if there are such ranks."""
    if "nccl" in backend:
        # A group with one backend per kind of device communicates by that of the training device.
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
        return Transport(between, UNKNOWN, "GLOO_DEVICE_TRANSPORT differs between ranks")
    return Transport(between, "TCP sockets", "Gloo's default on Linux")


def _common(sums: EnvironmentSums, name: str) -> str | None:
    """The value of a variable on all ranks; None if it is not set, or ranks differ."""
    values = sums.values.get(name)
    return None if values is None else values.common


def is_on(value: str | None) -> bool:
    """Whether a variable with value 1 or 0 switches something on."""
    return value is not None and value.strip().isdigit() and int(value) > 0
