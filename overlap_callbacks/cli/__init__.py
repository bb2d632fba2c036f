"""The command ``overlap``: a group that loads a command's module when the command is used.

Starts and ends quickly: what a command loads is never scanned by the garbage collector.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Load modules without garbage collection: nothing that they create is garbage, and scanning takes long.

    Three hundred modules create some thirty thousand objects. The collector would scan the new ones some sixty times
    while they load, and all of them when the process ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # otherwise the caller has frozen objects, which must stay frozen
            gc.freeze()
            gc.unfreeze()  # moves them into the oldest generation, which is scanned only when there is much new garbage
        if was_enabled:
            gc.enable()


def end_quickly() -> None:
    """Let the process end without a final garbage collection: its memory is freed as a whole.

    Only for commands after which no object in a reference cycle needs its finalizer.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


with loading():
    import click

    from overlap_callbacks._version import __version__

__all__ = ["main"]

# The module of each command in this package, and its function.
_COMMANDS = {
    "analyze": ("traces", "analyze"),
    "bench": ("bench", "command"),
    "check": ("check", "command"),
    "compare": ("traces", "compare"),
    "demo": ("demo.command", "command"),
    "predict": ("predict", "command"),
    "report": ("report", "report"),
    "show": ("report", "show"),
    "study": ("study", "command"),
    "trace": ("report", "trace"),
    "traffic": ("traffic", "command"),
    "tune": ("tune", "command"),
    "workspace": ("workspace", "command"),
}


class _LazyGroup(click.Group):
    """A group whose commands are imported on first use: ``overlap show`` needs nothing that the demo needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, function = _COMMANDS[cmd_name]
        with loading():
            command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """What overlapping computation with communication costs and saves."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="replace")
