"""The environments of ranks, added up: what they have in common, what differs, and where they run.

Hosts are kept one by one as long as they are few: the ranks of a host may be heard through different leaders. Of many
hosts, what was found on them is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from overlap_callbacks.analysis.identities import Identities, add_identities
from overlap_callbacks.analysis.rank_set import RankSet, union_of
from overlap_callbacks.analysis.results.environment import PCIE, RankEnvironment, RankPlace

# What a record keeps of a large job. Counts are of all ranks.
MAX_PLACES = 64
# Hosts that are kept one by one: a leader has up to 64 members.
MAX_HOSTS = 64
# Values of one name that are kept, those of most ranks, and names.
MAX_VALUES_KEPT = 12
MAX_NAMES = 128
# Of so many names with several values, the ranks of each value are kept as far as they are of other sets; of others,
# so few ranges.
_MAX_DIFFERING = 24
_FEW_RANGES = 3

COMPARED = ("torch", "cuda", "hip", "nccl", "driver", "device")


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value, None where it is not set, and the ranks that have it."""

    value: str | None
    ranks: RankSet


class Values(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The values of a name.

    Attributes:
        values: those of most ranks.
        num_more: values that are not kept; of several parts that had to drop the same, each counts.
    """

    values: tuple[Value, ...]
    num_more: int = 0

    @property
    def common(self) -> str | None:
        """The value that all ranks have; None if they have several, or none is set."""
        return self.values[0].value if len(self.values) == 1 and not self.num_more else None


class Links(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which kinds of pairs of ranks that share a host there are.

    Attributes:
        linked: two on one GPU, or on two that NVLink connects.
        not_linked: two on GPUs that NVLink does not connect.
        rank_unknown: a rank that does not tell.
        no_pcie: a rank whose GPU is not known to be connected with its host by PCIe.
    """

    linked: bool = False
    not_linked: bool = False
    rank_unknown: bool = False
    no_pcie: bool = False


class Host(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ranks of one host.

    Attributes:
        identity: of the machine.
        hostname: of its lowest rank.
        first_rank: the lowest of its ranks.
        num_ranks: its ranks.
        num_threads: threads of their operators, in all.
        cpus: the lists of CPUs that they may use.
        threads_known: whether every rank tells its threads and CPUs.
        gpus: PCI addresses of their GPUs.
        reached_by_all: GPUs that each of them reaches by NVLink, or is.
        reached: GPUs that any of them reaches by NVLink, or is.
        links: what the pairs of its ranks have.
    """

    identity: str
    hostname: str
    first_rank: int
    num_ranks: int
    num_threads: int
    cpus: tuple[str, ...]
    threads_known: bool
    gpus: tuple[str, ...]
    reached_by_all: tuple[str, ...]
    reached: tuple[str, ...]
    links: Links


class HostsFound(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was found on hosts that are not kept one by one.

    Attributes:
        shared: whether ranks share a host.
        links: of the pairs that do; ``rank_unknown`` where one of a pair does not tell.
        crowded: the first host whose ranks have more threads than CPUs, in words; empty without one.
        crowded_rank: its lowest rank.
    """

    shared: bool = False
    links: Links = Links()
    crowded: str = ""
    crowded_rank: int = -1


class EnvironmentSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The environments of ranks.

    Attributes:
        ranks: that sent theirs.
        lowest: the environment of the lowest.
        places: where the lowest ranks run.
        fields: of ``COMPARED``, by name.
        variables: environment variables that any rank has, by name; of many, the first in the alphabet.
        on_cpu: whether all train on CPU.
        devices: distinct devices.
        devices_known: whether each rank's device has an identity.
        host_names: distinct hosts.
        hosts: the hosts, where they are few.
        found: on the hosts that are not kept.
    """

    ranks: RankSet
    lowest: RankEnvironment
    places: tuple[RankPlace, ...]
    fields: dict[str, Values]
    variables: dict[str, Values]
    on_cpu: bool
    devices: Identities
    devices_known: bool
    host_names: Identities
    hosts: tuple[Host, ...]
    found: HostsFound


def host_of(environment: RankEnvironment) -> str:
    """What identifies the machine of a rank."""
    return environment.host_id or environment.hostname


def environment_of(rank: int, environment: RankEnvironment) -> EnvironmentSums:
    """The environment of one rank."""
    own, host = RankSet.of(rank), host_of(environment)
    device = environment.device_uuid or (f"{host} {environment.pci_bus_id}" if environment.pci_bus_id else "")
    has_device = environment.device != "cpu" and bool(device)

    def value(content: str | None) -> Values:
        return Values((Value(content, own),))

    variables = dict(sorted(environment.variables.items())[:MAX_NAMES])
    return EnvironmentSums(
        ranks=own,
        lowest=environment,
        places=(
            RankPlace(rank, environment.hostname, environment.device, environment.device_uuid, environment.pci_bus_id),
        ),
        fields={name: value(str(getattr(environment, name)) or None) for name in COMPARED},
        variables={name: value(content) for name, content in variables.items()},
        on_cpu=environment.device == "cpu",
        devices=Identities.of(device) if has_device else Identities(),
        devices_known=has_device,
        host_names=Identities.of(host),
        hosts=(_host(rank, host, environment),),
        found=HostsFound(),
    )


def _host(rank: int, identity: str, environment: RankEnvironment) -> Host:
    gpu, reached = environment.pci_bus_id, environment.nvlink_devices
    known = bool(gpu) and reached is not None
    reach = tuple(sorted({gpu, *(reached or ())})) if known else ()
    return Host(
        identity=identity,
        hostname=environment.hostname,
        first_rank=rank,
        num_ranks=1,
        num_threads=environment.num_threads,
        cpus=(environment.cpus,),
        threads_known=bool(environment.cpus and environment.num_threads),
        gpus=(gpu,) if known else (),
        reached_by_all=reach,
        reached=reach,
        links=Links(rank_unknown=not known, no_pcie=environment.host_link != PCIE),
    )


def add_environments(parts: Sequence[EnvironmentSums]) -> EnvironmentSums:
    """The environments of all parts, of which there is at least one."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: part.ranks.lowest)
    variables = {
        name: _add_values([part.variables.get(name) or Values((Value(None, part.ranks),)) for part in parts])
        for name in sorted(set().union(*[part.variables for part in parts]))
    }
    kept = _fewer_ranges(dict(list(variables.items())[:MAX_NAMES]))
    hosts = _add_hosts([host for part in parts for host in part.hosts])
    found = _add_found([part.found for part in parts])
    if len(hosts) > MAX_HOSTS:
        hosts, found = (), _add_found([found, found_on(hosts)])
    places = sorted([place for part in parts for place in part.places], key=lambda place: place.rank)
    return EnvironmentSums(
        ranks=union_of(part.ranks for part in parts),
        lowest=parts[0].lowest,
        places=tuple(places[:MAX_PLACES]),
        fields={name: _add_values([part.fields[name] for part in parts]) for name in COMPARED},
        variables=kept,
        on_cpu=all(part.on_cpu for part in parts),
        devices=add_identities(part.devices for part in parts),
        devices_known=all(part.devices_known for part in parts),
        host_names=add_identities(part.host_names for part in parts),
        hosts=hosts,
        found=found,
    )


def _add_values(parts: Sequence[Values]) -> Values:
    ranks_of: dict[str | None, list[RankSet]] = {}
    for value in [value for part in parts for value in part.values]:
        ranks_of.setdefault(value.value, []).append(value.ranks)
    values = sorted(
        [Value(value, union_of(ranks)) for value, ranks in ranks_of.items()],
        key=lambda value: (-value.ranks.count, value.ranks.lowest),
    )
    num_more = sum(part.num_more for part in parts) + max(0, len(values) - MAX_VALUES_KEPT)
    return Values(tuple(values[:MAX_VALUES_KEPT]), num_more)


def _fewer_ranges(variables: dict[str, Values]) -> dict[str, Values]:
    differing = [name for name, values in variables.items() if len(values.values) > 1]
    for name in differing[_MAX_DIFFERING:]:
        few = [Value(value.value, value.ranks.cut(_FEW_RANGES)) for value in variables[name].values]
        variables[name] = Values(tuple(few), variables[name].num_more)
    return variables


# -- hosts


def _add_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """One entry of each host, by its lowest rank."""
    by_identity: dict[str, list[Host]] = {}
    for host in hosts:
        by_identity.setdefault(host.identity, []).append(host)
    merged = [_merged(sorted(of_host, key=lambda host: host.first_rank)) for of_host in by_identity.values()]
    return tuple(sorted(merged, key=lambda host: host.first_rank))


def _merged(parts: Sequence[Host]) -> Host:
    host = parts[0]
    for other in parts[1:]:
        host = _with(host, other)
    return host


def _with(host: Host, other: Host) -> Host:
    """Two parts of the ranks of one host; NVLink connects both ways."""
    pairs = bool(host.gpus and other.gpus)
    by_all, by_any = set(host.reached_by_all), set(host.reached)
    both = [bool(part.gpus) for part in (host, other)]
    reached_by_all = by_all & set(other.reached_by_all) if all(both) else by_all | set(other.reached_by_all)
    return Host(
        identity=host.identity,
        hostname=host.hostname,
        first_rank=host.first_rank,
        num_ranks=host.num_ranks + other.num_ranks,
        num_threads=host.num_threads + other.num_threads,
        cpus=tuple(sorted({*host.cpus, *other.cpus})),
        threads_known=host.threads_known and other.threads_known,
        gpus=tuple(sorted({*host.gpus, *other.gpus})),
        reached_by_all=tuple(sorted(reached_by_all)),
        reached=tuple(sorted(by_any | set(other.reached))),
        links=Links(
            linked=host.links.linked or other.links.linked or (pairs and not by_any.isdisjoint(other.gpus)),
            not_linked=host.links.not_linked or other.links.not_linked or (pairs and not by_all.issuperset(other.gpus)),
            rank_unknown=host.links.rank_unknown or other.links.rank_unknown,
            no_pcie=host.links.no_pcie or other.links.no_pcie,
        ),
    )


def found_on(hosts: Sequence[Host]) -> HostsFound:
    """What there is on whole hosts, which are in the order of their lowest ranks."""
    shared = [host for host in hosts if host.num_ranks > 1]
    crowded = next(((host, words) for host in hosts if (words := _crowded(host))), None)
    return HostsFound(
        shared=bool(shared),
        links=_add_links([host.links for host in shared]),
        crowded=crowded[1] if crowded else "",
        crowded_rank=crowded[0].first_rank if crowded else -1,
    )


def _add_found(parts: Sequence[HostsFound]) -> HostsFound:
    crowded = min([part for part in parts if part.crowded], key=lambda part: part.crowded_rank, default=HostsFound())
    return HostsFound(
        shared=any(part.shared for part in parts),
        links=_add_links([part.links for part in parts]),
        crowded=crowded.crowded,
        crowded_rank=crowded.crowded_rank,
    )


def _add_links(parts: Sequence[Links]) -> Links:
    return Links(
        linked=any(part.linked for part in parts),
        not_linked=any(part.not_linked for part in parts),
        rank_unknown=any(part.rank_unknown for part in parts),
        no_pcie=any(part.no_pcie for part in parts),
    )


def all_found(sums: EnvironmentSums) -> HostsFound:
    """What was found on all hosts."""
    return _add_found([sums.found, found_on(sums.hosts)])


def _crowded(host: Host) -> str:
    if not host.threads_known:
        return ""
    cpus = len(set().union(*[cpus_of(cpus) for cpus in host.cpus]))
    if host.num_threads <= cpus:
        return ""
    return f"{host.num_ranks} ranks on {host.hostname} have {host.num_threads} threads for {cpus} CPUs"


def cpus_of(cpu_list: str) -> set[int]:
    """The CPUs of a list such as ``0-3,8``; those that can be read."""
    cpus: set[int] = set()
    for part in cpu_list.split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high or low).isdigit():
            cpus.update(range(int(low), int(high or low) + 1))
    return cpus
