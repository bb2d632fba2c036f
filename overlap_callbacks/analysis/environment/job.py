"""From the environments of the ranks to that of the job: what they have in common, what differs, and where they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from overlap_callbacks.analysis.environment.transport import transports
from overlap_callbacks.analysis.formatting import DASH, ranges
from overlap_callbacks.analysis.results.environment import (
    Difference,
    JobEnvironment,
    RankEnvironment,
    RankPlace,
    RanksValue,
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
