"""From the environments of the ranks to that of the job: what they have in common, what differs, and where they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlap_callbacks.analysis.environment.sums import (
    MAX_PLACES,
    EnvironmentSums,
    Values,
    add_environments,
    all_found,
    cpus_of,
    environment_of,
    host_of,
)
from overlap_callbacks.analysis.environment.transport import transports
from overlap_callbacks.analysis.formatting import DASH
from overlap_callbacks.analysis.rank_set import RankSet
from overlap_callbacks.analysis.results.environment import Difference, JobEnvironment, RanksValue
from overlap_callbacks.analysis.results.window import RankWindow

__all__ = ["MAX_DIFFERENCES", "MAX_PLACES", "MAX_VALUES", "cpus_of", "host_of", "job_environment", "pooled_environment"]

# What a record keeps of a large job. Counts are of all ranks.
MAX_DIFFERENCES = 40
MAX_VALUES = 8


def job_environment(windows: Sequence[RankWindow]) -> JobEnvironment | None:
    """The environment of the ranks that sent theirs; None if none did.

    Args:
        windows: by rank, ascending.
    """
    parts = [environment_of(window.rank, window.environment) for window in windows if window.environment is not None]
    return pooled_environment(add_environments(parts), windows[0].backend) if parts else None


def pooled_environment(sums: EnvironmentSums, backend: str) -> JobEnvironment:
    """The environment of the job.

    Args:
        sums: of its ranks.
        backend: of the default process group.
    """
    return JobEnvironment(
        lowest_rank=sums.lowest,
        num_ranks=sums.ranks.count,
        num_hosts=sums.host_names.count,
        num_devices=sums.devices.count if sums.devices_known else None,
        places=sums.places,
        differing=tuple(list(_differences(sums))[:MAX_DIFFERENCES]),
        transports=transports(sums, backend),
        crowded_host=all_found(sums).crowded,
    )


def _differences(sums: EnvironmentSums) -> Iterator[Difference]:
    for name, values in [*sums.fields.items(), *sums.variables.items()]:
        if len(values.values) > 1 or values.num_more:
            yield _difference(name, values)


def _difference(name: str, values: Values) -> Difference:
    shown = tuple(
        [RanksValue(value.value, _in_words(value.ranks), value.ranks.count) for value in values.values[:MAX_VALUES]]
    )
    return Difference(name, shown, len(values.values) + values.num_more)


def _in_words(ranks: RankSet) -> str:
    """E.g. ``ranks 0-6, 8``: of a job in which one rank differs, the others are most."""
    return f"{'rank' if ranks.count == 1 else 'ranks'} {ranks.in_words().replace(DASH, '-')}"
