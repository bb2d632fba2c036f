from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report import page, write_page
from overlap_callbacks.report.record import read
from overlap_callbacks.report.views.scaling import AxisError
from tests.commands import invoke
from tests.report.html.test_page import charts_of, text_of
from tests.report.runs import run_info, window, write
from tests.report.scaling_runs import write_sized

SIZES = ((2, 400.0), (4, 440.0), (8, 500.0), (64, 640.0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("sized")
    work = {"model_parameters": 7e9, "precision": "bf16"}
    return [write_sized(base / f"r{n}", n, ms, settings={"bucket_mb": 25 * n}, **work) for n, ms in SIZES]


def test_the_page_of_several_sizes_says_how_the_job_scales(folders: list[Path]) -> None:
    content = page([read(folder) for folder in folders])
    text = text_of(content)
    assert "How does it scale?" in text
    # 64 * 4,096 tokens in 640 ms over 2 * 4,096 in 400: 20 times on 32 times the ranks.
    said = re.search(
        r"On 64 ranks the job does ([\d.]+) times as much in a second as on 2 ranks: ([\d.]+)% of the", text
    )
    assert said is not None
    assert [float(said[1]), float(said[2])] == pytest.approx([20.0, 62.5], rel=0.01)
    charts = [chart for chart in charts_of(content) if chart["draw"] == "against"]
    assert [chart["title"] for chart in charts] == [
        "Throughput", "Step time, overlapped", "Scaling factor", "Scaling efficiency",
        "Communication as a share of the step", "Effective bandwidth", "Model FLOP utilisation",
    ]  # fmt: skip
    assert [point[0] for point in charts[0]["series"][0]["points"]] == [2, 4, 8, 64]
    assert charts[2]["ideal"] == 2
    assert "How fast does it train?" in text


def test_another_axis_has_no_scaling_factor(folders: list[Path]) -> None:
    content = page([read(folder) for folder in folders], "bucket_mb")
    assert "How does it change with bucket mb?" in text_of(content)
    titles = [chart["title"] for chart in charts_of(content) if chart["draw"] == "against"]
    assert "Step time, overlapped" in titles
    assert "Scaling factor" not in titles


@pytest.mark.parametrize("axis", ["--lr", "*~+"])
def test_an_axis_whose_name_looks_like_marks_of_a_column_keeps_it(tmp_path: Path, axis: str) -> None:
    runs = [write_sized(tmp_path / f"r{n}", 2, settings={axis: n}) for n in (1, 2)]
    assert f">{axis}</button></th>" in page([read(run) for run in runs], axis)


def test_runs_without_tokens_say_what_is_missing(tmp_path: Path) -> None:
    runs = [write(tmp_path / f"r{n}", window(), run=run_info(world_size=n)) for n in (2, 4)]
    text = text_of(page([read(run) for run in runs]))
    assert "Scaling factor and efficiency need tokens_per_step or samples_per_step" in text


def test_one_run_has_no_axis(tmp_path: Path, folders: list[Path]) -> None:
    assert "How does it scale?" not in text_of(page([read(folders[0])]))
    result = invoke("report", str(folders[0]), "--axis", "world_size", "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 2
    assert "--axis compares several runs" in result.output


def test_the_command_takes_an_axis_and_gives_json(tmp_path: Path, folders: list[Path]) -> None:
    runs, target = [str(folder) for folder in folders], str(tmp_path / "page.html")
    result = invoke("report", *runs, "--axis", "world_size", "--json", "-o", target)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["against"]
    assert (found["axis"], found["work"]) == ("world_size", "tokens")
    assert [row["value"] for row in found["runs"]] == [2, 4, 8, 64]
    wrong = invoke("report", *runs, "--axis", "colour", "-o", target)
    assert wrong.exit_code == 2
    assert wrong.output.startswith("Error: --axis must be something that the records have: world_size")
    with pytest.raises(AxisError):
        write_page([read(run) for run in folders], target, "colour")


OPTIONS: list[dict[str, Any]] = [{}, {"viewport": {"width": 360, "height": 800}}, {"color_scheme": "dark"}]


@pytest.mark.parametrize(
    ("axis", "options"),
    [
        (None, OPTIONS[1]),
        ("precision", OPTIONS[0]),
        pytest.param(None, OPTIONS[0], marks=pytest.mark.nightly),
        pytest.param("precision", OPTIONS[1], marks=pytest.mark.nightly),
        pytest.param("precision", OPTIONS[2], marks=pytest.mark.nightly),
    ],
)
def test_every_chart_against_the_axis_has_a_dot_for_each_run(
    tmp_path: Path, folders: list[Path], opened: Callable[..., Any], options: dict[str, Any], axis: str | None
) -> None:
    file = tmp_path / "page.html"
    write_page([read(folder) for folder in folders], file, axis)
    shown = opened(file, **options)
    numbers = [i for i, chart in enumerate(charts_of(file.read_text())) if chart["draw"] == "against"]
    assert numbers
    for number in numbers:
        assert shown.locator(f"[data-chart='{number}'] [aria-label=dot] circle").count() >= len(folders)
        assert "NaN" not in shown.locator(f"[data-chart='{number}']").inner_html()
    width = shown.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width[0] == width[1], "nothing runs out of the page"
