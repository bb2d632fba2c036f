"""How much time a sweep says is left, and that the bar says it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from overlap_callbacks.cli import _output
from overlap_callbacks.cli.experiment import shown_progress
from overlap_callbacks.experiments import sweep
from overlap_callbacks.experiments.sweep import Point, Progress
from overlap_callbacks.experiments.tune.ranking import ranked
from overlap_callbacks.experiments.tune.sweep import Run
from tests.experiments.tune_results import results


def _progress_of(folder: Path, *, failing: int | None = None) -> list[Progress]:
    """Three combinations, two runs each: the first takes 40 s, the others 10 s."""
    seconds = iter([40.0] + [10.0] * 5)

    def run_once(point: Point, *_: Any) -> Run:
        failure = "exit code 1" if point.setting == failing else ""
        return Run(
            combination=point.setting, repeat=point.repeat, seconds=next(seconds), block_ms=(5.0,), failure=failure
        )

    told: list[Progress] = []
    tune = results(folder, [])
    tune.num_runs = 2
    assert sweep.run(tune, run_once, None, timeout_s=60, on_progress=told.append)
    return told


def test_the_time_left_is_that_of_a_usual_run_for_each_that_is_left(tmp_path: Path) -> None:
    told = [one for one in _progress_of(tmp_path) if one.current]
    assert [(one.num_done, one.num_planned) for one in told] == [(n, 6) for n in range(6)]
    assert [one.current for one in told] == [f"bucket-mb={size}" for size in (25, 5, 1, 1, 5, 25)]
    # Nothing is known before the first run; one slow run then does not count for all.
    assert [one.left_s for one in told] == [None, 200, 100, 30, 20, 10]
    assert _progress_of(tmp_path)[-1].left_s == 0


def test_a_combination_that_failed_takes_no_more_time(tmp_path: Path) -> None:
    told = _progress_of(tmp_path, failing=0)
    assert [one.num_planned for one in told][-1] == 5
    assert told[-1].left_s == 0


@pytest.mark.parametrize(
    ("left_s", "words"), [(None, ""), (0, "some 0 s left"), (99, "some 99 s left"), (240, "some 4 min left")]
)
def test_the_bar_says_it(monkeypatch: pytest.MonkeyPatch, left_s: float | None, words: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(_output, "open_console", lambda stderr: console)
    with shown_progress() as show:
        show(Progress(2, 6, "bucket-mb=5", left_s))
    assert words in screen.getvalue()
    assert ("left" in screen.getvalue()) == bool(words)
    assert "2/6" in screen.getvalue()
    assert "bucket-mb=5" in screen.getvalue()


def test_a_run_that_has_ended_has_the_number_that_the_table_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks of 100 and 400 ms are 200 ms a step, and not their arithmetic mean."""
    screen = io.StringIO()
    monkeypatch.setattr(_output, "open_console", lambda stderr: Console(file=screen, width=100))
    tune, run = results(tmp_path, []), Run(combination=1, repeat=0, seconds=9.0, block_ms=(100.0, 400.0), num_steps=20)
    with shown_progress() as show:
        show(Progress(1, 6, left_s=20.0, ended=tune.outcome(run)))
    tune.lines.append(run)
    row = next(row for row in ranked(tune).rows if row.number == 1)
    assert row.step_ms is not None
    assert row.step_ms.value == pytest.approx(200.0)
    assert "1 of 6: bucket-mb=5: 200.0 ms a step (the run took 9 s)" in screen.getvalue()
