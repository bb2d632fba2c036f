"""The command ``overlap``: one file for each of its commands."""

from overlap_callbacks.cli.main import main

__all__ = ["main"]
