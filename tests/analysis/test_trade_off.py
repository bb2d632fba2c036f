"""The Pareto front of energy against time."""

from __future__ import annotations

import random

import pytest

from overlap_callbacks.analysis.trade_off import TradeOffPoint, trade_off
from overlap_callbacks.experiments.study.factors import trade_off_table

FREE = TradeOffPoint("no cap", 100.0, 70.0)
POINTS = [
    TradeOffPoint("200 W", 150.0, 45.0),
    FREE,
    TradeOffPoint("300 W", 110.0, 50.0),
    TradeOffPoint("250 W", 160.0, 46.0),  # slower than 200 W, and takes more
    TradeOffPoint("350 W", 110.0, 60.0),  # as fast as 300 W, and takes more
]


def front(points: list[TradeOffPoint]) -> list[str]:
    return [row.point.name for row in trade_off(points, FREE) if row.on_front]


def test_the_front_is_what_no_other_configuration_beats() -> None:
    assert front(POINTS) == ["no cap", "300 W", "200 W"]
    assert front([]) == []
    assert front([TradeOffPoint("a", 1.0, 1.0), TradeOffPoint("b", 1.0, 1.0)]) == ["a", "b"]


def test_the_front_agrees_with_its_definition_on_random_points() -> None:
    choose = random.Random(3)
    for _ in range(300):
        points = [
            TradeOffPoint(str(n), float(choose.randint(1, 6)), float(choose.randint(1, 6)))
            for n in range(choose.randint(1, 12))
        ]
        on_front = front(points)
        for point in points:
            no_slower = [other for other in points if other.step_ms <= point.step_ms]
            cheaper = [other for other in no_slower if other.energy_j < point.energy_j]
            faster = [
                other for other in no_slower if other.step_ms < point.step_ms and other.energy_j == point.energy_j
            ]
            assert (point.name in on_front) is not bool(cheaper or faster)


def test_each_configuration_is_compared_with_the_one_without_a_cap() -> None:
    rows = {row.point.name: row for row in trade_off(POINTS, FREE)}
    assert list(rows) == ["no cap", "300 W", "350 W", "200 W", "250 W"]
    assert rows["300 W"].slowdown == pytest.approx(0.1)
    assert rows["300 W"].saving == pytest.approx(2 / 7)
    assert rows["no cap"].power_w == pytest.approx(700.0)
    assert not rows["350 W"].on_front


def test_the_table_marks_the_front() -> None:
    rows = {
        row[1].text: [cell.text for cell in row] for row in trade_off_table([("job", trade_off(POINTS, FREE))]).rows
    }
    assert rows["300 W"][5:] == ["+10.0%", "+28.6%", "yes"]
    assert rows["350 W"][-1] == ""


def test_an_invalid_point_is_refused() -> None:
    with pytest.raises(ValueError, match="energy_j"):
        TradeOffPoint("x", 1.0, 0.0)
