"""The traffic of a run for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from overlap_callbacks.report.traffic import Mapping, RunTraffic


def as_plain(found: RunTraffic) -> dict[str, Any]:
    """The traffic as JSON has it."""
    return {
        "window": found.window,
        "num_hosts": found.num_hosts,
        "num_steps": found.num_steps,
        "num_alike": found.num_alike,
        "mappings": mappings_as_plain(found.mappings),
        "groups": found.messages.groups,
    }


def mappings_as_plain(mappings: Iterable[Mapping]) -> list[dict[str, Any]]:
    """What is sent, and between whom, in each layout of the job."""
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
