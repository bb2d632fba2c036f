"""Why a window does not count, and doubts about its figures, as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from overlap_callbacks.analysis.rank_set import RankSet, union
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.sums import table_sum

# Maximum overlap left in sequential steps. Above it, supposedly sequential steps were not. Gloo's host threads hand
# over within scheduler latency, so a little always remains there.
RESIDUAL_LIMIT = 0.02
RESIDUAL_LIMIT_GLOO = 0.05
# The same overlap as a share of communication: short communication may run entirely during compute and still be little
# of the compute. Jobs of this library's tests on Gloo had 0.00, and 0.55 if another thread communicated.
RESIDUAL_COMM_LIMIT = 0.2
RESIDUAL_COMM_LIMIT_GLOO = 0.3
# Idle time of sequential steps beyond that of overlapped ones, as a share of a sequential step.
MAX_HOST_WAIT = 0.02
# Slowdown of a step by the profiler, and its maximum difference between the modes.
MAX_PROFILER_SLOWDOWN = 0.10
MAX_PROFILER_DIFFERENCE = 0.05


def residual_limit(device: str, backend: str = "") -> float:
    """Residual overlap, as a fraction, above which a window is not valid; ``device`` is ``cpu`` on the host."""
    return RESIDUAL_LIMIT_GLOO if _hands_over_late(device, backend) else RESIDUAL_LIMIT


def residual_comm_limit(device: str, backend: str = "") -> float:
    """Residual overlap as a share of communication above which a window is not valid; see ``residual_limit``."""
    return RESIDUAL_COMM_LIMIT_GLOO if _hands_over_late(device, backend) else RESIDUAL_COMM_LIMIT


def _hands_over_late(device: str, backend: str) -> bool:
    return device == "cpu" or backend == "gloo"


def escaped_communication(figures: Mapping[str, Estimate], device: str, backend: str) -> str | None:
    """Why the sequential steps were not sequential, from the figures over all ranks; None if they were."""
    of_compute, of_comm = figures.get("residual_overlap"), figures.get("residual_comm_overlap")
    limit = residual_limit(device, backend)
    if of_compute is not None and of_compute.value > limit:
        return (
            f"in sequential steps {of_compute.value:.1%} of compute ran during communication, above {limit:.0%}: some "
            f"communication escaped the gate (CUDA graphs, symmetric memory, another thread, coalesced collectives), "
            f"so the comparison does not hold [OC321]"
        )
    limit = residual_comm_limit(device, backend)
    if of_comm is not None and of_comm.value > limit:
        return (
            f"in sequential steps {of_comm.value:.0%} of communication time ran during compute, above "
            f"{limit:.0%}: that is little of the compute, but most communication times of sequential "
            f"steps are those of overlapped ones, so the comparison does not hold [OC322]"
        )
    return None


# Maximum different configurations that ranks of one part measured.
_MAX_TERMS = 16


class Measured(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The configuration that must be the same on all ranks, as in ``RankWindow``, and the ranks that have it."""

    terms: str
    window: int
    first_step: int
    ranks: Annotated[RankSet, union]


# Beyond the limit, only the first are named, which have the lowest ranks.
add_measured = table_sum(Measured, 3, order=lambda row: row.ranks.lowest, limit=_MAX_TERMS)


def uncounted_modes(figures: Mapping[str, Estimate]) -> str | None:
    """Which mode a complete window lacks step times of, from the figures over all ranks; None if it has both."""
    missing = [
        mode.value
        for mode, name in ((Mode.OVERLAPPED, "e2e_overlapped_ms"), (Mode.SEQUENTIAL, "e2e_sequential_ms"))
        if name not in figures
    ]
    if not missing:
        return None
    return f"no {' and no '.join(missing)} step counts, so there is nothing to compare [OC327]"


def unlike_ranks(measured: Sequence[Measured]) -> str | None:
    """Which ranks measured something different from the first; None if all measured the same."""
    others = union([row.ranks for row in measured[1:]])
    if not others:
        return None
    return (
        f"{others.named()} measured something else than rank {measured[0].ranks.lowest}: the schedule, the form of "
        f"sequential mode or the first step differs, so means over the ranks say nothing [OC326]"
    )


def remarks(figures: Mapping[str, Estimate], device: str) -> list[str]:
    """Doubts about the figures of a valid window, from the figures over all ranks."""
    problems: list[str] = []
    if device == "cpu":
        return problems  # there the host is the device, and profiling its operators takes long
    if _wait_for_host(figures):
        problems.append(
            "sequential steps wait for the host: they are idle for longer than overlapped ones, by more than "
            f"{MAX_HOST_WAIT:.0%} of a step, so the gain of overlap is overstated [OC331]"
        )
    slowdowns = [figures.get("profiler_slowdown"), figures.get("profiler_slowdown_isolated")]
    known = [slowdown for slowdown in slowdowns if slowdown is not None]
    if any(_low(slowdown) > MAX_PROFILER_SLOWDOWN for slowdown in known):
        problems.append(
            f"the profiler makes steps longer by more than {MAX_PROFILER_SLOWDOWN:.0%}: figures of kernels are of "
            "slower steps than step times are [OC332]"
        )
    elif len(known) == 2 and _differ(known[0], known[1]):
        problems.append(
            "the profiler slows one mode more than the other, by more than "
            f"{MAX_PROFILER_DIFFERENCE:.0%}: figures of kernels are of other steps than step times are [OC333]"
        )
    return problems


def _wait_for_host(figures: Mapping[str, Estimate]) -> bool:
    idle, idle_isolated = figures.get("idle_ms"), figures.get("idle_isolated_ms")
    step = figures.get("e2e_sequential_ms")
    if idle is None or idle_isolated is None or step is None:
        return False
    return idle_isolated.value - idle.value > MAX_HOST_WAIT * step.value


def _low(slowdown: Estimate) -> float:
    return slowdown.value if slowdown.ci_low is None else slowdown.ci_low


def _differ(one: Estimate, other: Estimate) -> bool:
    """Whether two slowdowns differ by more than allowed, and by more than noise."""
    low, high = sorted((one, other), key=lambda slowdown: slowdown.value)
    if high.value - low.value <= MAX_PROFILER_DIFFERENCE:
        return False
    return low.ci_high is None or high.ci_low is None or low.ci_high < high.ci_low
