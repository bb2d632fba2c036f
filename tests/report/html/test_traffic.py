"""The traffic of a step on the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.results.messages import Traffic
from overlap_callbacks.report import write_page
from overlap_callbacks.report.record import read
from tests.analysis.communication.layouts import Layout, by_hand
from tests.report.runs import window, write
from tests.report.traffic_runs import report_with, write_run

Open = Callable[..., Any]
TITLE = "Who sends what to whom?"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traffic")
    write_page([read(write_run(folder, Layout(2, 2, 2, ranks_per_host=4), windows=3))], folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("options", [{}, {"viewport": {"width": 360, "height": 800}, "color_scheme": "dark"}])
def test_the_heat_map_has_a_cell_for_each_pair_with_traffic_and_fits(
    page: Path, options: dict[str, Any], opened: Open
) -> None:
    shown = opened(page, **options)
    section = shown.locator("section", has_text=TITLE)
    assert "558 KiB. 101 KiB of it, 18.1%, crosses hosts. Every counted step sent the same" in section.inner_text()
    chart = section.locator("[data-chart]")
    cells = chart.locator("[aria-label=rect]").nth(1).locator("rect")
    assert cells.count() == np.count_nonzero(by_hand(Layout(2, 2, 2)))
    assert chart.locator("[aria-label=rule] line").count() == 2  # between the hosts
    boxes = cells.evaluate_all(
        "cells => cells.map((cell) => [+cell.getAttribute('width'), +cell.getAttribute('height')])"
    )
    assert boxes == [[pytest.approx(boxes[0][0], abs=0.01), pytest.approx(boxes[0][0], abs=0.01)]] * len(boxes)
    assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_record_without_messages_has_no_such_section(tmp_path: Path) -> None:
    write_page([read(write(tmp_path, window()))], tmp_path / "report.html")
    assert TITLE not in (tmp_path / "report.html").read_text()


def test_differing_steps_are_reported(tmp_path: Path) -> None:
    report = report_with(Layout(1, 1, 4))
    assert report.traffic is not None
    odd = Traffic(report.traffic.dimensions, 40, 30)
    write_page([read(write(tmp_path, msgspec.structs.replace(report, traffic=odd)))], tmp_path / "report.html")
    assert "75.0% sent the same messages as the recorded step" in (tmp_path / "report.html").read_text()
