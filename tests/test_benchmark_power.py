"""``benchmarks/power_truth.py``, ``power_hours.py``: watts and joules of scripted sensors are the truth, or missing."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from benchmarks import power_truth as bench
from tests.docs.conftest import ROOT

WINDOWS = 12


def run(device: str, shape: str, sensor: str, counter: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = bench.run(bench.Row(device, shape, getattr(bench, sensor), counter, **options), WINDOWS)
    return found


@pytest.mark.parametrize(
    ("options", "method", "largest_error"),
    [
        # The energy of a step is that of all steps, not of the slow ones that got a reading.
        ({"sensor": "LATE", "counter": "none", "noise": 0.3}, "samples", 0.01),
        ({"sensor": "AVERAGE_25", "counter": "good", "block_s": 2.0, "noise": 0.15}, "counter", 0.03),
        ({"sensor": "AVERAGE_25", "counter": "wraps", "block_s": 2.0}, "counter", 0.03),
        ({"sensor": "AVERAGE_25", "counter": "frozen"}, "samples", 0.01),
        ({"sensor": "AVERAGE_25", "counter": "none", "fails_s": 1.0}, "samples", 0.01),
    ],
)
def test_a_square_wave_of_the_modes_has_its_watts_and_joules(options, method, largest_error) -> None:
    found = run("NVML, A100 and H100", "modes", **options)
    assert found["figures"] > 0.5
    assert method in found["methods"]
    assert found["largest_error"] < largest_error
    assert found["within"] > 0.9


def test_a_1_s_average_gives_nothing_for_shorter_blocks_whatever_precedes_them() -> None:
    for warmup in (0, 1):
        found = run("NVML, 1 s average", "modes", "AVERAGE_1", "none", warmup=warmup)
        assert found["figures"] == 0
        assert "too short" in found["reason"]


@pytest.mark.parametrize(("counter", "figures"), [("none", 0.0), ("good", 1.0)])
def test_power_that_swings_with_the_step_is_measured_by_the_counter_only(counter, figures) -> None:
    found = run("NVML, A100 and H100", "sawtooth", "AVERAGE_25", counter, step_s=0.2, noise=0.0, block_s=3.0)
    assert found["figures"] == pytest.approx(figures, abs=0.2)
    assert found["within"] > 0.9
    assert ("swings" in found["reason"]) == (counter == "none")


def test_a_sensor_in_step_with_training_is_not_believed() -> None:
    found = run("NVML, A100 and H100", "sawtooth", "AVERAGE_25", "none", step_s=0.1, noise=0.0, block_s=2.0)
    assert found["within"] == 1


def test_a_counter_that_disagrees_is_not_believed_nor_are_the_readings() -> None:
    found = run("NVML, A100 and H100", "modes", "AVERAGE_25", "30 % high", block_s=2.0)
    assert found["figures"] == 0
    assert "which of the two is wrong is not known" in found["reason"]


def test_the_counters_energy_is_used_where_three_reads_in_ten_fail() -> None:
    found = run("NVML, A100 and H100", "modes", "AVERAGE_25", "good", block_s=2.0, fails_share=0.3)
    assert (found["methods"], found["figures"], found["within"]) == (["counter"], 1.0, 1.0)


def test_in_the_table_too_whatever_the_sensor_and_no_faulty_counter_gives_joules() -> None:
    table = json.loads((ROOT / "benchmarks/results/power-truth.json").read_text())["rows"]
    failing = [row for row in table if "30% of reads fail" in row["row"] or "30% without power" in row["row"]]
    good = [row for row in failing if "counter good" in row["row"] and ": modes" in row["row"]]
    figures = {row["row"]: row["figures"] for row in good if "RAPL" not in row["row"]}
    assert len(figures) == 5
    assert all(share >= 0.99 for share in figures.values()), figures
    faulty = [row for row in failing if "30 % high" in row["row"] or "frozen" in row["row"]]
    assert len(faulty) == 4
    assert all(row["within"] == 1 and "counter" not in row["methods"] for row in faulty)


@pytest.mark.parametrize("counter", ["30 % high", "frozen"])
def test_a_faulty_counter_is_noticed_by_the_readings_that_are_left(counter) -> None:
    found = run("NVML, A100 and H100", "modes", "AVERAGE_25", counter, block_s=2.0, fails_share=0.3)
    assert found["within"] == 1
    assert "counter" not in found["methods"]


@pytest.mark.parametrize(("shape", "counter", "told"), [("modes", "none", 1.0), ("sawtooth", "none", 0.0)])
def test_an_hour_has_long_blocks_and_reports_its_sensors_limits(
    monkeypatch: pytest.MonkeyPatch, shape: str, counter: str, told: float
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hours = importlib.import_module("power_hours")
    row = hours.power_truth.Row("NVML, other chips", shape, hours.power_truth.AVERAGE_100, counter, 0.2, 0.05)
    found = hours.run_hours(row, 2)
    assert found["long_blocks"] >= 1
    assert (found["told"], found["right"], bool(found["reason"])) == (told, told, not told)
