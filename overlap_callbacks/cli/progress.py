"""A progress bar on a terminal: it appears once the work has taken two seconds, and is gone when the work is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PATIENCE_S = 2.0


@contextlib.contextmanager
def progress_of(what: str, console: Console, patience_s: float = PATIENCE_S) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the amount that is done and the total amount.

    Args:
        what: what is being done, for people.
        console: where to show the bar. If it is not a terminal, nothing is shown.
        patience_s: how long the work may take before the bar is shown.
    """
    began = time.monotonic()
    shown: tuple[Progress, TaskID] | None = None

    def update(done: int, total: int) -> None:
        nonlocal shown
        if shown is None and console.is_terminal and time.monotonic() - began >= patience_s:
            shown = _bar(what, console)
            shown[0].start()
        if shown is not None:
            bar, task = shown
            bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if shown is not None:
            shown[0].stop()


def _bar(what: str, console: Console) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    return bar, bar.add_task(what, total=None)
