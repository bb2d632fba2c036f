"""How well a run communicates, for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from overlap_callbacks.analysis.communication.link_peaks import Link, Peaks
from overlap_callbacks.analysis.stragglers import Straggler
from overlap_callbacks.report.communication_words import (
    bandwidths_of,
    latest_pipeline,
    shares_window,
    waiting_of,
)
from overlap_callbacks.report.record import Record


def communication_as_json(record: Record, own: Peaks = Peaks()) -> dict[str, Any]:  # noqa: B008 - it is immutable
    """Who comes last, bandwidth by size, shares of a step and the bubble; what was not measured is null.

    Args:
        record: of the run.
        own: peaks of links that the user gave.
    """
    waiting, by_size = waiting_of(record), bandwidths_of(record, own)
    shares, pipeline = shares_window(record), latest_pipeline(record)
    return {
        "waiting_fraction": None if waiting is None else waiting.fraction,
        "late_ranks": [] if waiting is None else _stragglers(waiting.ranks),
        "late_hosts": [] if waiting is None else _stragglers(waiting.hosts),
        "bandwidths": []
        if by_size is None
        else [
            {
                **msgspec.structs.asdict(row.transfer),
                "mean_bytes": row.mean_bytes,
                "gb_s": row.gb_s,
                "peak_fraction": row.peak_fraction,
            }
            for row in by_size.rows
        ],
        "link_peak": None if by_size is None else _link(by_size.peaks.within),
        "network_peak": None if by_size is None else _link(by_size.peaks.between),
        "step_shares": [] if shares is None else [share._asdict() for share in shares.dimension_shares()],
        "pipeline": None
        if pipeline is None
        else {
            **msgspec.structs.asdict(pipeline[1]),
            "expected_fraction": pipeline[1].expected_fraction,
            "fraction": pipeline[1].fraction,
        },
    }


def _stragglers(rows: Iterable[Straggler]) -> list[dict[str, Any]]:
    return [{**row._asdict(), "last_share": row.last_share, "sure": row.sure} for row in rows]


def _link(link: Link | None) -> dict[str, Any] | None:
    return None if link is None else link._asdict()
