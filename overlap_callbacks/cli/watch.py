"""``overlap watch``: shows a run in the terminal while it is under way."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from pathlib import Path

import click

from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.status_words import time_in_words
from overlap_callbacks.cli._options import Amount
from overlap_callbacks.cli._output import newest_run, open_console, refusing

# A lower terminal has no room for the table of parts.
_LINES = 40
# A long record takes a while to read: at most this part of the time goes into it.
_READING_PART = 0.1


@click.command("watch")
@click.option("--every", type=Amount(min=0.1), default=2.0, show_default=True, help="Seconds between looks.")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path, every: float) -> None:
    """Show the results of RUN, a run folder or its overlap.jsonl, as they come, until the job ends or Ctrl-C.

    Where stdout is no terminal, the results are printed anew whenever there are more.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from overlap_callbacks.report import record
    from overlap_callbacks.report.terminal import SanitizedRenderable, ShortScreen, drawn
    from overlap_callbacks.report.views.elements import Document
    from overlap_callbacks.report.views.short import short_of
    from overlap_callbacks.report.views.step_parts import step_parts

    run = newest_run(run)
    file = run / FILE_NAME if run.is_dir() else run
    console, is_running, took_s = open_console(), True, 0.0
    is_high = not console.is_terminal or console.height >= _LINES
    seen: tuple[int, int] | None = (-1, 0)
    with contextlib.ExitStack() as screen:
        live = screen.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while is_running:
            now = _state_of(file)
            is_new, seen = now != seen, now
            if is_new:
                began_s = time.monotonic()
                with refusing(record.RecordError):
                    found = record.read(file, details=False)
                took_s, is_running = time.monotonic() - began_s, found.running
                short = ShortScreen(short_of(found), f"overlap show {shlex.quote(str(file.parent))} --all")
                parts = Document("", (), "", compared=tuple(step_parts(found)))
                results = [short, drawn(parts, everything=is_high), *([Text()] if is_high else [])]
            shown = SanitizedRenderable(Group(*results, Text(_last_line(file, is_running=is_running), "dim")))
            if live is not None:
                live.update(shown, refresh=True)
            elif is_new:
                console.print(shown)
            if is_running:
                time.sleep(max(every, took_s / _READING_PART))


def _state_of(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(file)
        return found.st_size, found.st_mtime_ns
    return None


def _last_line(file: Path, *, is_running: bool) -> str:
    if not is_running:
        return "The job has ended."
    with contextlib.suppress(OSError):
        ago_s = max(0.0, time.time() - file.stat().st_mtime)
        return f"The job is running; last line of the record {time_in_words(ago_s)} ago. Ctrl-C ends this."
    return "The record is gone."
