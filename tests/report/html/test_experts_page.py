from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report import page, write_page
from overlap_callbacks.report.record import read
from tests.commands import invoke
from tests.report.expert_runs import write_experts
from tests.report.html.test_page import charts_of, text_of
from tests.report.runs import window, write


def test_the_page_says_how_evenly_experts_are_loaded(tmp_path: Path) -> None:
    content = page([read(write_experts(tmp_path))])
    text = text_of(content)
    assert "How evenly are the experts loaded?" in text
    assert "Rank 0 received most." in text
    assert "sampled between windows" in text
    titles = [chart["title"] for chart in charts_of(content)]
    assert "The most over the mean, along the run" in titles
    assert "Steps up to window 3" in titles
    (bars,) = [chart for chart in charts_of(content) if chart["title"] == "Bytes received by expert rank"]
    values = [row["value"] for row in bars["rows"]]
    assert len(values) == 4
    assert max(values) == values[0]
    (along,) = [chart for chart in charts_of(content) if chart["title"] == "The most over the mean, along the run"]
    peaks = [point[2] for point in along["series"][0]["points"]]
    assert peaks == sorted(peaks), "the first rank's share grows"


def test_a_run_without_experts_has_no_such_part(tmp_path: Path) -> None:
    assert "experts loaded" not in text_of(page([read(write(tmp_path, window()))]))


def test_the_terminal_says_it_too(tmp_path: Path) -> None:
    folder = str(write_experts(tmp_path))
    shown = invoke("show", folder, "--all", env={"COLUMNS": "300"}).output
    assert "The expert rank with the highest load receives" in shown
    assert "The expert rank" not in invoke("show", folder, env={"COLUMNS": "300"}).output


@pytest.mark.parametrize(
    "options",
    [
        {"viewport": {"width": 360, "height": 800}, "color_scheme": "dark"},
        pytest.param({}, marks=pytest.mark.nightly),
    ],
)
def test_its_charts_are_drawn(tmp_path: Path, opened: Callable[..., Any], options: dict[str, Any]) -> None:
    file = tmp_path / "page.html"
    write_page([read(write_experts(tmp_path / "run"))], file)
    shown = opened(file, **options)
    charts = charts_of(file.read_text())
    numbers = [
        i for i, chart in enumerate(charts) if chart["title"].startswith(("The most", "Coeff", "Steps", "Bytes"))
    ]
    assert len(numbers) == 4
    for number in numbers:
        assert shown.locator(f"[data-chart='{number}'] svg").count() == 1
        assert "NaN" not in shown.locator(f"[data-chart='{number}']").inner_html()
    width = shown.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width[0] == width[1]
