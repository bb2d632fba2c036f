from __future__ import annotations

import io

from rich.console import Console

from overlap_callbacks.analysis.results.kernel_times import UNEXPLAINED
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import SmLoss
from overlap_callbacks.report.terminal import drawn_table
from overlap_callbacks.report.views.sections import cause_table
from tests.samples import aggregate_windows, window


def report(waves_ms: float = 1.2, **changes: object) -> OverlapReport:
    sample = window(sm_loss=SmLoss(132, 16.0, 30.0, 24.0, 0.6, waves_ms), **changes)
    return aggregate_windows([sample], world_size=1, every_n_steps=500)


def printed(found: OverlapReport) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    table = cause_table([found])
    assert table is not None
    for part in drawn_table(table):
        console.print(part)
    return console.export_text()


def test_each_cause_has_a_row_with_its_share_and_what_it_rests_on() -> None:
    found = report()
    assert found.slowdown_shares is not None
    unexplained = found.slowdown_shares.of(UNEXPLAINED)
    text = printed(found)
    for words in (
        "+9.9%",
        "SMs taken",
        "+1.0%",
        "waves",
        "+2.0%",
        "unexplained",
        f"{unexplained:+.1%}",
        "modelled from the grids of 80% of the compute during communication, which holds 16 of 132 SMs",
    ):
        assert words in text


def test_what_was_scaled_down_is_said_below() -> None:
    assert "more than the 9.9% that remain" in " ".join(printed(report(waves_ms=30.0)).split())


def test_without_causes_there_is_no_table() -> None:
    assert cause_table([aggregate_windows([window()], world_size=1, every_n_steps=500)]) is None
    assert cause_table([report(doubts=("nothing is sure",))]) is None
