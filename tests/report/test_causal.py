"""Which collective holds the step up, on the page, in the terminal and as JSON; what was tried stands beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.causal import levels_of, responses_of
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.report.html import write_document
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.views.causal import causal, causal_document
from overlap_callbacks.report.views.elements import Chart, Note, Table
from overlap_callbacks.report.views.sections import ideal
from overlap_callbacks.sinks import JsonlSink
from tests.commands import invoke
from tests.report.arm_runs import arm_window
from tests.report.html.test_screens import TEXTS
from tests.report.runs import run_info, window
from tests.toggling import at_night

SLACK = DelayedCall("_reduce_scatter_base_", "data", 0, "layers.0")
HIDDEN = DelayedCall("allreduce_", "tensor", 0, "layers.7.mlp.linear_fc2")
GATHER = DelayedCall("_allgather_base_", "data", 0, "layers.3")


# Dots below the axis, number of dots, of intervals, and of their places.
DRAWN = """() => {
  const figures = [...document.querySelectorAll('figure')];
  const figure = figures.find((each) => each.textContent.includes('Step against delay'));
  const axis = figure.querySelector('[aria-label="x-axis tick"]').getBoundingClientRect().top;
  const dots = [...figure.querySelectorAll('[aria-label=dot] circle')].map((dot) => dot.getBoundingClientRect().top);
  const intervals = [...figure.querySelectorAll('[aria-label=rule] line')]
    .map((line) => line.getBoundingClientRect()).filter((line) => line.width < 1 && line.height > 1);
  const places = new Set(intervals.map((line) => Math.round(line.left)));
  return [dots.filter((top) => top > axis).length, dots.length, intervals.length, places.size];
}"""
# Tables of delays that are wider than their place.
CLIPPED = """() => [...document.querySelectorAll('table')].filter((table) => table.textContent.includes('slope'))
  .filter((table) => table.scrollWidth > table.parentElement.clientWidth).length"""


def delayed(call: DelayedCall | tuple[DelayedCall, ...], slope: float, number: int, noise: float = 0.1) -> CausalWindow:
    levels = levels_of(54)
    times = [400 + slope * level * 10 + noise * (step * 7 % 5 - 2) for step, level in enumerate(levels)]
    members = (call,) if isinstance(call, DelayedCall) else call
    return CausalWindow(
        window=number, first_step=500 * number, delayed=DelayedSet(members, 20.0), levels=levels, step_ms=tuple(times)
    )


def job_of(folder: Path, *windows: CausalWindow, profiled: bool = False) -> Record:
    sink = JsonlSink(folder)
    sink.open(run_info())
    if profiled:
        sink.log(window(0))
    for one in windows:
        sink.log_causal(one)
    sink.close()
    return read(folder)


def table_in(record: Record) -> Table:
    (section,) = causal(record)
    return next(block for block in section.blocks if isinstance(block, Table))


def named(record: Record) -> list[str]:
    return [row[0].text for row in table_in(record).rows]


def columns(record: Record) -> set[str]:
    return {head.text for head in table_in(record).columns}


def job(folder: Path) -> Record:
    sink = JsonlSink(folder)
    sink.open(run_info(configuration={"fsdp_units": 24, "fsdp_prefetch": 0}))
    sink.log(window(0))
    for number, (call, slope) in enumerate([(SLACK, 0.05), (HIDDEN, 0.9), (GATHER, 1.0)]):
        sink.log_causal(delayed(call, slope, 2 * number + 1))
    sink.log_arm(msgspec.structs.replace(arm_window(8)))
    sink.close()
    return read(folder)


def test_page_and_terminal_say_what_holds_the_step_up_and_where_the_profile_differs(tmp_path: Path) -> None:
    record = job(tmp_path)
    (section,) = causal(record)
    assert section.answer.startswith("The step waits for all-gather of layers.3, all-reduce of layers.7.mlp.linear_fc2")
    notes = [
        block.text.replace("\u202f", " ").replace("\xa0", " ") for block in section.blocks if isinstance(block, Note)
    ]
    assert len(notes) == 2
    slack = "reduce-scatter of layers.0 is exposed for 6.00 ms in steps of other windows, but with slack of at least"
    assert any(slack in note for note in notes)
    assert any("linear_fc2 is hidden for" in note for note in notes)
    table, fixes = [block for block in section.blocks if isinstance(block, Table)]
    assert [row[0].text for row in table.rows] == [
        "all-gather of layers.3", "all-reduce of layers.7.mlp.linear_fc2", "reduce-scatter of layers.0",
    ]  # fmt: skip
    assert [row[0].text for row in fixes.rows] == ["all-gather of layers.3", "all-reduce of layers.7.mlp.linear_fc2"]
    assert fixes.rows[1][1].text.startswith("no setting is known for it alone")
    told = " ".join([cell.text for cell in fixes.rows[0]])
    assert "prefetch one unit earlier" in told
    assert "Prefetch(2, 2)" in told
    assert "prefetch_2_2: " in told  # the arm that was tried, with its outcome
    (chart,) = [block for block in section.blocks if isinstance(block, Chart)]
    assert len(chart.data["series"]) == 3
    text = invoke("show", str(tmp_path), "--causal").output
    for words in ("wins ≤", "Prefetch(2, 2)", "What would fix it"):
        assert words in text


def test_json_has_gain_exposure_and_fix(tmp_path: Path) -> None:
    job(tmp_path)
    first, second, third = json.loads(invoke("show", str(tmp_path), "--json").stdout)["causal"]
    assert first["fix"]["arm"] == "Prefetch(2, 2)"
    assert first["exposed_ms"] is None  # the profile does not name it
    assert first["removed_wins_at_most_ms"] > 0  # as long as others of its kind take alone
    assert second["removed_wins_at_most_ms"] > 0
    assert "hidden" in second["profile_differs"]
    assert third["exposed_ms"] == 6.0


def bucket(number: int) -> DelayedCall:
    parameters = f"layers.{number}.self_attention.linear_qkv.layer_norm_weight … layers.{number}.self_attention.bias"
    return DelayedCall("allreduce_", "data", 0, f"bucket {number}: {parameters}")


def test_no_two_rows_read_alike_and_the_number_of_a_set_stands_first(tmp_path: Path) -> None:
    """Names that differ late, of different groups, and sets that begin with the same collective."""
    ends = [DelayedCall("allreduce_", "data", 0, "model.decoder." * 8 + end) for end in ("weight", "bias")]
    groups = [DelayedCall("allreduce_", group, 0, "layers.0") for group in ("data", "tensor")]
    sets = [tuple(map(bucket, range(number))) for number in (6, 3)]
    tested = [*ends, *groups, *sets, bucket(0)]
    record = job_of(tmp_path, *[delayed(of, 1.0, number) for number, of in enumerate(tested)])
    names = named(record)
    assert len(set(names)) == len(names) == len(tested)
    assert {
        "6 collectives: all-reduce of bucket 0 … bucket 5",
        "3 collectives: all-reduce of bucket 0 … bucket 2",
    } < set(names)
    for width in ("80", "120"):
        text = invoke("show", str(tmp_path), "--causal", env={"COLUMNS": width}).output
        rows = [
            row.partition("holds the")[0].strip()
            for row in text.splitlines()
            if "holds the step  up" in row or "  holds the" in row
        ]
        assert len(set(rows)) == len(rows) == len(tested), text


def test_sets_of_which_others_tell_more_are_left_out(tmp_path: Path) -> None:
    four = tuple(map(bucket, range(4)))
    halves_have_slack = [delayed(four, 0.4, 0, noise=40), delayed(four[:2], 0.0, 1), delayed(four[2:], 0.1, 2)]
    assert named(job_of(tmp_path / "slack", *halves_have_slack)) == [
        "2 collectives: all-reduce of bucket 2 … bucket 3", "2 collectives: all-reduce of bucket 0 … bucket 1",
    ]  # fmt: skip
    # One of two blocks, the other has slack: all is known of the two, not of the four.
    decided = [delayed(four, 1.0, 0), delayed(four[:2], 1.0, 1), delayed(four[0], 1.0, 2), delayed(four[1], 0.0, 3)]
    assert [name[:13] for name in named(job_of(tmp_path / "decided", *decided))] == [
        "all-reduce of", "all-reduce of", "4 collectives",
    ]  # fmt: skip


def test_inconclusive_rows_have_no_slack_and_say_what_would_tell(tmp_path: Path) -> None:
    record = job_of(tmp_path, delayed(bucket(0), -0.3, 0, noise=20))
    (section,) = causal(record)
    assert table_in(record).rows[0][1].text == "inconclusive"
    assert responses_of(record.causal)[0].slack_ms is not None
    assert "slack, ≥" not in columns(record)
    assert "none with slack so far. More windows, a longer run or a quieter machine would tell." in section.answer
    cleared = job_of(tmp_path / "cleared", delayed(bucket(0), 0.0, 0))
    assert "quieter" not in causal(cleared)[0].answer


def test_the_lists_of_what_to_change_refer_to_each_other(tmp_path: Path) -> None:
    record = job(tmp_path)
    blocks = [block for section in (*ideal(record), *causal(record)) for block in section.blocks]
    captions = {block.title: block.caption for block in blocks if isinstance(block, Table)}
    assert "Which collective holds the step up?" in captions["What to try"]
    assert "What to try" in captions["What would fix it"]
    record.causal.clear()
    (advice,) = [
        block for block in ideal(record)[0].blocks if isinstance(block, Table) and block.title == "What to try"
    ]
    assert "holds the step up" not in advice.caption


def test_the_terminal_has_the_title_first(tmp_path: Path) -> None:
    job_of(tmp_path, delayed(bucket(0), 1.0, 0))
    first, second, *_ = invoke("show", str(tmp_path), "--causal").output.splitlines()
    assert first.strip() == "Which collective holds the step up?"
    assert second.startswith("The step waits for all-reduce of bucket 0")


@pytest.mark.parametrize("width", at_night([1100, 360], [360]))
def test_points_below_zero_and_intervals_are_within_the_chart(
    tmp_path: Path, width: int, opened: Callable[..., Any]
) -> None:
    tested = [(HIDDEN, 1.0), (SLACK, -0.4), (bucket(0), -0.3), (bucket(1), 0.1), (bucket(2), 0.2)]
    windows = [delayed(call, slope, 2 * number + 1, noise=2) for number, (call, slope) in enumerate(tested)]
    record = job_of(tmp_path, *windows, profiled=True)
    assert {"slack, ≥", "wins ≤", "exposed"} < columns(record)
    write_document(causal_document(record), tmp_path / "page.html")
    page = opened(tmp_path / "page.html", viewport={"width": width, "height": 900}, color_scheme="dark")
    # Intervals at the same delay do not hide each other.
    assert page.evaluate(DRAWN) == [0, 15, 5, 5]
    number, wrong = page.evaluate(TEXTS)
    assert number > 5
    assert wrong == []
    if width == 1100:
        assert page.evaluate(CLIPPED) == 0
