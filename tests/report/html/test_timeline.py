"""Kernels by name and stream, times of calls, ranks, memory and utilisation; what records tell of a configuration."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.kernel_times import CallTimes, StepDetail
from overlap_callbacks.analysis.results.window import MemoryPeak
from overlap_callbacks.report import page, write_page
from overlap_callbacks.report.perfetto import perfetto_trace
from overlap_callbacks.report.record import read
from tests.report import perfetto_form
from tests.report.html.test_page import charts_of, made, text_of
from tests.report.runs import OV, SEQ, picture, rank_window, run_info, window, write
from tests.samples import aggregate_windows

Open = Callable[..., Any]


def test_the_kernels_of_a_step_are_in_their_streams_by_name(tmp_path: Path) -> None:
    content = made(tmp_path, window())
    (chart,) = [chart for chart in charts_of(content) if chart["draw"] == "streams"]
    assert [mode["mode"] for mode in chart["modes"]] == ["Overlapped", "Sequential"]
    overlapped = chart["modes"][0]
    assert overlapped["lanes"] == ["stream 7", "stream 13"]
    assert [name for name, communicates in overlapped["names"] if communicates] == ["ncclDevKernel_AllReduce_Sum_bf16"]
    detail = window().pictures[0].detail
    assert detail is not None
    assert len(overlapped["calls"]) == len(detail.slices) > 20


def test_the_steps_drawn_are_in_the_page_as_a_file_for_perfetto(tmp_path: Path, opened: Open) -> None:
    (tmp_path / "report.html").write_text(made(tmp_path, window(), window(1)), encoding="utf-8")
    shown = opened(tmp_path / "report.html")
    link = shown.get_by_text("Save these steps for Perfetto")
    link.scroll_into_view_if_needed()
    with shown.expect_download() as saved:
        link.click()
    assert saved.value.suggested_filename == "overlap-window-1.json.gz"
    document = json.loads(gzip.decompress(Path(saved.value.path()).read_bytes()))
    perfetto_form.check(document)
    assert document == json.loads(msgspec.json.encode(perfetto_trace(window(1))))


def test_calls_of_a_kernel_have_minimum_median_and_maximum_by_mode(tmp_path: Path) -> None:
    text = text_of(made(tmp_path, window()))
    table = text[text.index("How long calls of a kernel take") :]
    assert "gemm_bf16 compute 480 6.90 6.90 8.20 480 6.20 6.30 7.90" in table


def test_a_record_of_an_older_version_has_neither(tmp_path: Path) -> None:
    old = tuple(msgspec.structs.replace(each, detail=None, call_times=()) for each in window().pictures)
    text = text_of(made(tmp_path, window(pictures=old)))
    assert "Timeline of one step" in text
    assert "Kernels of one step" not in text
    assert "How long calls" not in text


def test_the_step_of_each_rank_is_divided_and_the_idlest_is_named(tmp_path: Path) -> None:
    content = made(tmp_path, window())
    (chart,) = [chart for chart in charts_of(content) if chart["title"].endswith("by rank")]
    assert [row["label"] for row in chart["rows"]] == ["rank 0", "rank 1"]
    sample = window().samples[0]
    blocks = [block for block in sample.profiled if block.mode is OV]
    idle = next(part["value"] for part in chart["rows"][0]["parts"] if part["name"] == "neither")
    assert idle == pytest.approx(sum(block.idle_ms for block in blocks) / len(blocks), rel=1e-4)
    assert "Every rank is idle for 2.2% of an overlapped step." in text_of(content)
    samples = [rank_window(0, rank) for rank in (0, 1)]
    idle_for_40_ms = tuple([msgspec.structs.replace(block, idle_ms=40.0) for block in samples[1].profiled])
    samples[1] = msgspec.structs.replace(samples[1], profiled=idle_for_40_ms)
    idler = made(tmp_path / "idler", aggregate_windows(samples, world_size=2, every_n_steps=500))
    assert "Rank 1 is idle for 9.0% of an overlapped step, rank 0 for 2.2%: the most and the least." in text_of(idler)


def test_memory_and_utilisation_are_drawn_along_the_run(tmp_path: Path) -> None:
    peaks = (MemoryPeak(OV, 8 * 2**30, 8 * 2**30), MemoryPeak(SEQ, 7 * 2**30, None))
    windows = [msgspec.structs.replace(window(i, power=True), memory=peaks) for i in range(3)]
    charts = {chart["title"]: chart for chart in charts_of(made(tmp_path, *windows))}
    (line,) = charts["Highest memory of tensors"]["series"]
    assert [point[2] for point in line["points"]] == [8.0] * 3
    assert [line["points"][0][2] for line in charts["SMs busy"]["series"]] == [0.97, 0.97]
    assert {"Memory bandwidth used", "Time in which the device works"} <= charts.keys()


def test_a_part_of_the_step_can_be_looked_at_closely(tmp_path: Path, opened: Open) -> None:
    (tmp_path / "report.html").write_text(made(tmp_path, window()), encoding="utf-8")
    shown = opened(tmp_path / "report.html")
    place = shown.locator("figure", has_text="Kernels of one step").locator("[data-chart]")
    svg, range_shown = place.locator("svg").first, place.locator("output")
    place.scroll_into_view_if_needed()
    bars = svg.locator("[aria-label=bar] rect")
    whole = bars.count()
    box = svg.bounding_box()
    assert whole > 20
    y = box["y"] + 15
    shown.mouse.move(box["x"] + box["width"] * 0.5, y)
    shown.mouse.down()
    shown.mouse.move(box["x"] + box["width"] * 0.55, y, steps=4)
    shown.mouse.up()
    assert " ms to " in range_shown.text_content()
    assert 0 < bars.count() < whole / 2
    place.get_by_role("button", name="Show the whole step").click()
    assert bars.count() == whole
    place.get_by_role("button", name="Zoom in").click()
    assert bars.count() < whole
    svg.dblclick(position={"x": box["width"] * 0.4, "y": 15})
    assert bars.count() == whole
    shown.mouse.move(box["x"] + box["width"] * 0.5, y + 1)
    tip = svg.locator("[aria-label=tip]")
    assert "gemm_bf16" in tip.text_content()
    assert "stream 7" in tip.text_content()


def test_names_in_the_timeline_stay_text(tmp_path: Path, opened: Open) -> None:
    evil = "</script><img src=x onerror='window.harmed = 1'>"
    drawn = msgspec.structs.replace(
        picture(OV), detail=StepDetail((evil,), (False,), ((0, 7, 0.0, 9.0, 0), (5, 7, 0.0, 9.0, 0))),
        call_times=(CallTimes(evil, False, 1, 9.0, 9.0, 9.0),),
    )  # fmt: skip
    write_page([read(write(tmp_path / "run", window(pictures=(drawn,))))], tmp_path / "report.html")
    assert opened(tmp_path / "report.html").evaluate("window.harmed") is None


# -- configurations of several runs

MODEL = {"model": "GPT", "parameters": 1000, "shapes": "abc", "ddp_bucket_cap_bytes": 26214400}


def compared(folder: Path, *configurations: dict[str, Any], **changes: Any) -> str:
    records = [
        read(write(folder / str(i), window(**changes), run=run_info(configuration=configuration)))
        for i, configuration in enumerate(configurations)
    ]
    return text_of(page(records))


def test_other_buckets_of_the_same_model_are_a_difference(tmp_path: Path) -> None:
    text = compared(tmp_path, MODEL, {**MODEL, "ddp_bucket_cap_bytes": 1048576})
    table = text[text.index("Where their configurations differ") :]
    assert "Configuration: ddp_bucket_cap_bytes 25 MiB 1 MiB" in table
    assert "Configuration: model " not in table[: table.index("Not every record has")]


def test_records_without_a_model_are_not_said_to_share_one(tmp_path: Path) -> None:
    text = compared(tmp_path, {}, {}, collectives=())
    assert "same configuration" not in text
    assert "The records know of no difference between the configurations." in text
    assert (
        "Not every record has the model, the buckets of communication, the collectives of a step and the size of the "
        "batch, and none has the data and the code of the job: these may differ." in text
    )


def test_messages_distinguish_runs_whose_adapters_report_nothing(tmp_path: Path) -> None:
    rows = window().collectives
    more = tuple(msgspec.structs.replace(row, messages=row.messages + 4) for row in rows)
    records = [
        read(write(tmp_path / name, window(collectives=found), run=run_info()))
        for name, found in (("a", rows), ("b", more))
    ]
    text = text_of(page(records))
    assert "Collectives of a step: " in text[text.index("Where their configurations differ") :]
