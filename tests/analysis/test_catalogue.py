"""A figure is declared once: one that is made up here, in the catalogue alone, is everywhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CATALOGUE = "overlap_callbacks.analysis.results.catalogue"
# In front of the entry after which it goes.
MADE_UP = {
    "_STEPS = (\n": """
    Figure("overlap/made_up_ms", "ms", "half of the overlapped step, made up", "made-up time",
           formula=Formula((STEP,), lambda step: step.step_ms / 2)),
""",
    "POWER_METRICS = (\n": """
    Figure("power/{mode}_made_up_w", "W", "power of two devices, made up", "made-up power",
           of=lambda mode: 2 * mode.mean_avg_w),
""",
}


def with_made_up_figures() -> None:
    """Load the catalogue with figures that its file does not have. Nothing may have loaded it before."""
    assert CATALOGUE not in sys.modules
    spec = importlib.util.find_spec(CATALOGUE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for before, figure in MADE_UP.items():
        assert source.count(f"\n{before}") == 1
        source = source.replace(f"\n{before}", f"\n{before}{figure}")
    module = ModuleType(CATALOGUE)
    sys.modules[CATALOGUE] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)


def found_of_made_up_figures() -> dict[str, object]:
    """What each part of the product says of them."""
    with_made_up_figures()

    sys.path.insert(0, str(ROOT / "docs"))
    from map import figures_table

    from overlap_callbacks.analysis.results.catalogue import recorded_figures
    from overlap_callbacks.analysis.run_summary import RunSummary
    from overlap_callbacks.experiments.check import judge, parsed_limit
    from overlap_callbacks.report import page, record
    from overlap_callbacks.sinks.base import fit
    from overlap_callbacks.sinks.prometheus import gauge
    from overlap_callbacks.sinks.wandb import workspace
    from overlap_callbacks.sinks.wandb.alerts import Limits
    from overlap_callbacks.sinks.wandb.sink import run_metrics
    from tests import commands
    from tests.report.runs import run_info, window, write

    report = window(power=True)
    assert report.made_up_ms is not None
    assert report.e2e_overlapped_ms is not None
    summary = RunSummary(run_info(), [report], running=True)
    values = {key: value for key, value in fit(report.values()).items() if "made_up" in key}
    figures = {name: figure for name, figure in recorded_figures().items() if "made_up" in name}
    (broken,) = judge(summary, [parsed_limit("--max", "made_up_ms=1")])
    (alert,) = Limits({"made_up_ms": 1.0}).passed(report, summary.pooled())
    with tempfile.TemporaryDirectory() as folder:
        kept = record.read(write(Path(folder), report))
        shown = commands.invoke("show", folder, "--all").output
        html = page([kept])
    return {
        "half": report.made_up_ms.value / report.e2e_overlapped_ms.value,
        "keys": sorted(values),
        "aggregates": {key: value.aggregates for key, value in values.items()},
        "gauges": sorted({(gauge(value).name, gauge(value).label) for value in values.values() if not value.bound}),
        "units": {name: figure.unit for name, figure in figures.items()},
        "meanings": sorted({figure.meaning for figure in figures.values()}),
        "of_run": sorted([key for key in run_metrics(summary, "all") if "made_up" in key]),
        "panels": sorted([key for key in workspace.keys(workspace.SECTIONS) if "made_up" in key]),
        "limit": broken.sentence(),
        "alert": alert.title,
        "docs": figures_table(("overlap/made_up", "power/{mode}_made_up")).splitlines()[2:],
        "terminal": [name for name in ("made-up time", "power of two devices") if name in shown],
        "page": [
            name for name in ("made-up time", "power of two devices", "half of the overlapped step") if name in html
        ],
    }


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_reports_have_it_under_its_key_with_its_interval(found: dict[str, object]) -> None:
    assert found["half"] == pytest.approx(0.5)
    ends = ["overlap/made_up_ms", "overlap/made_up_ms_ci_high", "overlap/made_up_ms_ci_low"]
    assert found["keys"] == [*ends, "power/overlapped_made_up_w", "power/sequential_made_up_w"]


def test_records_and_docs_have_its_unit_and_meaning(found: dict[str, object]) -> None:
    assert found["units"] == {"made_up_ms": "ms", "power/overlapped_made_up_w": "W", "power/sequential_made_up_w": "W"}
    assert found["meanings"] == ["half of the overlapped step, made up", "power of two devices, made up"]
    assert found["docs"] == [
        "| `overlap/made_up_ms` | ms | half of the overlapped step, made up |",
        "| `power/<mode>_made_up_w` | W | power of two devices, made up |",
    ]


def test_wandb_and_prometheus_have_it(found: dict[str, object]) -> None:
    aggregates = found["aggregates"]
    assert isinstance(aggregates, dict)
    assert aggregates["overlap/made_up_ms"] == aggregates["power/overlapped_made_up_w"] == "min,max,mean,last"
    assert aggregates["overlap/made_up_ms_ci_low"] == "last"
    assert found["of_run"] == ["overlap/made_up_ms", "overlap/made_up_ms_ci_high", "overlap/made_up_ms_ci_low"]
    assert found["panels"] == found["keys"]
    assert found["gauges"] == [["overlap_made_up_seconds", ""], ["overlap_power_made_up_watts", "mode"]]


def test_it_can_be_limited(found: dict[str, object]) -> None:
    assert str(found["limit"]).startswith("made-up time is 20")
    assert str(found["limit"]).endswith("at most 1.00 ms is allowed")
    assert str(found["alert"]).startswith("Overlap: made-up time is 20")


def test_the_terminal_and_the_page_show_it(found: dict[str, object]) -> None:
    assert found["terminal"] == ["made-up time", "power of two devices"]
    assert found["page"] == ["made-up time", "power of two devices", "half of the overlapped step"]


def test_a_limit_on_a_fraction_that_is_a_percentage_is_refused_for_every_figure() -> None:
    from overlap_callbacks.analysis.results import catalogue

    for figure in (*catalogue.FIGURES, catalogue.MEASUREMENT_OVERHEAD):
        assert figure.refusal(0.15) == ""
        if figure.unit == "fraction":
            assert figure.refusal(15).endswith(", got 15; did you mean 0.15?"), figure.name
            assert "did you mean" not in figure.refusal(150)
        else:
            assert figure.refusal(15) == ""
    assert catalogue.figure_named("compute_slowdown").refusal(1.9) == ""
    assert catalogue.figure_named("hidden_comm_fraction").refusal(1.01)


if __name__ == "__main__":
    print(json.dumps(found_of_made_up_figures()))
