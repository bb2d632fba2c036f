"""The page as HTML, without a browser: what stands in it, and what it says where something is missing."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.formatting import DASH
from overlap_callbacks.analysis.results.window import DimensionTime, TimedBlock
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report import page, write_page
from overlap_callbacks.report.html import script_json, with_whole_options
from overlap_callbacks.report.record import read
from overlap_callbacks.report.views.runs import distinct_names
from overlap_callbacks.report.views.step_charts import both
from tests.margins import near
from tests.report.runs import OSSO, OV, SEQ, many, run_info, window, write


def text_of(content: str) -> str:
    """What a reader sees, on one line."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", content, flags=re.S)
    body = re.sub(r'<span class="option">(.*?)</span>', r"\1", body)  # in the midst of a line
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body))).replace("\xa0", " ")


def charts_of(content: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', content, re.S)
    assert found is not None
    charts: list[dict[str, Any]] = json.loads(found[1])
    return charts


def made(folder: Path, *windows: Any, **options: Any) -> str:
    return page([read(write(folder / "run-1", *windows, **options))])


QUESTIONS = (
    "Step time",
    "Where the time of a profiled step goes",
    "What does it cost?",
    "How far from ideal, and what holds it back?",
    "What does it do to power?",
    "Has it changed?",
    "How good is the measurement?",
    "Configuration",
)


def test_the_verdict_comes_first_then_the_questions_in_their_order(tmp_path: Path) -> None:
    text = text_of(made(tmp_path, *[window(i, power=True) for i in range(8)]))
    head = (
        "of communication is hidden;",
        "Overlap saves 5",
        "Compute slowdown: ",
        "95% intervals.",
        "To try first: ",
    )
    places = [text.index(part) for part in (*head, *QUESTIONS)]
    assert places == sorted(places)


def test_a_whole_record_gives_every_chart_and_nothing_is_missing(tmp_path: Path) -> None:
    content = made(tmp_path, *[window(i, power=True) for i in range(8)])
    titles = [chart["title"] for chart in charts_of(content)]
    assert titles == [
        "Step time",
        titles[1],
        "Timeline of one step",
        "Communication by dimension",
        "Power along a window",
        "Speed-up of overlap",
        "Compute slowdown",
        "Exposed communication",
        "Step time",
        "Mean power of a device",
        "Kernels of one step, by stream",
        "Where the time of a profiled step goes, by rank",
        "Time in which the device works",
        "SMs busy",
        "Memory bandwidth used",
    ]
    assert titles[1] == "Where the time of a profiled step goes"
    (parts,) = [chart for chart in charts_of(content) if chart.get("name_parts")]
    assert parts["unit"] == "fraction"
    assert sum(part["value"] for row in parts["rows"] for part in row["parts"]) == pytest.approx(1)
    text = text_of(content)
    assert "not measured" not in text
    assert (
        "Compute slowdown by the dimension of parallelism in flight: pipeline +33.3%, tensor +14.8%, data +2.9%."
        in text
    )
    assert "bubble of the pipeline 3.4%" in text
    assert "of the time that perfect overlap would save" in text
    assert "Slowdown by dimension of parallelism in flight" in text
    for part in (
        "Compute kernels that lose most",
        "Slowdown by concurrent kernel",
        "clock throttled by power cap",
        "energy",
        "tensor",
    ):
        assert part in text
    # While both run, an all-reduce of 41 ms costs the products that lie beside it 18 ms.
    assert "Kernels During Slowdown While both run Lost, ms Time, ms Alone, ms gemm all_reduce +17.5% +78.3% 18" in text


def test_bars_hold_the_figures_of_the_record_with_their_intervals(tmp_path: Path) -> None:
    record = read(write(tmp_path, window()))
    rows = {row["label"]: row for row in charts_of(page([record]))[0]["rows"]}
    figure = record.windows[0].e2e_sequential_ms
    assert figure is not None
    assert rows["Sequential"]["value"] == pytest.approx(figure.value, rel=1e-5)
    assert rows["Sequential"]["low"] == pytest.approx(figure.ci_low, rel=1e-5)
    assert rows["Ideal"]["value"] < rows["Overlapped"]["value"] < rows["Sequential"]["value"]


# -- what is missing is said


def test_an_empty_record(tmp_path: Path) -> None:
    content = made(tmp_path)
    text = text_of(content)
    assert "Nothing has been measured yet: no window is done." in text
    assert "No window was completed." in text
    assert "NVIDIA H200" in text
    assert charts_of(content) == []


def test_the_start_of_a_run_is_in_readable_form(tmp_path: Path) -> None:
    assert "· started 2026-11-21 14:00 UTC " in text_of(made(tmp_path, window()))
    odd = text_of(made(tmp_path / "odd", window(), run=run_info(started_at="some day")))
    assert "· started some day " in odd


def test_one_window(tmp_path: Path) -> None:
    assert "One valid window was measured, so there is nothing to compare it with." in text_of(made(tmp_path, window()))


def test_too_few_windows_to_tell_a_change(tmp_path: Path) -> None:
    text = text_of(made(tmp_path, *[window(i) for i in range(3)]))
    assert "Too few windows to say: 3, and it takes 20 to show a change." in text


def test_a_change_along_the_run_is_distinguished_from_chance(tmp_path: Path) -> None:
    wobble = [0.004, -0.003, 0.001, -0.004, 0.002]
    steady = [0.14 + wobble[number % 5] for number in range(40)]
    text = text_of(made(tmp_path / "a", *[window(i, slowdown=value) for i, value in enumerate(steady)]))
    assert "No headline figure has changed. Found within 20 windows in 95% of cases:" in text
    slower = [value + 0.06 * (i >= 25) for i, value in enumerate(steady)]
    text = text_of(made(tmp_path / "b", *[window(i, slowdown=value) for i, value in enumerate(slower)]))
    assert "Changed: compute slowdown (eq. 1) +6.0 pp from step 12,520." in text
    assert "At most one false alarm in 1,000 windows, all figures together." in text


def test_without_power(tmp_path: Path) -> None:
    assert "Power was not measured." in text_of(made(tmp_path, window()))


def test_each_cause_of_the_slowdown_has_its_share_and_what_it_rests_on(tmp_path: Path) -> None:
    text = text_of(made(tmp_path, window(power=True), window(1, power=True)))
    assert "What the compute slowdown is due to" in text
    assert re.search(r"lower clock \+12\.5% measured: SM clocks, means over readings that fall into compute", text)
    assert re.search(r"waves \+1\.\d% modelled from the grids of 90% of the compute", text)
    assert re.search(r"compute slowdown \+14\.0% measured \(equation 1\)", text)
    assert "Means over 2 windows, as fractions" in text
    several = text_of(made(tmp_path / "several", *[window(i, power=True, slowdown=0.05 * i) for i in range(1, 6)]))
    (headline,) = re.findall(
        r"Compute slowdown: kernels take ([\d.]+)% longer than without overlap \([\d. to]+\)\. 95%", several
    )
    assert f"compute slowdown +{headline}% measured (equation 1)" in several
    table = several[several.index("What the compute slowdown is due to") :]
    shares = re.findall(r"(?:lower clock|SMs taken|waves|unexplained) (\N{MINUS SIGN}?\+?[\d.]+)% ", table)
    assert sum(float(share.replace("\N{MINUS SIGN}", "-")) for share in shares) == pytest.approx(
        float(headline), abs=0.2
    )
    assert "What the compute slowdown is due to" not in text_of(made(tmp_path / "none", window()))


def test_peak_power_is_compared_in_words_once_windows_give_an_interval(tmp_path: Path) -> None:
    few, enough = (
        text_of(made(tmp_path / str(number), *[window(i, power=True) for i in range(number)])) for number in (1, 6)
    )
    assert "Highest power of a device with overlap: too few blocks for an interval." in few
    assert re.search(r"The highest power of a device is 3\.5% higher \(3\.5 to 3\.5\) with overlap\.", enough)


def test_the_power_trace_distinguishes_hidden_from_exposed_communication(tmp_path: Path) -> None:
    content = made(tmp_path / "a", window(power=True))
    (chart,) = [chart for chart in charts_of(content) if chart["title"] == "Power along a window"]
    assert len(chart["both"]) > 0
    legends = re.findall(r'<i class="[^"]*"></i>([^<]+)</span>', content)
    assert {"communication during compute", "communication alone"} <= set(legends)
    old = window(power=True)  # of a record that tells only when communication was in flight
    assert old.power_trace is not None
    old = msgspec.structs.replace(old, power_trace=msgspec.structs.replace(old.power_trace, both=()))
    legends = re.findall(r'<i class="[^"]*"></i>([^<]+)</span>', made(tmp_path / "b", old))
    assert "communication in flight" in legends
    assert "communication alone" not in legends


def test_without_a_profile(tmp_path: Path) -> None:
    bare = window(profiled=(), kernels=(), pairs=(), pictures=(), dimensions=())
    text = text_of(made(tmp_path, bare))
    assert "Kernels were not measured: no window has a profile." in text
    assert "No step was drawn" in text
    tiles = re.findall(r"<dt>([^<]+)</dt><dd><strong>", made(tmp_path / "tiles", bare))
    assert tiles == ["Step time with overlap"]  # no tile is empty
    several = [msgspec.structs.replace(bare, window=i, first_step=20 + 500 * i) for i in range(3)]
    legends = re.findall(r'<i class="[^"]*"></i>([^<]+)</span>', made(tmp_path / "c", *several))
    assert "sequential" in legends
    assert "ideal" not in legends
    schedule = Schedule(profiled_steps=0).as_dict()
    text = text_of(made(tmp_path / "b", bare, run=run_info(schedule=schedule)))
    assert "the schedule has profiled_steps=0" in text


def test_a_dimensions_name_is_one_line_in_a_chart(tmp_path: Path) -> None:
    rows = [DimensionTime(name, 1, 1, 1.0, 0.5, 1.0, 1.0) for name in ("data\nparallel", "tensor")]
    charts = charts_of(made(tmp_path, window(dimensions=tuple(rows))))
    labels = [row["label"] for chart in charts if chart.get("name_parts") is None for row in chart.get("rows", ())]
    assert {"data parallel", "tensor"} <= set(labels)


def test_all_windows_invalid(tmp_path: Path) -> None:
    invalid = [
        msgspec.structs.replace(window(i), valid=False, problems=("residual overlap 0.3 in sequential steps",))
        for i in range(3)
    ]
    text = text_of(made(tmp_path, *invalid))
    assert "None of the 3 windows counts, so what overlap saves here is not known." in text
    assert "Why: 3 windows are not valid: residual overlap 0.3 in sequential steps." in text
    assert "What to do: Switch off for a measurement" in text
    assert "What does it cost?" not in text
    assert "what holds it back? That is not known, as no window counts." in text
    assert f"0 of 3 windows count; not valid: 3 (windows 0{DASH}2)." in text
    assert f"residual overlap 0.3 in sequential steps 3 0{DASH}2" in text
    assert "makes steps" not in text


def test_a_control_run(tmp_path: Path) -> None:
    control = [msgspec.structs.replace(window(i), control=True) for i in range(2)]
    text = text_of(made(tmp_path, *control, run=run_info(schedule=Schedule(control=True).as_dict())))
    assert "A/A control: both sides ran overlapped, so every difference is chance." in text
    assert "Step time, one side against the other" in text
    assert "Every difference here is an error of the measurement" in text
    assert "makes steps" not in text


def test_control_windows_among_real_ones_are_marked_and_left_out(tmp_path: Path) -> None:
    windows = [window(i) for i in range(4)]
    windows[1] = msgspec.structs.replace(windows[1], control=True)
    content = made(tmp_path, *windows)
    table = text_of(content[content.index("Every window") :])
    assert re.search(rf"1 {windows[1].first_step:,} control ", table)
    lines = [chart for chart in charts_of(content) if chart["draw"] == "lines"]
    assert lines
    for line in lines:
        assert line["excluded"] == [windows[1].first_step]
        assert windows[1].first_step not in {point[0] for series in line["series"] for point in series["points"]}


def test_turns_without_a_window_cost_nothing(tmp_path: Path) -> None:
    windows = [msgspec.structs.replace(window(i), measurement_overhead=0.01) for i in (0, 1, 2, 3)]
    assert "Cost of measuring: 1.00% of training." in text_of(made(tmp_path / "a", *windows))
    fewer = [windows[0], windows[3]]
    assert "Cost of measuring: 0.50% of training." in text_of(made(tmp_path / "b", *fewer))


def test_an_unfinished_window_alone_is_shown_as_one(tmp_path: Path) -> None:
    blocks = tuple(TimedBlock(arm, i, (410.0 if arm is OV else 470.0, 411.0)) for i, arm in enumerate(OSSO * 2))
    text = text_of(made(tmp_path, blocks=blocks))
    assert "Unfinished: overlap saves " in text
    assert "Why: no window is whole, and this is window 0 alone (8 timed blocks so far)" in text
    assert "What to do: Let the job run on until a window ends." in text
    assert "Window 0 is unfinished: 8 timed blocks so far" in text


def test_an_unfinished_window_after_whole_ones_is_named(tmp_path: Path) -> None:
    text = text_of(made(tmp_path, window(), blocks=(TimedBlock(SEQ, 0, (470.0,)),)))
    assert "Window 1 is unfinished: 1 timed blocks so far" in text
    assert "Unfinished: " not in text


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    write(tmp_path, window())
    with (tmp_path / "overlap.jsonl").open("ab") as file:
        file.write(b"no json\n")
    assert "1 line of the record could not be read." in text_of(page([read(tmp_path)]))


def test_ranks_that_were_not_heard_are_counted(tmp_path: Path) -> None:
    lacking = msgspec.structs.replace(window(), ranks=(0,))
    assert "at least 1 of 2; 1 of 1 window lacks some" in text_of(made(tmp_path, lacking))


# -- several runs


def test_several_runs_are_side_by_side(tmp_path: Path) -> None:
    records = [
        read(write(tmp_path / "one", window(), window(1))),
        read(write(tmp_path / "two", window(slowdown=0.05), run=run_info(torch_version="2.14.0"))),
        read(write(tmp_path / "x" / "one")),
    ]
    content = page(records)
    text = text_of(content)
    assert "3 runs compared" in text
    assert "Without any figure: one (2)." in text
    assert "PyTorch 2.13.0+cu130 2.14.0 2.13.0+cu130" in text
    compared, shares = charts_of(content)[:2]
    assert {row["run"] for row in compared["rows"]} == {"one", "two"}
    (along,) = [chart for chart in charts_of(content) if chart["title"] == "Compute slowdown along the runs"]
    assert [(line["name"], len(line["points"])) for line in along["series"]] == [("one", 2), ("two", 1)]
    assert "mean power of a device, overlapped" not in text
    figures = {"Step time with overlap", "Compute slowdown", "Exposed communication, share of a profiled step"}
    assert {row["figure"] for row in shares["rows"]} == figures
    for anchor in ("run-1", "run-2", "run-3"):
        assert content.count(f'id="{anchor}"') == content.count(f'href="#{anchor}"') == 1


def test_power_of_several_runs_is_side_by_side(tmp_path: Path) -> None:
    records = [
        read(write(tmp_path / "one", window(power=True), window(1, power=True))),
        read(write(tmp_path / "two", window())),
    ]
    text = text_of(page(records))
    table = text[text.index("Power and energy") :]
    assert re.search(r"mean power of a device, overlapped [\d,.]+ W.{0,30} not measured", table)
    assert "energy of a step, all devices, sequential" in table


def test_runs_whose_long_names_share_a_prefix_stay_separate(tmp_path: Path) -> None:
    names = [f"{'sweep-of-everything-' * 6}{i}" for i in range(3)]
    content = page([read(write(tmp_path / name, window())) for name in names])
    assert len({row["run"] for row in charts_of(content)[0]["rows"]}) == 3


def test_no_record_is_refused() -> None:
    with pytest.raises(ValueError, match="records must hold at least one record, got none"):
        page([])


# -- size


def test_a_thousand_windows_are_made_in_seconds_and_stay_below_5_mb(tmp_path: Path) -> None:
    write(tmp_path, *(msgspec.structs.replace(w, power_trace=None) for w in many(1000)))
    record = read(tmp_path)
    start_s = time.process_time()
    size = write_page([record], tmp_path / "report.html")
    assert near(time.process_time() - start_s, 10.0)
    assert size < 2_000_000
    charts = charts_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert all(len(line["points"]) > 900 for chart in charts if chart["draw"] == "lines" for line in chart["series"])


def test_more_windows_than_can_be_drawn_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    record = read(write(tmp_path))
    record.windows += many(3000)
    content = page([record])
    assert len(content) < 3_000_000
    assert all(
        len(line["points"]) <= 1000
        for chart in charts_of(content)
        if chart["draw"] == "lines"
        for line in chart["series"]
    )
    text = text_of(content)
    assert "at most 1,000 are drawn: the extremes of each stretch stay" in text
    assert "1,000 of 3,000: the first and the last ones, those with the highest" in text


# -- the pieces


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", "<!-- <script>", "&lt;", "\u2028", '"\\'])
def test_json_in_a_script_element_cannot_end_it(hostile: str) -> None:
    found = script_json({hostile: [hostile]})
    assert not set("<>&\u2028").intersection(found)
    assert json.loads(found) == {hostile: [hostile]}


def test_both_is_where_two_series_of_intervals_overlap() -> None:
    assert both([(0, 2), (3, 6)], [(1, 4), (5, 7)]) == [(1, 2), (3, 4), (5, 6)]
    assert both([(0, 1)], [(1, 2)]) == []
    assert both([], [(0, 1)]) == []


def test_the_page_replaces_an_older_one_and_leaves_no_other_file(tmp_path: Path) -> None:
    record = read(write(tmp_path / "run", window()))
    target = tmp_path / "report.html"
    target.write_text("old")
    size = write_page([record], target)
    assert target.stat().st_size == size
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "run"]


def test_the_same_record_gives_the_same_page(tmp_path: Path) -> None:
    record = read(write(tmp_path, window(), window(1)))
    assert page([record]) == page([record])


def test_runs_of_one_name_are_distinguished_in_any_order(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "x (2)", tmp_path / "b" / "x", tmp_path / "c" / "x", tmp_path / "d" / "x (2)"]
    records = [read(write(folder, window(0))) for folder in folders]
    assert distinct_names(records) == ["x (2)", "x", "x (3)", "x (2) (2)"]


def test_a_link_keeps_leading_where_it_did_and_a_device_stays_one(tmp_path: Path) -> None:
    found = [read(write(tmp_path / "run", window(0)))]
    target = tmp_path / "elsewhere.html"
    (tmp_path / "link.html").symlink_to(target)
    size = write_page(found, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert target.stat().st_size == size
    assert write_page(found, "/dev/null") > 0
    assert not Path("/dev/null").is_file()
    with pytest.raises(IsADirectoryError):
        write_page(found, tmp_path)


def test_no_line_ends_within_an_option_and_nothing_else_of_a_text_is_markup() -> None:
    text = with_whole_options("<b> overlap study --power-cap none, a--b")
    assert text == '&lt;b&gt; overlap study <span class="option">--power-cap</span> none, a--b'
