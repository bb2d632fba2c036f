"""The terminal as every command writes to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """A console; where the user has set ``NO_COLOR`` (https://no-color.org), one that writes no colour and no style.

    Args:
        stderr: whether it writes to stderr, as progress and remarks do, and not to stdout.
    """
    from rich.console import Console

    # A name that has :fire: in it stays as it is.
    return Console(stderr=stderr, color_system=None if os.environ.get("NO_COLOR") else "auto", emoji=False)
