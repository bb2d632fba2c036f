"""Docstrings for the site: an entry that describes several names becomes one entry for each name."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_SECTION = re.compile(r"^( *)(Args|Attributes):$")
_SHARED = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*)$")


class SharedEntries(Extension):
    """Splits shared entries. Griffe reads ``low, high: the bounds`` as one name ``low,`` of type ``high``."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite each docstring before it is parsed."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = split_entries(obj.docstring.value)


def split_entries(text: str) -> str:
    """The text with each shared entry repeated under each of its names."""
    lines = text.split("\n")
    done: list[str] = []
    in_section = False
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if _SECTION.match(line):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        shared = _SHARED.match(line) if in_section else None
        if shared is None:
            done.append(line)
            continue
        indent, names, description = shared.groups()
        more: list[str] = []
        while at < len(lines) and lines[at].startswith(f"{indent} "):
            more.append(lines[at])
            at += 1
        for name in names.split(", "):
            done += [f"{indent}{name}: {description}", *more]
    return "\n".join(done)
