"""The parts of a report that figures are read from, each with its values' labels. Pure.

A part is anything with a figure's name as an attribute or key; a figure that was not measured has no part, or is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from overlap_callbacks.analysis.equations import bus_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import waiting_fraction
from overlap_callbacks.analysis.results.kernel_times import MEMORY, SMS, UNEXPLAINED, WAVES, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobPower
from overlap_callbacks.analysis.results.race import RaceVerdict
from overlap_callbacks.analysis.results.step_parts import BUBBLE, COMPUTE, IDLE, ON_HOST
from overlap_callbacks.analysis.sums import grouped

Parts = Iterator[tuple[Mapping[str, str], Any]]
_NONE: Mapping[str, str] = {}

_CAUSES = {
    "slowdown_from_sms": SMS, "slowdown_from_waves": WAVES, "slowdown_from_memory": MEMORY,
    "slowdown_unexplained": UNEXPLAINED,
}  # fmt: skip


def energy_saving(power: JobPower) -> float | None:
    """The fraction of a sequential step's energy that an overlapped one saves; negative if it takes more.

    None if the energy of a mode is unknown, or the modes were measured by different methods.
    """
    overlapped, sequential = power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL)
    if overlapped is None or sequential is None or overlapped.energy_method != sequential.energy_method:
        return None
    if overlapped.energy_per_step_j is None or not sequential.energy_per_step_j:
        return None
    return 1 - overlapped.energy_per_step_j / sequential.energy_per_step_j


def peak_rise(power: JobPower) -> float | None:
    """How much higher the highest power is in overlapped than in sequential steps, as a fraction; None if unknown."""
    overlapped, sequential = power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL)
    if overlapped is None or sequential is None or overlapped.peak_w is None or not sequential.peak_w:
        return None
    return overlapped.peak_w / sequential.peak_w - 1


def compute_slowdowns(pairs: Sequence[PairTime]) -> dict[str, float]:
    """How much longer compute kernels take during each kind of communication, by its name, over all families."""
    slowdowns = {}
    for beside in dict.fromkeys(pair.concurrent_with for pair in pairs):
        rows = [pair for pair in pairs if pair.concurrent_with == beside and not pair.communication]
        alone_ms = sum(pair.alone_ms for pair in rows)
        if alone_ms > 0:
            slowdowns[beside] = sum(pair.time_ms for pair in rows) / alone_ms - 1
    return slowdowns


def headline(report: Any) -> Parts:
    yield _NONE, report.figures()


def spreads(report: Any) -> Parts:
    yield _NONE, report.spread


def window(report: Any) -> Parts:
    yield _NONE, {"measurement_overhead": report.cost}
    yield _NONE, {"ranks_heard": report.num_reporting}
    yield _NONE, {name: float(getattr(report, name)) for name in ("valid", "verified", "complete", "control")}


def collectives(report: Any) -> Parts:
    by_name = grouped(report.collectives, lambda row: row.operator.strip("_").replace(".", "_"))
    for name, rows in by_name.items():
        # Bytes over a link, and their time.
        links = [(bus_factor(collective_of(row.operator), row.group_size), row.transfer) for row in rows]
        known = [(factor * sent[0], sent[1]) for factor, sent in links if factor and sent is not None]
        time_ms = sum([time for _, time in known])
        values = {"bytes": sum([row.bytes_in for row in rows]), "messages": sum([row.messages for row in rows])}
        bandwidth = sum([size for size, _ in known]) / time_ms / 1e6 if time_ms else None
        yield {"collective": name}, {**values, "busbw_gb_s": bandwidth}


def _named(dimension: str) -> Mapping[str, str]:
    return {"dimension": dimension.replace("+", "_")}


def dimensions(report: Any) -> Parts:
    """Communication of each dimension of parallelism, its cost to compute, and its fraction of a step.

    None of a job with one dimension: headline figures say the same.
    """
    if not report.has_several_dimensions:
        return
    for row in report.dimensions:
        yield _named(row.dimension), {
            "comm_ms": row.comm_ms, "exposed_ms": row.exposed_ms, "bytes": row.bytes_in, "comm_slowdown": row.slowdown,
        }  # fmt: skip
    for name, value in compute_slowdowns(report.dimension_pairs).items():
        yield _named(name), {"compute_slowdown": value}
    for share in report.dimension_shares():
        if share.name not in (COMPUTE, IDLE, ON_HOST, BUBBLE):  # parts of the step have these
            yield _named(share.name), {"step_fraction": share.fraction}


def modes(report: Any) -> Parts:
    return _by_mode(report, () if report.power is None else report.power.modes)


def energy_of_tokens(report: Any) -> Parts:
    for labels, mode in modes(report) if report.tokens_per_step else ():
        if mode.energy_per_step_j is not None:
            yield labels, {"energy_per_token_j": mode.energy_per_step_j / report.tokens_per_step}


def power_changes(report: Any) -> Parts:
    if report.power is not None:
        yield _NONE, {
            "energy_saving_vs_sequential": energy_saving(report.power), "peak_w_vs_sequential": peak_rise(report.power),
        }  # fmt: skip


def slowdown(report: Any) -> Parts:
    if report.slowdown_shares is not None:
        yield _NONE, {name: report.slowdown_shares.of(cause) for name, cause in _CAUSES.items()}
    cause = report.power_verdict
    if report.power is not None and cause is not None:
        yield _NONE, {"slowdown_from_clock": cause.from_clock, "slowdown_beyond_clock": cause.contention}


def memory(report: Any) -> Parts:
    return _by_mode(report, report.memory)


def _by_mode(report: Any, rows: Sequence[Any]) -> Parts:
    for row in rows:
        if report.compared or row.mode is not Mode.SEQUENTIAL:
            yield {"mode": row.mode.value}, row


def step(report: Any) -> Parts:
    """Where the time of an overlapped step goes."""
    found = report.step_parts()
    if found is None:
        return
    parts, _ = found
    shares = {f"step_{name.removesuffix('_ms')}_fraction": ms / parts.total_ms for name, ms in parts._asdict().items()}
    if not report.compared:
        del shares["step_contention_fraction"]
    yield _NONE, shares


def arrivals(report: Any) -> Parts:
    """How long ranks wait in collectives, and the rank that they wait longest for."""
    if report.arrivals is None:
        return
    yield _NONE, {"waiting_fraction": waiting_fraction([report.arrivals])}
    first = next(iter(report.arrivals.ranks), None)
    if first is not None and first.is_valid:
        yield _NONE, {
            "rank": first.rank, "worst_fraction": first.steps_blamed / first.steps,
            "last_fraction": first.times_last / first.calls, "chance_fraction": first.chance,
            "lost_fraction": first.lost_fraction,
        }  # fmt: skip


# Limit of stages with their own values.
_MAX_STAGES = 16


def bubble(report: Any) -> Parts:
    pipeline = report.pipeline
    if pipeline is None or not pipeline.is_valid:
        return
    yield _NONE, {"expected_bubble_fraction": pipeline.expected_fraction, "bubble_fraction": pipeline.fraction}


def stages(report: Any) -> Parts:
    pipeline = report.pipeline
    for stage in () if pipeline is None or not pipeline.is_valid else pipeline.stages[:_MAX_STAGES]:
        yield {"stage": str(stage.stage)}, {"stage_bubble_fraction": stage.fraction}


def traffic(report: Any) -> Parts:
    for row in () if report.traffic is None else report.traffic.dimensions:
        yield _named(row.dimension), row


def all_traffic(report: Any) -> Parts:
    """The share that crosses hosts, and how regular steps are."""
    sent = report.traffic
    if sent is None:
        return
    between = [row.between_hosts_bytes for row in sent.dimensions]
    known = [value for value in between if value is not None]
    sent_bytes = sum([row.sent_bytes for row in sent.dimensions])
    if sent_bytes > 0 and len(known) == len(between):
        yield _NONE, {"between_hosts_fraction": sum(known) / sent_bytes}
    if sent.num_steps and 0 <= sent.num_alike <= sent.num_steps:
        yield _NONE, {"steps_alike_fraction": sent.num_alike / sent.num_steps}


def race(report: Any) -> Parts:
    check = report.race
    if check is not None and check.verdict is not RaceVerdict.NOT_CHECKED:
        yield _NONE, {
            "found": check.verdict is RaceVerdict.RACE, "repeatable": check.verdict is not RaceVerdict.NOT_REPEATABLE,
            "differing_gradients": check.num_differences, "check_ms": check.took_ms,
        }  # fmt: skip


def attribute(name: str) -> Callable[[Any], Parts]:
    """A part that is an attribute of the report, by its name."""

    def parts(report: Any) -> Parts:
        if getattr(report, name) is not None:
            yield _NONE, getattr(report, name)

    return parts
