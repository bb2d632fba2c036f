"""The progress of runs: a bar with the time left on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from overlap_callbacks.experiments.tune import tuner
from overlap_callbacks.experiments.tune.combinations import in_words
from overlap_callbacks.experiments.tune.results import Results, Run
from overlap_callbacks.report.terminal_cells import one_line


@contextlib.contextmanager
def shown_progress(results: Results) -> Iterator[Callable[[tuner.Progress], None]]:
    """A function that shows the progress it is called with.

    Args:
        results: which combinations there are.
    """
    names = [one_line(in_words(combination), 80) for combination in results.tuning.combinations]
    console = Console(stderr=True)
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

        def show(progress: tuner.Progress) -> None:
            if progress.current is None and progress.last is not None:
                words = f"{progress.num_done} of {progress.num_planned}: {_outcome(names, progress.last)}"
                bar.console.print(escape(words), highlight=False, soft_wrap=True)
            bar.update(
                task,
                description=escape("" if progress.current is None else names[progress.current]),
                completed=progress.num_done,
                total=progress.num_planned,
                left=_left(progress.left_s),
            )

        yield show


def _outcome(names: list[str], run: Run) -> str:
    if run.failure:
        return f"{names[run.combination]} failed: {one_line(run.failure)}"
    mean_ms = sum(run.block_ms) / len(run.block_ms)
    return f"{names[run.combination]}: {mean_ms:.2f} ms a step (the run took {run.seconds:.0f} s)"


def _left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f"some {left_s:.0f} s left" if left_s < 100 else f"some {left_s / 60:.0f} min left"
