"""What the page says of power: the cause first, energy among the first figures, intervals that can be, the trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.power import TraceSegment
from tests.report.html.test_page import charts_of, made, text_of
from tests.report.runs import window


def test_energy_is_among_the_first_figures_with_its_interval_and_the_tables_digits(tmp_path: Path) -> None:
    text = text_of(made(tmp_path, *[window(i, power=True) for i in range(4)]))
    head = text[: text.index("What does it cost?")]
    (change, low, high, joules) = re.findall(
        r"Energy of a step with overlap (\+[\d.]+%) (\+[\d.]+%) to (\+[\d.]+%) ([\d.]+) J against [\d.]+ J sequential",
        head,
    )[0]
    assert float(low[1:-1]) < float(change[1:-1]) < float(high[1:-1])
    assert f"With overlap a step takes {change.removeprefix('+')} more energy (" in text
    table = text[text.index("Power Figure Overlapped") :]
    assert re.search(rf"energy of a step, all devices {joules} J .{{0,80}} {re.escape(change)} ", table)
    assert "Energy of a step with overlap" not in text_of(made(tmp_path / "none", window()))


def test_energy_of_one_window_has_an_interval_over_its_blocks_and_chance_is_called_so(tmp_path: Path) -> None:
    def powered(half_j: float) -> Any:
        found = window(power=True)
        assert found.power is not None
        modes = [
            msgspec.structs.replace(
                mode, energy_per_step_j_ci_low=(mode.energy_per_step_j or 0.0) - half_j,
                energy_per_step_j_ci_high=(mode.energy_per_step_j or 0.0) + half_j,
            )
            for mode in found.power.modes
        ]  # fmt: skip
        return msgspec.structs.replace(found, power=msgspec.structs.replace(found.power, modes=tuple(modes)))

    sure = text_of(made(tmp_path / "sure", powered(1.0)))
    assert re.search(r"more energy \([\d.]+ to [\d.]+\)\.", sure)
    # Of the highest power and of the mean one, no window has an interval, and these are few.
    assert "Highest power of a device with overlap: too few blocks for an interval." in sure
    chance = text_of(made(tmp_path / "chance", powered(40.0)))
    assert re.search(r"Energy of a step with overlap: inconclusive \(a difference of \d+% would show\)\.", chance)


def test_the_cause_of_the_slowdown_comes_first_and_in_words(tmp_path: Path) -> None:
    text = text_of(made(tmp_path / "capped", window(power=True), window(1, power=True)))
    section = text[text.index("What does it do to power?") :]
    assert section.startswith(
        "What does it do to power? Compute is slower because a power cap lowers the clock; most of it goes with the "
        "clock. The verdict is the same in 2 of 2 windows."
    )
    places = [section.index(words) for words in ("most of it goes", "mean power of a device", "Evidence")]
    assert places == sorted(places)
    found = window(power=True)
    unclear = msgspec.structs.replace(found, power_verdict=SlowdownCause("undecided", (), 0.14, 0.06, 0.07, 0.44))
    assert "What does it do to power? Cause unclear; part of it goes with the clock." in text_of(
        made(tmp_path / "unclear", unclear)
    )


def test_no_interval_of_power_reaches_where_it_cannot_be(tmp_path: Path) -> None:
    def powered(number: int, joules: tuple[float, float]) -> Any:
        found = window(number, power=True)
        assert found.power is not None
        modes = [
            msgspec.structs.replace(mode, energy_per_step_j=value, mean_avg_w=value, throttle_fraction=value / 600)
            for mode, value in zip(found.power.modes, joules, strict=True)
        ]
        return msgspec.structs.replace(found, power=msgspec.structs.replace(found.power, modes=tuple(modes)))

    text = text_of(
        made(tmp_path, *[powered(number, ((500.0, 300.0), (10.0, 60.0))[number % 2]) for number in range(4)])
    )
    assert "Energy of a step with overlap: inconclusive (even a difference of 100% would not show)" in text
    table = text[text.index("Power Figure Overlapped") : text.index("Verdict of window")]
    assert "\N{MINUS SIGN}" not in re.sub(r"\N{MINUS SIGN}[\d.,]+%", "", table)  # changes may be below zero
    assert "255 W (not resolved)" in table


def test_the_trace_marks_warm_up_and_profiled_blocks(tmp_path: Path) -> None:
    content = made(tmp_path / "new", window(power=True))
    (chart,) = [chart for chart in charts_of(content) if chart["draw"] == "power"]
    assert [segment[3:] for segment in chart["segments"][:2]] == [[False, False], [True, False]]
    assert chart["segments"][-1][3:] == [True, True]
    legends = re.findall(r'<i class="[^"]*"></i>([^<]+)</span>', content)
    assert {"warm-up", "profiled"} <= set(legends)
    old = window(power=True)  # of a version that did not tell
    assert old.power_trace is not None
    counted = tuple(TraceSegment(each.mode, each.start_ms, each.end_ms) for each in old.power_trace.segments)
    old = msgspec.structs.replace(old, power_trace=msgspec.structs.replace(old.power_trace, segments=counted))
    legends = re.findall(r'<i class="[^"]*"></i>([^<]+)</span>', made(tmp_path / "old", old))
    assert not {"warm-up", "profiled"} & set(legends)


def test_a_point_of_the_trace_is_an_average_only_where_the_sensor_averages(tmp_path: Path) -> None:
    momentary = window(power=True)
    assert momentary.power is not None
    assert momentary.power.source is not None
    assert momentary.power.source.power_kind == "instantaneous"
    average = msgspec.structs.replace(
        momentary, power=msgspec.structs.replace(
            momentary.power, source=msgspec.structs.replace(momentary.power.source, power_kind="average")
        ),
    )  # fmt: skip
    text = text_of(made(tmp_path / "momentary", momentary))
    assert "A point is of some time in the 20 ms before it." in text
    assert "is an average over" not in text
    assert "Each point is an average over the 20 ms before it." in text_of(made(tmp_path / "average", average))
