"""How well ranks communicate, in the terminal, on the page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.results.arrivals import Lateness
from overlap_callbacks.cli import main
from overlap_callbacks.report import write_page
from overlap_callbacks.report.record import read
from tests.analysis.communication.layouts import Layout
from tests.report.runs import window, write
from tests.report.traffic_runs import write_run

Open = Callable[..., Any]
TITLE = "How well do ranks communicate?"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), Layout(2, 2, 2, ranks_per_host=4), windows=3)


def test_the_terminal_names_ranks_and_hosts_and_links_of_the_record(run: Path) -> None:
    shown = CliRunner().invoke(main, ["show", str(run), "--all"], env={"COLUMNS": "130"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    for words in (
        # 7 of 8 steps in each of three windows: Wilson's interval of 21 of 24.
        "Most for rank 1 (node-0): in 88% of steps the others wait for it longest (95% interval 69 to 96%,",
        "It comes last to 62% of 96 timed collectives (data), and the others wait for 2.00 ms each time.",
        "The bubble of the pipeline (2 stages, 4 micro-batches a step): expected 20.0%; measured 17.5%.",
        "Peaks, each way: within a host nvlink4, 450 GB/s (18 links of 25 GB/s (H100, H200)).",
        "Of a profiled overlapped step: data",
    ):
        assert words in text
    hosts = text[text.index("Hosts whose ranks come last") :]
    assert "node-1" in hosts
    short = CliRunner().invoke(main, ["show", str(run)], env={"COLUMNS": "300"}).output
    assert "Effective bandwidth by size" not in short


def test_ranks_that_are_late_in_turn_are_not_said_to_cost_nothing(run: Path, tmp_path: Path) -> None:
    # Each is waited for longest in half of the steps, as by chance, and a fifth of the time is lost to each.
    late = tuple(Lateness(rank, 0, "data", 32, 16, 8, 4, 0.5, 2.0, 0.2) for rank in (0, 1))
    for report in read(run).windows:
        assert report.arrivals is not None
        arrivals = msgspec.structs.replace(report.arrivals, ranks=late, hosts=())
        write(tmp_path, msgspec.structs.replace(report, arrivals=arrivals, environment=None))
    text = CliRunner().invoke(main, ["show", str(tmp_path), "--all"], env={"COLUMNS": "130"}).output
    words = " ".join(text.split())
    assert "In 25.0% of the time of collectives, ranks wait for the one that comes last. No rank stands out:" in words
    # No link is known, so there is no column for the share of its peak.
    assert "Effective bandwidth by size" in words
    assert "of peak" not in words


def test_shares_of_a_peak_are_of_the_users_link_where_one_is_given(run: Path) -> None:
    found = CliRunner().invoke(
        main, ["traffic", str(run), "--link-peak", "2", "--network-peak", "ib-ndr", "--json"], env={"COLUMNS": "130"}
    )
    rows = json.loads(found.stdout)["communication"]["bandwidths"]
    # 32 MiB in 0.02 ms and at 200 MB/ms; a ring of two sends the size once.
    assert rows[2]["gb_s"] == pytest.approx(2**25 / (0.02 + 2**25 / 2e8) / 1e6)
    assert [row["peak_fraction"] for row in rows] == [
        pytest.approx(row["gb_s"] / gb_s) for row, gb_s in zip(rows, (2, 2, 50), strict=True)
    ]
    wrong = CliRunner().invoke(main, ["traffic", str(run), "--link-peak", "fast"])
    assert wrong.exit_code == 2
    assert "--link-peak must be a positive number of GB/s, or one of nvlink1" in wrong.output


def test_json_has_all_of_it(run: Path) -> None:
    found = json.loads(CliRunner().invoke(main, ["show", str(run), "--json"]).stdout)["communication"]
    assert (found["late_ranks"][0]["rank"], found["late_ranks"][0]["sure"]) == (1, True)
    assert found["late_hosts"][0]["host"] == 1
    assert found["pipeline"]["expected_fraction"] == pytest.approx(0.2)
    assert sum(share["fraction"] for share in found["step_shares"]) == pytest.approx(1.0)
    assert found["link_peak"]["name"] == "nvlink4"
    assert found["network_peak"] is None


@pytest.mark.parametrize("options", [{}, {"viewport": {"width": 360, "height": 800}, "color_scheme": "dark"}])
def test_the_page_has_a_section_of_its_own_that_fits(
    run: Path, options: dict[str, Any], opened: Open, tmp_path: Path
) -> None:
    write_page([read(run)], tmp_path / "report.html")
    shown = opened(tmp_path / "report.html", **options)
    section = shown.locator("section", has=shown.locator("h2", has_text=TITLE))
    text = section.inner_text()
    for words in (
        "Ranks that come last",
        "Hosts whose ranks come last",
        "Bubble by stage",
        "Effective bandwidth by size",
    ):
        assert words in text
    assert "node-0" in text
    assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_record_of_an_earlier_version_says_nothing_of_it(tmp_path: Path) -> None:
    write(tmp_path, window())
    found = json.loads(CliRunner().invoke(main, ["show", str(tmp_path), "--json"]).stdout)["communication"]
    assert (found["waiting_fraction"], found["late_ranks"], found["bandwidths"], found["pipeline"]) == (
        None,
        [],
        [],
        None,
    )
    assert "Ranks that come last" not in CliRunner().invoke(main, ["show", str(tmp_path), "--all"]).output
