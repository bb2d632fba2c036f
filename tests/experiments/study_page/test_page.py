"""The page of a study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.bench import FILE_NAME
from overlap_callbacks.analysis.study import PEAK, StudyRow, StudyStart
from overlap_callbacks.experiments.study.sweep import Study
from overlap_callbacks.experiments.study.verdict import Names
from overlap_callbacks.experiments.study.view import study_data, study_document
from overlap_callbacks.report.html import as_html, write_document
from tests.analysis.bench_results import gemm_results, transfer_results
from tests.experiments.study_page.studies import (
    configuration,
    factors,
    figures,
    large,
    of_rows,
    on_cpu,
    row,
    single,
    start,
)
from tests.report.html.test_page import charts_of, text_of
from tests.report.runs import window, write
from tests.toggling import at_night

Made = tuple[StudyStart, list[StudyRow]]
Open = Callable[..., Any]


def html_of(name: str, start: StudyStart, rows: list[StudyRow]) -> str:
    return as_html(study_document(Study(Path(name), start, rows)))


def written(folder: Path, start: StudyStart, rows: list[StudyRow]) -> Path:
    page = folder / "study.html"
    write_document(study_document(Study(folder, start, rows)), page)
    return page


def titles(content: str) -> list[str]:
    return [chart["title"] for chart in charts_of(content)]


def test_a_large_study_answers_each_question_from_its_rows() -> None:
    content = html_of("study", *large())
    assert titles(content) == [
        "Compute slowdown",
        "Compute slowdown against overlap ratio",
        "Step time against the overlapped step",
        "Power of a device",
        "Highest power with overlap against sequential steps",
    ]
    slowdowns, ratio, savings, power, peaks = charts_of(content)
    assert [group["name"] for group in slowdowns["groups"]][:2] == ["gpt3-xl FSDP2", "gpt3-xl PP"]
    assert sum(len(group["rows"]) for group in slowdowns["groups"]) == 23  # the failed one has none
    assert slowdowns["limits"] == [["study, mean", 0.189], ["study, most", 0.4]]
    assert savings["limits"] == [["study, mean", 0.102], ["study, most", 0.266]]
    assert peaks["limits"] == [["study, most", 0.25]]
    assert {line["name"]: len(line["points"]) for line in ratio["series"]} == {"FSDP2": 11, "PP": 12}
    assert power["limits"] == [["TDP", 1.0]]
    text = text_of(content)
    assert "Failed: llama2-7b FSDP2 batch 8: exit code 1" in text
    assert "With overlap, compute is clearly slower in 23 of 23 configurations." in text
    assert "over blocks or windows of that run, for one look at its end" in text


def test_power_along_a_window_is_that_of_the_job_whose_highest_power_rises_most(tmp_path: Path) -> None:
    begun, rows = large()
    measured = sorted((row for row in rows if row.figures is not None), key=lambda row: -row.figures.values[PEAK].value)
    first, second, third = (row.configuration for row in measured[:3])
    # The record of the first is gone; that of the second has no trace.
    report = window(0, power=True)
    write(tmp_path / "2", msgspec.structs.replace(report, power_trace=None))
    write(tmp_path / "3", report)
    places = {first: "1/overlap.jsonl", second: "2/overlap.jsonl", third: "3/overlap.jsonl"}
    rows = [msgspec.structs.replace(row, record=places.get(row.configuration)) for row in rows]
    content = written(tmp_path, begun, rows).read_text()
    (trace,) = (chart for chart in charts_of(content) if "clock" in chart)
    assert report.power_trace is not None
    assert trace["power"] == list(report.power_trace.power_w)
    assert f"Power along a window: {Names(begun.configurations).whole(third)}" in text_of(content)


def test_points_are_the_figures_of_the_rows() -> None:
    content = html_of("study", *single())
    slowdown, savings = charts_of(content)
    assert slowdown["groups"][0]["rows"][0]["points"][0] == {
        "name": "compute slowdown", "color": "overlapped", "hollow": False, "value": 0.12, "low": 0.11, "high": 0.13
    }  # fmt: skip
    ideal, sequential = savings["groups"][0]["rows"][0]["points"]
    assert sequential["value"] == pytest.approx(0.1)
    # The ideal step over the overlapped one, whose gap to ideal is 8.4% with an interval of 7.4% to 9.4%.
    assert [ideal["low"], ideal["value"], ideal["high"]] == pytest.approx(
        [1 / f - 1 for f in (1.094, 1.084, 1.074)], rel=1e-4
    )
    assert savings["groups"][0]["rows"][0]["note"] == "300.0\xa0ms"


def test_factors_have_parts_of_their_own() -> None:
    content = html_of("study", *factors())
    text = text_of(content)
    for title in ("What does a power cap do?", "Does the precision matter?", "What do tensor cores change"):
        assert title in text
    assert "cap on the clock" not in text
    drawn = [chart for chart in charts_of(content) if chart["title"] == "Step time with overlap"]
    caps, precisions, cores = [
        [[row["label"], round(row["points"][0]["value"], 3)] for row in chart["groups"][0]["rows"]] for chart in drawn
    ]
    assert caps == [["no cap", 0.0], ["500 W", 0.06], ["400 W", 0.17], ["300 W", 0.46]]
    assert [label for label, _ in precisions] == ["FP32", "FP16", "BF16"]
    assert [label for label, _ in cores] == ["FP32", "TF32"]
    assert "It changes most from no cap to 300 W: by +16.0 pp (95% interval +14.6 to +17.4 pp)" in text


def test_energy_is_plotted_against_time_if_caps_were_set() -> None:
    start, rows = factors()
    (chart,) = [
        one for one in charts_of(html_of("study", start, rows)) if one["title"].startswith("Energy of a step a")
    ]
    (series,) = chart["series"]
    slower, less = {point[0].rpartition(", ")[2]: point[1:3] for point in series["points"]}["500 W"]
    assert slower == pytest.approx(0.06, abs=1e-3)
    caps = study_data(Study(Path("study"), start, rows))["trade_offs"]["power_cap_w"][0]["caps"]
    (one,) = [cap for cap in caps if cap["point"]["name"] == "500 W"]
    assert less == pytest.approx(-one["saving"], abs=1e-3)
    assert caps[0]["on_front"]


def test_what_is_missing_is_a_line_that_says_what_to_do_and_no_empty_chart() -> None:
    text = text_of(html_of("study", *single()))
    assert "Power No sensor could be read." in text
    assert "Run: overlap bench gemm-allreduce." in text
    assert "overlap study --precision fp32,tf32" in text
    assert "over ratio needs" not in text
    bare = html_of("study", *of_rows([row(configuration(), figures(None, None))]))
    assert titles(bare) == []
    assert "No kernels were compared." in text_of(bare)


def test_a_cpu_is_not_compared_with_gpus() -> None:
    text = text_of(html_of("study", *on_cpu()))
    assert "These figures are of CPUs. They are not comparable with the study's" in text
    assert "The study:" not in text
    assert "Study, mean" not in text
    assert "A CPU has none." in text


def test_power_without_an_interval_is_not_claimed() -> None:
    values = {**figures(mean_w=500.0).values}
    bare = {
        key: msgspec.structs.replace(one, ci_low=None, ci_high=None) for key, one in values.items() if "power/" in key
    }
    found = msgspec.structs.replace(figures(), values={**values, **bare})
    rows = [row(configuration(batch=batch), found) for batch in (1, 2)]
    text = text_of(html_of("study", *of_rows(rows)))
    assert "Peaks of power have no interval here" in text
    assert "too few blocks for an interval" in text


def test_power_of_a_device_without_a_known_limit_is_in_watts() -> None:
    rows = [row(configuration(batch=batch), figures(mean_w=90.0, has_tdp=False)) for batch in (1, 2)]
    power = next(
        chart for chart in charts_of(html_of("study", *of_rows(rows))) if chart["title"] == "Power of a device"
    )
    assert (power["unit"], power["limits"]) == ("W", [])
    assert power["groups"][0]["rows"][0]["note"] == "90.0\xa0W"


def test_products_during_all_reduces_are_shown_if_their_results_are_there(tmp_path: Path) -> None:
    bench = gemm_results(sizes=(256, 512))
    lines = [bench.start, *bench.rounds]
    (tmp_path / FILE_NAME).write_bytes(b"".join([msgspec.json.encode(line) + b"\n" for line in lines]))
    content = written(tmp_path, *single()).read_text()
    assert "Slowdown of matrix products during an all-reduce" in titles(content)
    assert "overlap bench gemm-allreduce" not in text_of(content)
    other = transfer_results()
    (tmp_path / FILE_NAME).write_bytes(msgspec.json.encode(other.start) + b"\n")
    assert "Run: overlap bench gemm-allreduce." in text_of(written(tmp_path, *single()).read_text())
    (tmp_path / FILE_NAME).write_bytes(b"{")
    assert written(tmp_path, *single()).exists()


def test_a_study_of_which_nothing_was_measured_has_a_page() -> None:
    more = "More failed, for other reasons; the table has all."
    for reasons in (5, 6):
        failed = [row(configuration(batch=batch), failure=f"exit code {batch % reasons}") for batch in range(1, 13)]
        text = text_of(html_of("study", *of_rows(failed)))
        assert "No configuration was measured." in text
        assert f"Failed: gpt3-xl FSDP2 batch 1; gpt3-xl FSDP2 batch {reasons + 1}" in text
        assert (text.count("Failed: "), more in text) == (5, reasons > 5)
    alike = [row(configuration(batch=batch), failure="out of memory") for batch in range(1, 9)]
    assert "batch 3 and 5 more: out of memory" in text_of(html_of("study", *of_rows(alike)))
    assert "No configuration was measured." in text_of(html_of("study", start([configuration()]), []))


def test_names_cannot_leave_their_place() -> None:
    harm = "</script><b>x</b>"
    rows = [row(configuration(harm, harm), figures()), row(configuration("a" * 5000), failure=harm * 1000)]
    body = html_of("<b>x<b>", *of_rows(rows, device=harm)).partition('<script type="application/json"')[0]
    assert "<b>" not in body
    assert "</script>" not in body
    assert "a" * 2001 not in body


def test_more_rows_than_a_chart_can_hold_are_in_the_table() -> None:
    rows = [row(configuration(batch=batch), figures()) for batch in range(1, 101)]
    content = html_of("study", *of_rows(rows))
    slowdowns = charts_of(content)[0]
    assert sum(len(group["rows"]) for group in slowdowns["groups"]) == 60
    assert "The first 60 of 100 configurations; the table has all." in text_of(content)


@pytest.mark.parametrize(
    ("make", "width"),
    at_night(
        [(make, width) for make in (large, factors, on_cpu, single) for width in (1200, 360)],
        [(large, 1200), (factors, 360), (on_cpu, 1200), (single, 360)],
    ),
)
def test_the_page_draws_its_charts_within_its_width(
    tmp_path: Path, opened: Open, make: Callable[[], Made], width: int
) -> None:
    page = opened(written(tmp_path, *make()), viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("text=could not be drawn").count() == 0
    drawn = page.locator("[data-chart] svg [aria-label=dot] circle").count()
    rows = [row for row in make()[1] if row.figures is not None]
    assert drawn >= 3 * len(rows)  # slowdown, ideal and sequential of each
    broken = "element => [...element.attributes].some(({ value }) => /NaN|undefined|Infinity/.test(value))"
    assert not page.evaluate(f"[...document.querySelectorAll('svg *')].some({broken})")


def test_names_of_lines_to_compare_with_do_not_touch_on_a_phone(tmp_path: Path, opened: Open) -> None:
    # Wide intervals, as on a busy CPU, put the lines close together.
    rows = [row(configuration(batch=batch), figures(-0.1, 0.05, half=1.5)) for batch in (1, 2)]
    page = opened(written(tmp_path, *of_rows(rows)), viewport={"width": 360, "height": 900})
    texts = page.locator("[data-chart] svg").evaluate_all(
        """all => all.map((svg) => [...svg.querySelectorAll("text")]
            .filter(({ textContent }) => ["18.9%", "40.0%", "10.2%", "26.6%"].includes(textContent))
            .map((text) => [text.getBoundingClientRect().left, text.getBoundingClientRect().right]))"""
    )
    pairs = [sorted(found) for found in texts if len(found) == 2]
    assert pairs
    assert all(first[1] + 3 < second[0] for first, second in pairs), pairs
    assert all(left >= 0 and right <= 360 for pair in pairs for left, right in pair)


def test_points_are_at_their_figures(tmp_path: Path, opened: Open) -> None:
    rows = [row(configuration(batch=batch), figures(slowdown)) for batch, slowdown in ((1, 0.1), (2, 0.2), (4, 0.4))]
    page = opened(written(tmp_path, *of_rows(rows)))
    at = page.locator("[data-chart='0'] [aria-label=dot] circle").evaluate_all(
        "all => all.map((one) => +one.getAttribute('cx'))"
    )
    assert (at[2] - at[1]) / (at[1] - at[0]) == pytest.approx(2, rel=1e-2)
