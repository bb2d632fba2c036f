"""The page of a tuning, and what the terminal shows of it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from overlap_callbacks.experiments.tune.combinations import Axis, Kind
from overlap_callbacks.experiments.tune.ranking import ranked
from overlap_callbacks.experiments.tune.sweep import Tune
from overlap_callbacks.experiments.tune.view import tuning_document
from overlap_callbacks.report import terminal
from overlap_callbacks.report.html import as_html, write_document
from tests.experiments.tune_results import BUCKETS, CTAS, results
from tests.report.html.test_page import charts_of, text_of

# A step under each NCCL_MAX_CTAS and bucket size; the last one fails.
STEP_MS = [(ms, ms + 1, ms - 1, ms + 0.5) for ms in (100, 90, 120, 80, 70, 99, 85, 74)]


def printed(found: Tune) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(terminal.drawn(tuning_document(found, ranked(found))))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def test_it_has_a_chart_for_each_axis_and_the_line_to_use(tmp_path: Path, opened: Callable[..., Any]) -> None:
    found = results(tmp_path, STEP_MS, CTAS, BUCKETS, failed=(8,))
    ranking = ranked(found)
    content = as_html(tuning_document(found, ranking))
    charts = charts_of(content)
    assert [chart["x_label"] for chart in charts] == ["NCCL_MAX_CTAS", "bucket-mb"]
    by_bucket = charts[1]["series"][0]
    assert by_bucket["name"] == "NCCL_MAX_CTAS=8"
    assert [point[0] for point in by_bucket["points"]] == [1, 5, 25]
    text = text_of(content)
    assert "Use: NCCL_MAX_CTAS=8 torchrun train.py --bucket-mb 5" in text
    assert "Failed: NCCL_MAX_CTAS=16, bucket-mb=1: exit code 1: OutOfMemoryError: 20 GiB" in text
    assert "All are for one look, at the end." in text
    write_document(tuning_document(found, ranking), tmp_path / "tune.html")
    shown = opened(tmp_path / "tune.html")
    assert shown.locator("svg").count() >= 2


def test_a_tuning_of_which_nothing_was_measured_has_a_page(tmp_path: Path) -> None:
    found = results(tmp_path, [], failed=(0, 1, 2))
    assert "No combination was measured." in text_of(as_html(tuning_document(found, ranked(found))))
    assert len(re.findall(r"^ +(?:25|5|1) +failed +0$", printed(found), re.MULTILINE)) == 3


def test_settings_whose_names_look_like_marks_of_columns_keep_them(tmp_path: Path) -> None:
    axes = Axis(Kind.ARG, "--lr", ("1", "2")), Axis(Kind.ENV, "_FOO", ("3", "4")), Axis(Kind.ARG, "+~*", ("5", "6"))
    found = results(tmp_path, [(100 + number, 101) for number in range(8)], *axes)
    assert re.search(r" --lr +_FOO +\+~\* ", printed(found))
    page = as_html(tuning_document(found, ranked(found)))
    assert all(f">{axis.name}<" in page for axis in axes)


def test_remaining_points_are_reported_with_how_to_resume(tmp_path: Path) -> None:
    found = results(tmp_path, [(100, 101), (90, 91), (95, 96)])
    found.num_runs = 2
    assert "Not finished" not in text_of(as_html(tuning_document(found, ranked(found))))
    found.num_runs = 4
    says = f"Not finished: 6 of 12 runs did not run yet. Go on with: overlap tune --resume {tmp_path}"
    assert says in text_of(as_html(tuning_document(found, ranked(found))))


def test_what_a_command_says_cannot_leave_its_place(tmp_path: Path) -> None:
    found = results(tmp_path, [(1, 1), (1, 1), (1, 1)], Axis(Kind.ARG, "<b>", ("<i>", "</script>", "x")))
    body = as_html(tuning_document(found, ranked(found))).partition('<script type="application/json"')[0]
    assert "&lt;b&gt;" in body
    assert "<b>" not in body
    assert "<i>" not in body
    assert "</script>" not in body


def test_the_terminal_has_the_verdict_the_ranked_table_and_the_line_to_use(tmp_path: Path) -> None:
    found = results(tmp_path, STEP_MS, CTAS, BUCKETS, failed=(8,))
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = " ".join(text.split())
    assert words.startswith("NCCL_MAX_CTAS=8, bucket-mb=5 saves 30.0 ms a step against NCCL_MAX_CTAS as is, ")
    assert "- Use: NCCL_MAX_CTAS=8 torchrun train.py --bucket-mb 5" in words
    assert "- Failed: NCCL_MAX_CTAS=16, bucket-mb=1: exit code 1: OutOfMemoryError: 20 GiB" in words
    assert re.search(r"^ +1 +8 +5 +70\.12 ms +-30\.", text, re.MULTILINE)
    assert re.search(r"^ +16 +1 +failed", text, re.MULTILINE)
