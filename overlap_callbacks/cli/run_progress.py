"""The progress of runs: a bar with the time left on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from overlap_callbacks.analysis.formatting import PLAIN, one_line
from overlap_callbacks.cli._output import open_console
from overlap_callbacks.experiments.study import runner
from overlap_callbacks.experiments.study.words import in_words as configuration_in_words
from overlap_callbacks.experiments.study.words import outcome_in_words
from overlap_callbacks.experiments.tune import tuner
from overlap_callbacks.experiments.tune.combinations import in_words
from overlap_callbacks.experiments.tune.results import Results, Run

_MAX_NAME = 80


@dataclass(frozen=True)
class _State:
    """What is shown.

    Attributes:
        num_done, num_planned: runs.
        current: name of the run that is under way; empty between two.
        left_s: expected time for the runs that are left; None where not known.
        ended: what came of the run that ended just now; empty where none did.
    """

    num_done: int
    num_planned: int
    current: str
    left_s: float | None
    ended: str


@contextlib.contextmanager
def shown_progress(results: Results) -> Iterator[Callable[[tuner.Progress], None]]:
    """A function that shows the progress of a tuning it is called with.

    Args:
        results: which combinations there are.
    """
    names = [one_line(in_words(combination), _MAX_NAME) for combination in results.tuning.combinations]
    with _shown() as show:

        def show_tuning(progress: tuner.Progress) -> None:
            ended = progress.current is None and progress.last is not None
            show(
                _State(
                    progress.num_done,
                    progress.num_planned,
                    "" if progress.current is None else names[progress.current],
                    progress.left_s,
                    _outcome(names, progress.last) if ended and progress.last else "",
                )
            )

        yield show_tuning


@contextlib.contextmanager
def shown_study() -> Iterator[Callable[[runner.Progress], None]]:
    """A function that shows the progress of a study it is called with."""
    with _shown() as show:

        def show_study(progress: runner.Progress) -> None:
            current, last = progress.current, progress.last
            show(
                _State(
                    progress.num_done,
                    progress.num_planned,
                    "" if current is None else one_line(configuration_in_words(current), _MAX_NAME),
                    progress.left_s,
                    one_line(outcome_in_words(last), 500) if current is None and last is not None else "",
                )
            )

        yield show_study


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[_State], None]]:
    console = open_console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=None, left="")

        def show(state: _State) -> None:
            if state.ended:
                words = f"{state.num_done} of {state.num_planned}: {state.ended}"
                bar.console.print(escape(words), highlight=False, soft_wrap=True)
            bar.update(
                task,
                description=escape(state.current),
                completed=state.num_done,
                total=state.num_planned,
                left=_left(state.left_s),
            )

        yield show


def _outcome(names: list[str], run: Run) -> str:
    if run.failure:
        return f"{names[run.combination]} failed: {one_line(run.failure)}"
    step = "no step" if run.step_ms is None else f"{PLAIN.quantity(run.step_ms, 'ms')} a step"
    return f"{names[run.combination]}: {step} (the run took {run.seconds:.0f} s)"


def _left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f"some {left_s:.0f} s left" if left_s < 100 else f"some {left_s / 60:.0f} min left"
