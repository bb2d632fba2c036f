#!/usr/bin/env python3
"""Writes docs/assets/grafana.json, a dashboard of what ``PrometheusSink`` exports: ``python3 docs/grafana.py``.

Panels, names and units come from the table of figures: the questions and keys that W&B gets by default.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from overlap_callbacks.analysis.results.arm import ARM_FIGURES  # noqa: E402
from overlap_callbacks.analysis.results.catalogue import SHORT, every_figure  # noqa: E402
from overlap_callbacks.analysis.results.figure import BOUNDS, Value  # noqa: E402
from overlap_callbacks.sinks.prometheus import gauge  # noqa: E402

FILE = ROOT / "docs" / "assets" / "grafana.json"
PANELS = (*SHORT, ("What would a switch change? Speed-up by arm", ("arm/{arm}_speedup",)))
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS = {"ms": "s", "fraction": "percentunit", "W": "watt"}
_BOUNDS = {"": "", "ci_low": ", lower bound", "ci_high": ", upper bound"}
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's own form."""
    return {
        "uid": "overlap-callbacks",
        "title": "Overlap of compute and communication",
        "tags": ["overlap-callbacks"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [
            {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
            {"type": "query", "name": "instance", "label": "Job", "datasource": _SOURCE, "refresh": 2, "sort": 1,
             "query": "label_values(overlap_run_info, instance)"},
        ]},
        "panels": [_panel(number, title, keys) for number, (title, keys) in enumerate(PANELS)],
    }  # fmt: skip


def _panel(number: int, title: str, keys: tuple[str, ...]) -> dict[str, Any]:
    values = [_value(key) for key in keys]
    row, column = divmod(number, _COLUMNS)
    meanings = dict.fromkeys(value.figure.meaning for value in values)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": "; ".join(meanings),
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": _UNITS.get(values[0].figure.unit, "short"),
                "custom": {"lineInterpolation": "stepAfter"},
            },
            "overrides": [],
        },
        "targets": [_target(letter, value) for letter, value in zip("ABCDEF", values, strict=False)],
    }


def _target(letter: str, value: Value) -> dict[str, Any]:
    labels = [f"{{{{{label}}}}}" for label in value.figure.labels]
    return {
        "refId": letter,
        "datasource": _SOURCE,
        "expr": f'{gauge(value).name}{{instance="$instance"}}',
        "legendFormat": " ".join(labels) or f"{value.figure.short}{_BOUNDS[value.bound]}",
    }


def _value(key: str) -> Value:
    """A value of the figure with this key; its number does not matter."""
    figures = (*every_figure().values(), *ARM_FIGURES)
    values = (Value(figure, 0.0, {}, bound) for figure in figures for bound in ("", *BOUNDS))
    return next(value for value in values if value.key == key)


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
