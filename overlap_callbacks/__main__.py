"""``python -m overlap_callbacks`` is the command ``overlap``."""

from overlap_callbacks.cli import run

run()
