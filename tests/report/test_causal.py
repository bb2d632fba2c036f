"""Which collective holds the step up, on the page, in the terminal and as JSON; what was tried stands beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_callbacks.analysis.causal import levels_of
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.run_json import run_as_json
from overlap_callbacks.report.views.causal import causal
from overlap_callbacks.report.views.elements import Chart, Note, Table
from overlap_callbacks.sinks import JsonlSink
from tests.commands import invoke
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info, window

SLACK = DelayedCall("_reduce_scatter_base_", "data", 0, "layers.0")
HIDDEN = DelayedCall("allreduce_", "tensor", 0, "layers.7.mlp.linear_fc2")
GATHER = DelayedCall("_allgather_base_", "data", 0, "layers.3")


def delayed(call: DelayedCall, slope: float, number: int) -> CausalWindow:
    levels = levels_of(54)
    times = [400 + slope * level * 10 + 0.1 * (step * 7 % 5 - 2) for step, level in enumerate(levels)]
    return CausalWindow(
        window=number, first_step=500 * number, delayed=DelayedSet((call,), 20.0), levels=levels, step_ms=tuple(times)
    )


def job(folder: Path) -> Record:
    sink = JsonlSink(folder)
    sink.open(run_info(configuration={"fsdp_units": 24}))
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
    slack = "reduce-scatter of layers.0 is exposed for 6.00 ms, but with slack of at least"
    assert any(slack in note for note in notes)
    assert any("linear_fc2 is hidden for" in note for note in notes)
    table, fixes = [block for block in section.blocks if isinstance(block, Table)]
    assert [row[0].text for row in table.rows] == [
        "all-gather of layers.3", "all-reduce of layers.7.mlp.linear_fc2", "reduce-scatter of layers.0",
    ]  # fmt: skip
    assert [row[0].text for row in fixes.rows] == ["all-gather of layers.3"]
    told = " ".join([cell.text for cell in fixes.rows[0]])
    assert "prefetch one unit earlier" in told
    assert "Prefetch(2, 2)" in told
    assert "prefetch_2_2: " in told  # the arm that was tried, with its outcome
    (chart,) = [block for block in section.blocks if isinstance(block, Chart)]
    assert len(chart.data["series"]) == 3
    text = invoke("show", str(tmp_path), "--causal").output
    for words in ("removed,", "Prefetch(2, 2)", "What would fix it"):
        assert words in text


def test_json_has_gain_exposure_and_fix(tmp_path: Path) -> None:
    first, second, third = run_as_json(job(tmp_path))["causal"]
    assert first["fix"]["arm"] == "Prefetch(2, 2)"
    assert first["exposed_ms"] is None  # the profile does not name it
    assert first["removed_wins_at_most_ms"] > 0  # as long as others of its kind take alone
    assert second["removed_wins_at_most_ms"] > 0
    assert "hidden" in second["profile_differs"]
    assert third["exposed_ms"] == 6.0
