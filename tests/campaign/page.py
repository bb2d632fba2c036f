"""Writes ``docs/faults.md`` from the results."""

from __future__ import annotations

from tests.campaign.processes import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "campaign.json"
PAGE = ROOT / "docs" / "faults.md"


def write_page() -> None:
    pass
