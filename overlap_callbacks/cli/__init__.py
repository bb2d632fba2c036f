"""The command ``overlap``: its group, which loads the module of a command when the command is used.

A quick start and a quick end: what a command loads is never looked through for garbage.
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
    """Load modules in this context without looking for garbage: none of what they make is, and looking takes long.

    Three hundred modules make some thirty thousand objects. The collector would look at the new ones some sixty times
    while they load, and at all of them when the process ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody has put objects aside, which stay there
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, unseen: they are looked at again when there is much new garbage
        if was_enabled:
            gc.enable()


def end_quickly() -> None:
    """Let the process end without a last look for garbage among all objects: its memory is freed as a whole.

    Only for commands after which nothing in a cycle of references waits for its finalizer.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


with loading():
    import click

    from overlap_callbacks._version import __version__

__all__ = ["main"]

# The module of each command, in this package, and the function in it.
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
