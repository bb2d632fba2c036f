"""SVG elements for charts: a few bars and lines need no plotting library."""

from __future__ import annotations

import html
from collections.abc import Iterable


def mark(tag: str, css: str = "", text: str = "", /, *, title: str = "", **attributes: float | str) -> str:
    """An element.

    Args:
        tag: its name.
        css: CSS class.
        text: text content.
        title: shown on hovering.
        **attributes: others; ``_`` in a name means ``-``. Numbers have at most two decimals.
    """
    given = {"class": css, **attributes} if css else attributes
    written = "".join([f' {name.replace("_", "-")}="{_shown(value)}"' for name, value in given.items()])
    content = (mark("title", "", title) if title else "") + html.escape(text)
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _shown(value: float | str) -> str:
    return html.escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def picture(
    width: float, height: float, label: str, marks: Iterable[str], css: str = "", *, standalone: bool = False
) -> str:
    """A picture of marks, as wide as there is room.

    Args:
        width: of the coordinates.
        height: likewise.
        label: description for those who cannot see it.
        marks: its content.
        css: its class.
        standalone: whether it is a file of its own, not part of a page.
    """
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    box = f"0 0 {width:.0f} {height:.0f}"
    kind = f' class="{css}"' if css else ""
    head = f'<svg{kind}{space} viewBox="{box}" role="img" aria-label="{html.escape(label)}">'
    return f"{head}{''.join(marks)}</svg>"
