"""The command group ``overlap``, which loads each command's module when the command is needed."""

from __future__ import annotations

import importlib
import io
import sys

import click

from overlap_callbacks._version import __version__
from overlap_callbacks.cli._start import loading

# Each command's module. The function in it is called ``command``.
_MODULES = {
    "analyze": "overlap_callbacks.cli.analyze",
    "bench": "overlap_callbacks.cli.bench",
    "check": "overlap_callbacks.cli.check",
    "compare": "overlap_callbacks.cli.compare",
    "demo": "overlap_callbacks.cli.demo.command",
    "predict": "overlap_callbacks.cli.predict",
    "report": "overlap_callbacks.cli.report",
    "show": "overlap_callbacks.cli.show",
    "study": "overlap_callbacks.cli.study",
    "trace": "overlap_callbacks.cli.trace",
    "traffic": "overlap_callbacks.cli.traffic",
    "tune": "overlap_callbacks.cli.tune",
    "workspace": "overlap_callbacks.cli.workspace",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported on first use: ``overlap show`` needs nothing that the demo needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        with loading():
            command: click.Command = importlib.import_module(_MODULES[cmd_name]).command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """What overlapping computation with communication costs and saves."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="replace")
