"""What an A/A control measures has the names of a comparison on no screen and in no tracker."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from overlap_callbacks.analysis.arms import arm_summaries
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.cli import main
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report import page
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.terminal import ShortScreen, drawn
from overlap_callbacks.report.views.runs import runs_document
from overlap_callbacks.report.views.short import short_of
from overlap_callbacks.sinks import PrometheusSink
from overlap_callbacks.sinks.wandb import cards
from overlap_callbacks.sinks.wandb.sink import _pictures, run_metrics
from overlap_callbacks.sinks.wandb.tables import tables
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report, run_info, window, write
from tests.report.test_words import text_of

# What compares the modes, or is of sequential steps.
COMPARES = re.compile(r"(?i)sequential|speedup|speed-up|slowdown|ideal|attain|isolated|residual|saves|overlap costs")
RUN = run_info(schedule=Schedule(control=True).as_dict())
WINDOWS = [
    msgspec.structs.replace(full_report() if number == 2 else window(number, power=True), control=True, window=number)
    for number in range(8)
]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return read(write(tmp_path_factory.mktemp("control"), *WINDOWS, run=RUN))


def test_no_sink_gets_a_key_of_a_comparison(tmp_path: Path) -> None:
    for report in WINDOWS:
        keys = [key for key in report.metrics() if COMPARES.search(key)]
        assert all(key.startswith("overlap/profiler_slowdown") for key in keys)  # of overlapped steps
        assert not [key for key in keys if "isolated" in key]
        assert {"overlap/e2e_overlapped_ms", "overlap/exposed_comm_ms", "overlap/control"} <= set(report.metrics())
        file = tmp_path / "metrics.prom"
        prometheus = PrometheusSink(file)
        prometheus.open(RUN)
        prometheus.log(report)
        series = re.findall(r"^[a-z_]+(?:\{.*?\})?", file.read_text(), re.MULTILINE)
        assert not [name for name in series if COMPARES.search(name.replace("profiler_slowdown", ""))]
    arm = msgspec.structs.replace(arm_window(0, power=True), control=True)
    assert {key.rpartition("prefetch_2_2_")[2] for key in arm.metrics() if key.startswith("arm/")} == {
        "valid", "equal_results",
    }  # fmt: skip
    (row, *_) = arm_summaries(RunSummary(RUN, []), [arm])
    assert row.verdict() == "A/A control: nothing was turned, so every difference is chance"


def test_wandb_has_neither_keys_nor_rows_nor_bars_of_a_comparison(record: Record) -> None:
    summary = RunSummary(RUN, WINDOWS, running=True)
    assert not [key for key in run_metrics(summary, "all") if COMPARES.search(key.replace("profiler_slowdown", ""))]
    for report in WINDOWS:
        so_far = cards.SoFar.of(summary)
        card = cards.step_card(report, so_far).partition("</style>")[2]
        assert not COMPARES.search(card), COMPARES.search(card)
        assert "A/A control: both sides ran overlapped, so every difference is chance." in card
        found = tables(report, so_far.figures)
        assert not {"overlap/kernels", "overlap/pairs", "dimension/pairs", "power/trace"} & set(found)
        labels = [str(row[0]).replace("profiler_slowdown", "") for row in found["overlap/figures"].rows]
        assert not [label for label in labels if COMPARES.search(label)]

        class Vendor:
            Html = staticmethod(lambda text, inject: text)

        assert "power/trace_card" not in _pictures(Vendor, report, so_far)


def test_the_screens_name_no_comparison_and_show_how_the_sides_differ(record: Record) -> None:
    short = Console(width=200, file=io.StringIO(), record=True)
    short.print(ShortScreen(short_of(record), ""))
    whole = Console(width=200, file=io.StringIO(), record=True)
    whole.print(drawn(runs_document([record], charts=False), everything=True))
    documents: list[str] = []
    for text in (short.export_text(), whole.export_text(), text_of(page([record]))):
        said = " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
        assert "A/A control: both sides ran overlapped, so every difference is chance." in said
        assert not re.search(r"(?i)saves \d|costs \d", said)
        names = [name for figure in FIGURES if figure.of_sequential for name in (figure.label, figure.short)]
        assert not [name for name in names if re.search(rf"(?i)\b{re.escape(name)}:? [+\-\u2212]?\d", said)]
        documents.append(said)
    sides = record.summary.sides()
    assert {"speedup_vs_sequential", "compute_slowdown", "residual_overlap"} <= set(sides)
    assert not set(sides) & set(record.figures)
    assert set(sides) <= {figure.name for figure in FIGURES if figure.of_sequential}
    for label in ("Step time, one side against the other", "Compute, one side against the other"):
        assert [label in said for said in documents] == [False, True, True]


def test_json_has_the_sides_apart_and_check_judges_nothing(record: Record) -> None:
    found = json.loads(CliRunner().invoke(main, ["show", "--json", str(record.path)]).stdout)
    assert found["state"] == "control"
    assert "speedup_vs_sequential" in found["sides"]
    assert not set(found["sides"]) & set(found["figures"])
    assert CliRunner().invoke(main, ["check", "--max-slowdown=0.9", str(record.path)]).exit_code == 2


def test_few_windows_have_a_line_with_both_sides(tmp_path: Path) -> None:
    few = read(write(tmp_path, *WINDOWS[:2], run=RUN))
    lines = [" ".join(line) for line in short_of(few).windows]
    assert len(lines) == 2
    assert all(re.search(r"ms one side .* ms other side [+-]?\d", line) for line in lines)


def test_a_run_that_is_no_control_has_no_sides() -> None:
    assert RunSummary(run_info(), [window(0)]).sides() == {}
