from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report.record import read
from overlap_callbacks.report.views.scaling import AxisError, compared, scaling_data
from tests.report.runs import window, write
from tests.report.scaling_runs import write_sized

SETTINGS = {"bucket_mb": 25}


def records(*folders: Path) -> tuple[list[str], list[Any]]:
    return [folder.name for folder in folders], [read(folder) for folder in folders]


@pytest.fixture
def sized(tmp_path: Path) -> tuple[list[str], list[Any]]:
    """2, 4 and 8 ranks whose steps take 400, 440 and 500 ms, with as many tokens for each rank."""
    sizes = ((8, 500.0), (2, 400.0), (4, 440.0))
    return records(*[write_sized(tmp_path / f"r{ranks}", ranks, ms, settings=SETTINGS) for ranks, ms in sizes])


def test_the_world_size_is_the_axis_where_it_varies(sized: tuple[list[str], list[Any]]) -> None:
    found = compared(*sized, None)
    assert found is not None
    assert (found.axis, found.work, found.numeric, found.without) == ("world_size", "tokens", True, ())
    assert [(run.name, run.value, run.ranks) for run in found.runs] == [("r2", 2, 2), ("r4", 4, 4), ("r8", 8, 8)]


def test_figures_of_each_run_by_hand(sized: tuple[list[str], list[Any]]) -> None:
    found = compared(*sized, None)
    assert found is not None
    small, _, large = found.runs
    # 2 * 4,096 tokens in 400 ms: 20,480 a second. 8 * 4,096 in 500 ms: 65,536.
    assert small.work_per_s is not None
    assert small.work_per_s.value == pytest.approx(20_480, rel=0.01)
    assert small.work_per_s.ci_low is not None
    assert small.work_per_s.ci_high is not None
    assert small.work_per_s.ci_low < small.work_per_s.value < small.work_per_s.ci_high
    # 3.2 times as many on 4 times the ranks: 80 %.
    rows = scaling_data(found)["runs"]
    assert rows[-1]["scaling_factor"] == pytest.approx(3.2, rel=0.01)
    assert rows[-1]["scaling_efficiency"] == pytest.approx(0.8, rel=0.01)
    # A ring of 8: 2 * 7/8 * 80 MB in 10 ms are 14 GB/s; of 2: 2 * 1/2 * 80 MB, 8 GB/s.
    assert large.bandwidths == {"data": pytest.approx(14.0)}
    assert small.bandwidths == {"data": pytest.approx(8.0)}
    # Exposed is communication less what is hidden: 132 - 96 ms of a step of 370.5 + 36 + 9 under the profiler.
    assert small.exposed == pytest.approx(36 / 415.5, rel=0.02)
    assert small.comm_ratio is not None


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("world_size", 8), ("bucket_mb", 25), ("tokens_per_step", 32_768), ("data", 8), ("backend", "nccl"),
        ("device", "NVIDIA H200"), ("torch", "2.13.0+cu130"), ("hosts", 1),
    ],
)  # fmt: skip
def test_any_fact_of_a_record_can_be_an_axis(sized: tuple[list[str], list[Any]], axis: str, value: Any) -> None:
    found = compared(*sized, axis)
    assert found is not None
    assert {run.name: run.value for run in found.runs}["r8"] == value


def test_words_and_variables_can_be_an_axis(tmp_path: Path) -> None:
    names, found = records(
        write_sized(tmp_path / "a", 2, precision="fp32", model_preset="gpt2"),
        write_sized(tmp_path / "b", 2, precision="bf16", model_preset="gpt2"),
    )
    by_precision = compared(names, found, "precision")
    assert by_precision is not None
    assert [(run.name, run.value) for run in by_precision.runs] == [("b", "bf16"), ("a", "fp32")]
    assert not by_precision.numeric
    by_model = compared(names, found, "model")
    assert by_model is not None
    assert {run.value for run in by_model.runs} == {"gpt2"}


def test_runs_that_do_not_tell_are_named(tmp_path: Path) -> None:
    names, found = records(
        write_sized(tmp_path / "a", 2, settings=SETTINGS),
        write_sized(tmp_path / "b", 2),
        write(tmp_path / "c", window()),
    )
    against = compared(names, found, "bucket_mb")
    assert against is not None
    assert ([run.name for run in against.runs], against.without) == (["a"], ("b", "c"))


def test_an_axis_that_no_run_tells_is_refused_with_those_that_there_are(sized: tuple[list[str], list[Any]]) -> None:
    with pytest.raises(AxisError, match=r"^axis must be .*world_size, .*bucket_mb.*; got 'colour'$"):
        compared(*sized, "colour")


def test_without_an_axis_runs_of_one_size_are_not_shown_against_it(tmp_path: Path) -> None:
    names, found = records(write_sized(tmp_path / "a", 2), write_sized(tmp_path / "b", 2))
    assert compared(names, found, None) is None


def test_old_records_have_step_times_and_no_scaling_factor(tmp_path: Path) -> None:
    names, found = records(write(tmp_path / "old", window()), write_sized(tmp_path / "new", 4))
    against = compared(names, found, None)
    assert against is not None
    assert against.work == "tokens"
    assert all("scaling_factor" not in row for row in scaling_data(against)["runs"])
