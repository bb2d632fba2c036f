"""Where the time of an overlapped step goes: parts that add up to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.window import DimensionTime

# The figures that the parts need.
REQUIRED_FIGURES = (
    "compute_busy_ms",
    "exposed_comm_ms",
    "idle_ms",
    "compute_busy_isolated_ms",
    "bubble_ms",
    "exposed_on_host_ms",
)


class StepParts(NamedTuple):
    """The parts of an overlapped step under the profiler, in milliseconds, means over the ranks.

    Attributes:
        compute_ms: compute, for as long as it takes alone.
        contention_ms: what compute takes longer beside communication; below zero where it was faster.
        transfer_ms: exposed communication without ``waiting_ms`` and the bubble.
        waiting_ms: exposed communication when ranks waited for the last one.
        bubble_ms: the bubble of a pipeline, with its idle time.
        idle_ms: neither compute nor communication; 0 if part of the bubble.
        on_host_ms: exposed communication on the host: the device is idle, and the host waits for its own.
    """

    compute_ms: float
    contention_ms: float
    transfer_ms: float
    waiting_ms: float
    bubble_ms: float
    idle_ms: float
    on_host_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return sum(self)


def profiled_step_ms(figures: Mapping[str, Estimate]) -> float | None:
    """The time of an overlapped step under the profiler: that of its parts together; None without a profile.

    What a profile measures is shown as a share of this step, never of one without the profiler, which may be shorter.
    """
    found = [figures.get(name) for name in ("compute_busy_ms", "exposed_comm_ms", "idle_ms")]
    total_ms = sum([figure.value for figure in found if figure is not None])
    return total_ms if None not in found and total_ms > 0 else None


def exposed_share(figures: Mapping[str, Estimate]) -> Estimate | None:
    """Exposed communication of a window or a run as a share of an overlapped step under the profiler; None without one.

    Of the interval, that of the step's time is left out.
    """
    total_ms, exposed = profiled_step_ms(figures), figures.get("exposed_comm_ms")
    if total_ms is None or exposed is None:
        return None

    def share(ms: float | None) -> float | None:
        return None if ms is None else min(1.0, max(0.0, ms / total_ms))

    value = exposed.value / total_ms
    return Estimate(value, share(exposed.ci_low), share(exposed.ci_high), exposed.num_steps, exposed.num_blocks)


def surely_exposed(figures: Mapping[str, Estimate]) -> bool:
    """Whether the exposed share is known to half of itself: well enough to try to win it."""
    share = exposed_share(figures)
    return share is not None and share.ci_low is not None and share.ci_low >= share.value / 2 > 0


class LateRank(NamedTuple):
    """The rank for which the others wait, and for how long per step, mean over the ranks.

    It computes for longer than others if it is ``busy``; else it is idle for longer.
    """

    rank: int
    waiting_ms: float
    busy: bool


def step_parts(figures: Mapping[str, Estimate], late: LateRank | None = None) -> StepParts | None:
    """The parts of a step of a window or a run; None without a profile of overlapped steps.

    Of the figures, those that compare with sequential steps are given only if they count.
    """
    value = {name: figure.value for name, figure in figures.items()}
    if not all(name in value for name in ("compute_busy_ms", "exposed_comm_ms", "idle_ms")):
        return None
    busy, exposed, idle = value["compute_busy_ms"], value["exposed_comm_ms"], value["idle_ms"]
    alone = value.get("compute_busy_isolated_ms", busy)
    on_host = min(idle, max(0.0, value.get("exposed_on_host_ms", 0.0)))
    bubble = value.get("bubble_ms")
    if bubble is not None:
        # Messages that wait for their peer are in flight, so exposed communication includes them. It differs between
        # stages by their place, so a difference between ranks does not indicate a late one.
        waiting_receives = min(exposed, max(0.0, bubble - idle))
        stage_waits = idle + waiting_receives - on_host
        return StepParts(alone, busy - alone, exposed - waiting_receives, 0.0, stage_waits, 0.0, on_host)
    waiting = 0.0 if late is None else min(exposed, late.waiting_ms)
    return StepParts(alone, busy - alone, exposed - waiting, waiting, 0.0, idle - on_host, on_host)


def late_rank(figures: Mapping[str, Estimate], spread: Mapping[str, Spread]) -> LateRank | None:
    """The rank that others wait for in collectives; None if there is none.

    The last rank waits for nobody, so its communication is exposed for the shortest time. That alone may have other
    reasons: a rank may hide more. So the same rank must also compute longest or idle longest, and the others must not
    wait longer than that difference.
    """
    exposed, of_exposed = figures.get("exposed_comm_ms"), spread.get("exposed_comm_ms")
    if exposed is None or of_exposed is None:
        return None
    rank, longest_wait = of_exposed.low_rank, exposed.value - of_exposed.low
    found = []
    for name, busy in (("compute_busy_ms", True), ("idle_ms", False)):
        mean, of_ranks = figures.get(name), spread.get(name)
        if mean is not None and of_ranks is not None and of_ranks.high_rank == rank:
            found.append(LateRank(rank, min(longest_wait, of_ranks.high - mean.value), busy))
    latest = max(found, key=lambda late: late.waiting_ms, default=None)
    return latest if latest is not None and latest.waiting_ms > 0 else None


def measured_parts(
    figures: Mapping[str, Estimate], spread: Mapping[str, Spread], *, compared: bool
) -> tuple[StepParts, LateRank | None] | None:
    """The parts of a window's step, and the rank for which others wait; None where they were not measured.

    Unless it is ``compared`` with sequential steps that were sequential, contention is part of compute.
    """
    if not compared:
        figures = {name: figure for name, figure in figures.items() if name != "compute_busy_isolated_ms"}
    late = late_rank(figures, spread)
    parts = step_parts(figures, late)
    return None if parts is None or parts.total_ms <= 0 else (parts, late)


def mean_parts(of_windows: Sequence[StepParts]) -> StepParts:
    """Means over windows, of which there is one at least; they add up to the mean step."""
    return StepParts(*[sum(column) / len(of_windows) for column in zip(*of_windows, strict=True)])


# From this share of a step on, compute bounds it: without anything else it would be a fifth shorter at most.
COMPUTE_BOUND_FROM = 0.8
# The second largest is named too if it is at least this fraction of the largest.
_NEARLY = 0.7


class Bound(Enum):
    """What bounds a step."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    LAUNCH = "launch"
    BUBBLE = "bubble"
    STRAGGLER = "straggler"
    HOST_COMMUNICATION = "host_communication"


def times_ms(parts: StepParts) -> dict[Bound, float]:
    return {
        Bound.COMPUTE: parts.compute_ms + parts.contention_ms,
        Bound.COMMUNICATION: parts.transfer_ms,
        Bound.STRAGGLER: parts.waiting_ms,
        Bound.BUBBLE: parts.bubble_ms,
        Bound.LAUNCH: parts.idle_ms,
        Bound.HOST_COMMUNICATION: parts.on_host_ms,
    }


def bound_of(parts: StepParts) -> tuple[Bound, Bound | None]:
    """What bounds a step, and a close second, if any."""
    losses = times_ms(parts)
    if losses.pop(Bound.COMPUTE) >= COMPUTE_BOUND_FROM * parts.total_ms:
        return Bound.COMPUTE, None
    first, second = sorted(losses, key=lambda bound: -losses[bound])[:2]
    return first, second if losses[second] >= _NEARLY * losses[first] else None


BUBBLE, COMPUTE, IDLE, ON_HOST = "bubble", "compute", "idle", "host communication"
_PIPELINE = "pipeline"
# No step takes this many milliseconds.
_TOO_LONG = 1e15


class StepShare(NamedTuple):
    """A part of the step: a dimension of parallelism; ``bubble``, ``compute`` (with contention), ``idle`` and so on."""

    name: str
    ms: float
    fraction: float


def step_shares(
    dimensions: Sequence[DimensionTime], parts: StepParts, figures: Mapping[str, Estimate]
) -> tuple[StepShare, ...]:
    """Parts that add up to an overlapped step: dimensions, the largest first, then the rest.

    A dimension gets the time when it is in flight without compute; messages that wait for their peer count as bubble.
    If several dimensions are in flight at once, their times are scaled down to the step's exposed communication.
    """
    total_ms = parts.total_ms
    if not dimensions or not 0 < total_ms < _TOO_LONG:
        return ()
    if not all([abs(row.exposed_ms) < _TOO_LONG for row in dimensions]):  # in another writer's record
        return ()
    idle = figures.get("idle_ms")
    idle_ms = (idle.value if idle else 0.0) - parts.on_host_ms
    waiting_ms = max(0.0, parts.bubble_ms - idle_ms) if parts.bubble_ms else 0.0
    exposed = {row.dimension: max(0.0, row.exposed_ms) for row in dimensions}
    if _PIPELINE in exposed:
        exposed[_PIPELINE] = max(0.0, exposed[_PIPELINE] - waiting_ms)
    transfer_ms, known_ms = parts.transfer_ms + parts.waiting_ms, sum(exposed.values())
    scale = transfer_ms / known_ms if known_ms > 0 else 0.0
    rows = [(name, ms * scale) for name, ms in exposed.items()]
    rows.sort(key=lambda row: (-row[1], row[0]))
    others = (
        (BUBBLE, parts.bubble_ms), (ON_HOST, parts.on_host_ms), (IDLE, parts.idle_ms),
        (COMPUTE, parts.compute_ms + parts.contention_ms),
    )  # fmt: skip
    rows += [(name, ms) for name, ms in others if ms > 0]
    return tuple([StepShare(name, ms, ms / total_ms) for name, ms in rows])
