"""Arms of one family: the curve over their settings, and energy against time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.arms import arm_summaries, trade_offs
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.cli import main
from overlap_callbacks.report import page
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.views.arms import arms
from overlap_callbacks.report.views.elements import Chart, Table
from overlap_callbacks.sinks import JsonlSink
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info

STEP_MS, ENERGY_J = 400.0, 500.0
# The power cap in watts: by how much steps are longer with it, and what part of their energy they take.
CAPS = {600.0: (1.01, 0.93), 500.0: (1.05, 0.85), 400.0: (1.16, 0.88)}
# Modules that are prefetched, and by how much steps are shorter.
DEPTHS = {0: -0.021, 1: 0.012, 2: 0.034, 4: 0.029}


def estimate(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half, 32, 16, standard_error=half / 2, degrees_of_freedom=14.0)


def arm_of(number: int, arm: ComparedArm, longer: float, energy: float | None = None, drift: float = 1.0) -> ArmReport:
    """A window whose steps are longer by a factor with the arm, and take this part of the energy."""
    made = arm_window(number, arm.name, power=energy is not None)
    own_ms, chance = STEP_MS * drift, 0.001 * (number % 3 - 1)
    figures: dict[str, Any] = {
        "arm": arm,
        "speedup": estimate(1 / longer - 1 + chance, 0.01),
        "step_ms": estimate(own_ms * longer * (1 - chance), 1.0),
        "configured_step_ms": estimate(own_ms, 1.0),
    }
    if energy is not None:
        assert made.power is not None
        of_mode = {Mode.OVERLAPPED: ENERGY_J * drift, Mode.SEQUENTIAL: ENERGY_J * drift * energy}
        modes = [
            msgspec.structs.replace(mode, energy_per_step_j=of_mode[mode.mode], mean_avg_w=of_mode[mode.mode] / 0.8)
            for mode in made.power.modes
        ]
        figures["power"] = msgspec.structs.replace(made.power, modes=tuple(modes))
    return msgspec.structs.replace(made, **figures)


def record_of(folder: Path) -> Record:
    sink = JsonlSink(folder)
    sink.open(run_info())
    number = 0
    for _ in range(3):
        for depth, gain in DEPTHS.items():
            arm = ComparedArm(f"prefetch_{depth}_{depth}", True, family="prefetch", setting=float(depth))
            sink.log_arm(arm_of(number := number + 1, arm, 1 / (1 + gain)))
        for place, (power_w, effect) in enumerate(CAPS.items()):
            arm = ComparedArm(f"power_cap_{power_w:g}", True, family="power_cap", setting=power_w)
            sink.log_arm(arm_of(number := number + 1, arm, *effect, drift=1 + 0.2 * place))
        sink.log_arm(arm_of(number := number + 1, ComparedArm("fused", True), 0.98, 0.99))
    sink.close()
    return read(folder)


def test_arms_are_read_back_with_family_and_setting(tmp_path: Path) -> None:
    written = {report.arm.name: (report.arm.family, report.arm.setting) for report in record_of(tmp_path).arms}
    assert written["prefetch_4_4"] == ("prefetch", 4)
    assert written["power_cap_500"] == ("power_cap", 500.0)
    assert written["fused"] == ("", None)


def test_a_family_is_drawn_as_a_curve_over_its_settings(tmp_path: Path) -> None:
    (section,) = arms(record_of(tmp_path))
    curves = {
        block.data["x_label"]: block for block in section.blocks if isinstance(block, Chart) and block.draw == "against"
    }
    assert set(curves) == {"prefetch", "power_cap"}
    ((line,),) = [curves["prefetch"].data["series"]]
    assert [point[0] for point in line["points"]] == [0, 1, 2, 4]
    for at, _, value, low, high in line["points"]:
        assert value == pytest.approx(DEPTHS[at], abs=0.003)
        assert low < value < high


def test_a_terminal_has_the_settings_of_a_family_in_their_order(tmp_path: Path) -> None:
    record_of(tmp_path)
    shown = " ".join(CliRunner().invoke(main, ["show", str(tmp_path), "--all"]).output.split())
    assert "Speed-up against prefetch: -2.1% at 0, +1.2% at 1, +3.4% at 2, +2.9% at 4" in shown
    assert "Speed-up against power_cap: -13.8% at 400, -4.8% at 500, -1.0% at 600" in shown


def test_energy_is_shown_against_time_with_the_front(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    rows = {row.point.name: row for row in trade_offs(arm_summaries(record.summary, record.arms))}
    assert set(rows) == {"as configured", "fused", *(f"power_cap_{power_w:g}" for power_w in CAPS)}
    for power_w, (longer, energy) in CAPS.items():  # each against its own windows, whatever drifts between them
        assert rows[f"power_cap_{power_w:g}"].slowdown == pytest.approx(longer - 1, abs=2e-3)
        assert rows[f"power_cap_{power_w:g}"].saving == pytest.approx(1 - energy, abs=2e-3)
    assert {name for name, row in rows.items() if row.on_front} == {"fused", "power_cap_600", "power_cap_500"}
    (section,) = arms(record)
    (table,) = [block for block in section.blocks if isinstance(block, Table) and block.title == "Energy against time"]
    assert [cells[-1].text for cells in table.rows] == ["yes", "", "yes", "yes", ""]
    shown = CliRunner().invoke(main, ["show", str(tmp_path), "--all"]).output
    assert "Energy against time" in shown
    found = {
        arm["arm"]: arm
        for arm in json.loads(CliRunner().invoke(main, ["show", str(tmp_path), "--json"]).stdout)["arms"]
    }
    assert (found["power_cap_500"]["family"], found["power_cap_500"]["setting"]) == ("power_cap", 500)
    assert found["power_cap_500"]["on_front"]
    assert not found["power_cap_400"]["on_front"]
    assert found["power_cap_500"]["energy_saving"] == pytest.approx(0.15, abs=2e-3)
    assert found["prefetch_2_2"]["energy_saving"] is None


def test_the_page_draws_losses_below_zero(tmp_path: Path, opened: Any) -> None:
    (tmp_path / "page.html").write_text(page([record_of(tmp_path / "run")]))
    shown = opened(tmp_path / "page.html")
    (chart,) = [
        svg
        for svg in shown.query_selector_all("svg")
        if "Speed-up against prefetch" in (svg.get_attribute("aria-label") or "")
    ]
    frame = chart.bounding_box()
    dots = [dot.bounding_box() for dot in chart.query_selector_all("circle")]
    assert len(dots) == len(DEPTHS)
    for dot in dots:
        assert frame["y"] < dot["y"] < frame["y"] + frame["height"] - 30
