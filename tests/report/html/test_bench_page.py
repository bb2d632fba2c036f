"""The page and the tables of ``overlap bench``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from overlap_callbacks.analysis.bench import powers_of_two
from overlap_callbacks.analysis.communication.link_peaks import Link
from overlap_callbacks.analysis.formatting import NBSP
from overlap_callbacks.analysis.results.bench import Failed, TransferPoint
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.experiments.bench.results import KINDS, Bench
from overlap_callbacks.experiments.bench.view import bench_data, bench_document, verdict
from overlap_callbacks.report.html import as_html, write_document
from overlap_callbacks.report.terminal import drawn
from tests.analysis.bench_results import MIB, gemm_results, transfer_results
from tests.toggling import at_night

Open = Callable[..., Any]
SIZES = powers_of_two(8, 2**26)


def gemms() -> Bench:
    return gemm_results(sizes=(256, 512, 1024), message_bytes=(MIB, 16 * MIB))


def transfers() -> Bench:
    return transfer_results(message_bytes=SIZES, kinds=KINDS)


@pytest.mark.parametrize(
    ("make", "width"),
    at_night([(gemms, 1200), (gemms, 360), (transfers, 1200), (transfers, 360)], [(gemms, 360), (transfers, 1200)]),
)
def test_the_page_draws_its_charts_within_its_width(
    tmp_path: Path, opened: Open, make: Callable[[], Bench], width: int
) -> None:
    file = tmp_path / "bench.html"
    write_document(bench_document(make(), Link("nvlink4", 450.0, "", "")), file)
    page = opened(file, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("[data-chart] svg").count() >= 2
    assert page.locator("text=could not be drawn").count() == 0


def test_the_page_says_what_it_ran_on_and_what_is_missing() -> None:
    html = as_html(bench_document(dataclasses.replace(gemms(), folder=Path("a <b>run<b>"))))
    assert "Gloo on the CPU" in html
    assert "Power is absent: no power of the CPU" in html.replace("no power: ", "")
    assert "+25.0%" in html
    assert "<b>run" not in html
    assert "loopback" in as_html(bench_document(gemm_results(link="loopback", link_gb_s=2.0)))


def test_no_figure_is_rounded_to_zero() -> None:
    # 8 bytes in a tenth of a millisecond, a little more in each round.
    html = as_html(bench_document(transfers()))
    assert f">79.8{NBSP}kB/s<" in html
    assert ">0.0000" not in html


def test_a_chart_of_bandwidths_has_units_at_its_axis(tmp_path: Path, opened: Open) -> None:
    file = tmp_path / "bench.html"
    write_document(bench_document(transfers()), file)
    page = opened(file, viewport={"width": 360, "height": 900})
    chart = page.locator("[data-chart] svg").first
    ticks = chart.locator("[aria-label='y-axis tick label'] text").all_text_contents()
    assert ticks == ["10 kB/s", "100 kB/s", "1 MB/s", "10 MB/s", "100 MB/s", "1 GB/s", "10 GB/s"]
    assert "all_reduce from 79.8 kB/s to 1.99 GB/s" in str(chart.get_attribute("aria-label"))


def test_failed_and_remaining_points_are_reported() -> None:
    whole = transfers()
    failed = Failed(transfer=TransferPoint("all_to_all", "world", 8), reason="not here")
    part = dataclasses.replace(whole, lines=[*whole.lines[:-3], failed], broken_lines=1)
    text = bench_data(part)["notes"]
    assert "Not finished: 3 of 720 measurements are left." in text
    assert "Not measured: all_to_all of 8 B: not here" in text
    assert "1 line of the file cannot be read and is left out." in text


def test_nothing_measured_yet_is_a_page_and_a_table_too(tmp_path: Path) -> None:
    empty = dataclasses.replace(gemms(), lines=[])
    assert "No point was measured" in as_html(bench_document(empty))
    assert _printed(empty)


@pytest.mark.parametrize("make", [gemms, transfers], ids=["gemm-allreduce", "collectives"])
def test_tables_fit_a_narrow_terminal(make: Callable[[], Bench]) -> None:
    """With all kinds of collectives, as the command measures by default."""
    text = _printed(make())
    assert "…" not in text
    assert not re.search(r"^ +[kMG]?B/s", text, re.MULTILINE)  # a unit below its number
    assert max(map(len, text.splitlines())) <= 80


def _printed(results: Bench) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(drawn(bench_document(results)))
    return capture.get()


def estimate(value: float, half: float | None) -> Estimate:
    return Estimate(value, *([None, None] if half is None else [value - half, value + half]), 8, 4)


@pytest.mark.parametrize(
    ("slowdowns", "words"),
    [
        ([(0.001, 0.004)], "no difference at the only point; a difference of 0.4% would show"),
        ([(0.001, 0.004), (0.0, 0.006)], "no difference at all of 2 points; a difference of 0.6% would show"),
        ([(0.02, 0.05)], "inconclusive at the only point; a difference of 5% would show"),
        (
            [(0.02, 0.05), (0.0, 0.12)],
            "inconclusive at all of 2 points; a difference of 5% would show at one, of 12% at each",
        ),
        (
            [(0.001, 0.004), (0.0, 0.12), (0.0, 0.002)],
            "inconclusive at 1 of 3 points; a difference of 0.2% would show at one, of 12% at each",
        ),
        ([(0.02, 0.05), (0.1, None)], "inconclusive at all of 2 points; a difference of 5% would show at one"),
        ([(0.1, None)], "too few blocks for an interval at the only point"),
    ],
)
def test_where_no_point_is_clear_the_answer_says_what_would_show(
    monkeypatch: pytest.MonkeyPatch, slowdowns: list[tuple[float, float | None]], words: str
) -> None:
    results = gemms()
    figures = [
        dataclasses.replace(point, slowdown=estimate(*each))
        if dataclasses.is_dataclass(point)
        else msgspec.structs.replace(point, slowdown=estimate(*each))
        for point, each in zip(results.gemms, slowdowns, strict=False)
    ]
    monkeypatch.setattr(type(results), "gemms", property(lambda self: figures))
    assert verdict(results) == (
        f"What a matrix product loses during an all-reduce over {results.link_in_words}: {words}."
    )
    # Nor does a tile have a percentage of a difference that is not clear.
    (tiles, *_) = bench_document(results).runs[0].blocks
    assert all("%" not in tile.value for tile in tiles.tiles if "slowdown of products" in tile.label)
