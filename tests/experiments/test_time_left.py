"""How much time a tuning says is left, and that the bar says it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from overlap_callbacks.cli import run_progress
from overlap_callbacks.experiments.tune import tuner
from overlap_callbacks.experiments.tune.ranking import ranked
from overlap_callbacks.experiments.tune.results import Run
from overlap_callbacks.experiments.tune.tuner import Progress, Tuner
from tests.experiments.tune_results import results


def _progress_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *, failing: int | None = None) -> list[Progress]:
    """Three combinations, two runs each: the first takes 40 s, the others 10 s."""
    seconds = iter([40.0] + [10.0] * 5)

    def run_once(_: Any, __: Path, number: int, repeat: int, ___: Any) -> Run:
        failure = "exit code 1" if number == failing else ""
        return Run(combination=number, repeat=repeat, seconds=next(seconds), block_ms=(5.0,), failure=failure)

    monkeypatch.setattr(tuner, "run_once", run_once)
    said: list[Progress] = []
    file: Any = SimpleNamespace(write=lambda _: None)
    assert Tuner(results(folder, []), file, repeats=2, timeout_s=60, on_progress=said.append).run()
    return said


def test_the_time_left_is_that_of_a_usual_run_for_each_that_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = _progress_of(monkeypatch, tmp_path)
    assert [(one.num_done, one.num_planned) for one in said if one.current is not None] == [(n, 6) for n in range(6)]
    # Nothing is known before the first run; one slow run then does not count for all.
    assert [one.left_s for one in said if one.current is not None] == [None, 200, 100, 30, 20, 10]
    assert said[-1].left_s == 0


def test_a_combination_that_failed_takes_no_more_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = _progress_of(monkeypatch, tmp_path, failing=0)
    assert [one.num_planned for one in said][-1] == 5
    assert said[-1].left_s == 0


@pytest.mark.parametrize(
    ("left_s", "words"), [(None, ""), (0, "some 0 s left"), (99, "some 99 s left"), (240, "some 4 min left")]
)
def test_the_bar_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float | None, words: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(run_progress, "open_console", lambda stderr: console)
    with run_progress.shown_progress(results(tmp_path, [])) as show:
        show(Progress(2, 6, 1, left_s))
    assert words in screen.getvalue()
    assert ("left" in screen.getvalue()) == bool(words)
    assert "2/6" in screen.getvalue()


def test_a_run_that_has_ended_has_the_number_that_the_table_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks of 100 and 400 ms are 200 ms a step, and not their arithmetic mean."""
    screen = io.StringIO()
    monkeypatch.setattr(run_progress, "open_console", lambda stderr: Console(file=screen, width=100))
    found, run = results(tmp_path, []), Run(combination=1, repeat=0, seconds=9.0, block_ms=(100.0, 400.0), num_steps=20)
    with run_progress.shown_progress(found) as show:
        show(Progress(1, 6, None, 20.0, run))
    found.runs.append(run)
    row = next(row for row in ranked(found).rows if row.number == 1)
    assert row.step_ms is not None
    assert row.step_ms.value == pytest.approx(200.0)
    assert "bucket-mb=5: 200.0 ms a step (the run took 9 s)" in screen.getvalue()
