"""Names of a record as cells and lines of the terminal."""

from __future__ import annotations

from rich.text import Text

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.formatting import shortened


def one_line(text: str, max_length: int = 300) -> str:
    """Text of a record as a line of its own: no name may look like a line of ours, or fill the terminal."""
    return shortened(safe_text.clean(text), max_length)


def name_cell(name: str) -> Text:
    """A name as it is, without markup; it is cut where the table is too narrow."""
    return Text(one_line(name), no_wrap=True, overflow="ellipsis")
