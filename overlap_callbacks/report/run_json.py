"""A record as plain data, for other programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from overlap_callbacks.analysis.arms import arm_summaries, trade_offs
from overlap_callbacks.analysis.communication.link_peaks import Peaks
from overlap_callbacks.analysis.goodput import shares
from overlap_callbacks.analysis.headline import run_headline
from overlap_callbacks.analysis.throughput import run_throughput
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.causal import causal_findings
from overlap_callbacks.report.views.communication import bandwidths_of, latest_pipeline, shares_window, waiting_of
from overlap_callbacks.report.views.quality import cost_of, quick_cost_of, race_of
from overlap_callbacks.report.views.sections import exposure_of
from overlap_callbacks.report.views.traffic import Mapping, RunTraffic


def run_as_json(record: Record) -> dict[str, Any]:
    """The run's figures and its windows', for other programs; if no window counts, an unfinished one's separately."""
    partial = None if record.valid_windows else record.partial
    headline = run_headline(record.summary, len(record.arms))
    return {
        "path": str(record.path),
        "run": record.runs[-1],
        "windows": len(record.windows),
        "valid_windows": len(record.valid_windows),
        "verdict": headline.text,
        "state": headline.state,
        "bottleneck": _bottleneck(record),
        "figures": record.pooled(),
        "sides": record.summary.sides(),
        "all_looks": record.running,
        "arms": _arms(record),
        "decision": record.decision,
        "changes": record.changes,
        "goodput": shares(record.goodput),
        "causal": [
            {
                "members": found.response.delayed.members,
                "delay_ms": found.response.delayed.delay_ms,
                "slope": found.response.slope,
                "slack_ms": found.response.slack_ms,
                "longer_ms": found.response.levels_ms,
                "num_windows": found.response.num_windows,
                "verdict": found.response.verdict.value,
                "removed_wins_at_most_ms": found.won_ms,
                "exposed_ms": found.exposed_ms,
                "hidden_ms": found.hidden_ms,
                "on_critical_path_ms": found.path_ms,
                "profile_is_of_same_windows": found.same_windows,
                "profile_differs": found.contradiction(),
                "fix": None if fix is None else fix._asdict(),
            }
            for found, fix in causal_findings(record)
        ],
        "race": race_of(record),
        "throughput": run_throughput(record.valid_windows),
        "measuring_cost": cost_of(record),
        "quick_cost": quick_cost_of(record),
        "unfinished": None if partial is None else {"window": partial.window, "figures": partial.figures()},
        "communication": communication_as_json(record),
        "by_window": [
            {"window": w.window, "valid": w.valid, "verified": w.verified, "metrics": record.whole(w).metrics()}
            for w in record.windows
        ],
        "environment": record.job_environment,
        "findings": record.findings,
        "problems": sorted({problem for window in record.windows for problem in window.problems}),
    }


def _bottleneck(record: Record) -> dict[str, Any] | None:
    """What limits the steps of a run and what to try; None if no profile shows it."""
    found = record.bottleneck()
    if found is None:
        return None
    return {
        "bound": found.bound.value,
        "runner_up": None if found.runner_up is None else found.runner_up.value,
        "sentence": found.sentence(),
        "parts": _fields(found.parts),
        "late_rank": None if found.late is None else found.late.rank,
        "advice": [_fields(advice, "link") for advice in found.advice],
    }


def _arms(record: Record) -> list[dict[str, Any]]:
    """Each arm's effect, and the metrics of each window."""
    rows = arm_summaries(record.summary, record.arms)
    known = {row.point.name: (row.saving, row.on_front) for row in trade_offs(rows)}
    return [
        {
            "arm": row.arm.name,
            "equal_results": row.arm.equal_results,
            "family": row.arm.family,
            "setting": row.arm.setting,
            "energy_saving": saving,
            "on_front": on_front,
            "num_windows": row.num_windows,
            "figures": row.figures,
            **row.device,
            "problems": row.problems,
            "verdict": row.verdict(),
            "by_window": [
                {"window": report.window, "counts": report.counts, "metrics": report.metrics()}
                for report in record.arms
                if report.arm.name == row.arm.name
            ],
        }
        for row in rows
        for saving, on_front in [known.get(row.arm.name, (None, None))]
    ]


def _fields(item: Any, *properties: str) -> dict[str, Any] | None:
    """The fields of a tuple or struct and some of its properties; None for None."""
    if item is None:
        return None
    fields = item._asdict() if hasattr(item, "_asdict") else msgspec.structs.asdict(item)
    return {**fields, **{name: getattr(item, name) for name in properties}}


def communication_as_json(record: Record, own: Peaks = Peaks()) -> dict[str, Any]:  # noqa: B008 - it is immutable
    """Stragglers, bandwidth by size, shares of a step and the bubble; null for what was not measured.

    ``own``: the user's values for link peaks.
    """
    waiting, by_size = waiting_of(record), bandwidths_of(record, own)
    shares, pipeline, exposed = shares_window(record), latest_pipeline(record), exposure_of(record)
    return {
        "waiting_fraction": None if waiting is None else waiting.fraction,
        "late_ranks": [] if waiting is None else [_fields(row, "last_share", "sure") for row in waiting.ranks],
        "late_hosts": [] if waiting is None else [_fields(row, "last_share", "sure") for row in waiting.hosts],
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
        "link_peak": None if by_size is None else _fields(by_size.peaks.within),
        "network_peak": None if by_size is None else _fields(by_size.peaks.between),
        "exposure": None if exposed is None else exposed.found,
        "step_shares": [] if shares is None else [share._asdict() for share in shares.dimension_shares()],
        "pipeline": None if pipeline is None else _fields(pipeline[1], "expected_fraction", "fraction"),
    }


def traffic_as_json(found: RunTraffic) -> dict[str, Any]:
    return {
        "window": found.window,
        "num_hosts": found.num_hosts,
        "num_steps": found.num_steps,
        "num_alike": found.num_alike,
        "mappings": mappings_as_json(found.mappings),
        "groups": found.messages.groups,
    }


def mappings_as_json(mappings: Iterable[Mapping]) -> list[dict[str, Any]]:
    """The messages of each layout of the job, and the ranks between which they are sent."""
    return [
        {
            "mapping": mapping.name,
            "as_run": mapping.as_run,
            "dimensions": mapping.dimensions,
            "by": mapping.view.by,
            "labels": mapping.view.labels,
            "sent_bytes": mapping.view.rows,
            "unplaced_bytes": mapping.view.unplaced_bytes,
        }
        for mapping in mappings
    ]
