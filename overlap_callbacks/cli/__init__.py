"""The command ``overlap``: one module per command, loaded when the command is used."""

from overlap_callbacks.cli._start import loading

with loading():
    from overlap_callbacks.cli.main import main

__all__ = ["main"]
