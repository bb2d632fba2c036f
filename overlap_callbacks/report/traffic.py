"""The traffic of a run as the page, the terminal and pictures show it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.communication.placement import (
    UNKNOWN,
    MappingError,
    equal_hosts,
    host_numbers,
    layout_of,
    order_of,
    parse_order,
    placed,
)
from overlap_callbacks.analysis.communication.rank_grids import Ranks
from overlap_callbacks.analysis.communication.soundness import are_sound
from overlap_callbacks.analysis.communication.traffic import RING, dimension_totals
from overlap_callbacks.analysis.communication.view import LOGICAL, Placement, TrafficView, view_of
from overlap_callbacks.analysis.results.environment import JobEnvironment
from overlap_callbacks.analysis.results.messages import DimensionTraffic, JobMessages
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.environment_words import job_environment_of
from overlap_callbacks.report.record import Record


class NoTrafficError(ValueError):
    """The record has no messages."""


@dataclass(frozen=True)
class Mapping:
    """The traffic of a layout of the job's dimensions on its hosts.

    Attributes:
        name: the order of the dimensions, the innermost first; empty for the job as it ran, if that shows no order.
        as_run: whether the job ran like that.
        dimensions: what is sent.
        view: between whom.
    """

    name: str
    as_run: bool
    dimensions: tuple[DimensionTraffic, ...]
    view: TrafficView


@dataclass(frozen=True)
class RunTraffic:
    """The traffic of a run.

    Attributes:
        window: from which the messages are.
        messages: of the job.
        num_steps, num_alike: counted steps of all windows, summed over ranks, and those that sent the same.
        num_hosts: hosts; None if not known.
        mappings: the job as it ran, and as the user asks for.
    """

    window: int
    messages: JobMessages
    num_steps: int
    num_alike: int
    num_hosts: int | None
    mappings: tuple[Mapping, ...]


def traffic_of(
    record: Record,
    *,
    by: str | None = None,
    order: str = LOGICAL,
    algorithm: str = RING,
    mapping: str | None = None,
    ranks_per_host: int | None = None,
    names: bool = True,
) -> RunTraffic:
    """The traffic of a run.

    Args:
        record: of the run.
        by: what rows and columns stand for; see ``view_of``.
        order: of ranks.
        algorithm: of all-reduces.
        mapping: another order of the dimensions to compare with, e.g. ``tp-dp-pp``.
        ranks_per_host: hosts of so many consecutive ranks each, instead of those of the run.
        names: whether hosts are called by their names, as far as the record has them; else by numbers.

    Raises:
        NoTrafficError: the record has no messages.
        MappingError: the job cannot be laid out like that.
        ViewError: the traffic cannot be shown like that.
    """
    window = latest_messages(record)
    if window is None or window.messages is None:
        raise NoTrafficError(f"{record.path} has no messages: it is of an earlier version, or no window was measured")
    messages = window.messages
    if ranks_per_host is None:
        hosts = host_numbers(messages, window.world_size)
        host_names = _names(hosts, job_environment_of(record)) if names else {}
    else:
        hosts, host_names = equal_hosts(window.world_size, ranks_per_host), {}
    placement = Placement(hosts, host_names)
    mappings = laid_out(messages, placement, by=by, order=order, algorithm=algorithm, mapping=mapping)
    counted = [report.traffic for report in record.windows if report.traffic is not None]
    counted = [traffic for traffic in counted if 0 <= traffic.num_alike <= traffic.num_steps]  # others cannot be
    return RunTraffic(
        window=window.window,
        messages=messages,
        num_steps=sum([traffic.num_steps for traffic in counted]),
        num_alike=sum([traffic.num_alike for traffic in counted]),
        num_hosts=placement.num_hosts if placement.known else None,
        mappings=mappings,
    )


def laid_out(
    messages: JobMessages,
    placement: Placement,
    *,
    by: str | None = None,
    order: str = LOGICAL,
    algorithm: str = RING,
    mapping: str | None = None,
) -> tuple[Mapping, ...]:
    """The traffic of a job as it is laid out, and in another order of its dimensions if one is asked for.

    Args:
        messages: of the job.
        placement: where its ranks stand.
        by: what rows and columns stand for; see ``view_of``.
        order: of ranks.
        algorithm: of all-reduces.
        mapping: another order of the dimensions, e.g. ``tp-dp-pp``.

    Raises:
        MappingError: the job cannot be laid out like that.
        ViewError: the traffic cannot be shown like that.
    """

    def mapped(name: str, placement: Placement, *, as_run: bool) -> Mapping:
        totals, _ = dimension_totals(messages, placement.hosts, algorithm)
        view = view_of(messages, placement, by=by, order=order, algorithm=algorithm)
        return Mapping(name, as_run, totals, view)

    try:
        layout = layout_of(messages, len(placement.hosts))
    except MappingError:
        if mapping is not None:
            raise
        layout = ()
    found = [mapped(order_of([dimension.name for dimension in layout]), placement, as_run=True)]
    if mapping is not None:
        other = parse_order(mapping, layout)
        moved = Placement(placement.hosts[placed(layout, other)], placement.names)
        found.append(mapped(order_of(other), moved, as_run=False))
    return tuple(found)


def predicted_traffic(
    messages: JobMessages,
    world_size: int,
    *,
    by: str | None = None,
    order: str = LOGICAL,
    algorithm: str = RING,
    mapping: str | None = None,
    ranks_per_host: int | None = None,
) -> tuple[Mapping, ...]:
    """The traffic that a job should have, by the same rules as that of a run.

    Args:
        messages: predicted.
        world_size: ranks of the job.
        by: as in ``laid_out``.
        order: as there.
        algorithm: as there.
        mapping: as there.
        ranks_per_host: hosts of so many consecutive ranks each; None if nothing is known of hosts.

    Raises:
        MappingError: the job cannot be laid out like that.
        ViewError: the traffic cannot be shown like that.
    """
    unknown = np.full(world_size, UNKNOWN, dtype=np.int64)
    hosts = unknown if ranks_per_host is None else equal_hosts(world_size, ranks_per_host)
    return laid_out(messages, Placement(hosts), by=by, order=order, algorithm=algorithm, mapping=mapping)


def between_hosts(mapping: Mapping) -> float | None:
    """Bytes that cross hosts in all dimensions; None if not known."""
    values = [row.between_hosts_bytes for row in mapping.dimensions]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def host_names(record: Record) -> dict[int, str]:
    """The names of all hosts by number, as far as the record has them; empty where one is missing."""
    window = latest_messages(record)
    if window is None or window.messages is None:
        return {}
    return _names(host_numbers(window.messages, window.world_size), job_environment_of(record))


def latest_messages(record: Record) -> OverlapReport | None:
    """The last window that tells who sends what; later ones sent the same. None where what it tells cannot be."""
    window = record.latest("messages")
    if window is None or window.messages is None or not are_sound(window.messages, window.world_size):
        return None
    return window


def _names(hosts: Ranks, environment: JobEnvironment | None) -> dict[int, str]:
    """The names of all hosts; of a job with more hosts than the record names, none: half of them would confuse."""
    places = () if environment is None else environment.places
    names = {int(hosts[place.rank]): place.hostname for place in reversed(places) if place.rank < len(hosts)}
    return names if len(names) == int(hosts.max(initial=-1)) + 1 else {}
