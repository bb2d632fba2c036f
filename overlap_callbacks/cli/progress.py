"""A progress bar on a terminal: it appears once the work has taken two seconds, and is gone when the work is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

PATIENCE_S = 2.0


@contextlib.contextmanager
def progress_of(what: str, console: Console, patience_s: float = PATIENCE_S) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the amount that is done and the total amount.

    Args:
        what: what is being done, for people.
        console: where to show the bar. If it is not a terminal, nothing is shown.
        patience_s: how long the work may take before the bar is shown.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=None)
    began = time.monotonic()
    shown = False

    def update(done: int, total: int) -> None:
        nonlocal shown
        bar.update(task, completed=done, total=total)
        if not shown and console.is_terminal and time.monotonic() - began >= patience_s:
            shown = True
            bar.start()

    try:
        yield update
    finally:
        if shown:
            bar.stop()
