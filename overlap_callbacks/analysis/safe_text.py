"""Makes foreign text (names of kernels, groups, files) safe to show: printable, and of limited length."""

from __future__ import annotations

import json

# Names are kept for tables and for matching. Some kernels have names with 10 kB of template arguments, which are cut.
MAX_NAME_LENGTH = 1000


def printable(text: str, keep: str = "") -> str:
    """Text in which characters that could control a screen, except those in ``keep``, are replaced by a mark.

    These are all that Unicode does not call printable: control characters, marks that change the direction of writing,
    surrogates, and spaces other than the plain one.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "\ufffd" for char in text)


def escaped_json(text: str) -> str:
    """A JSON text with the same content and line breaks; the characters that ``printable`` replaces are escaped."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def spreadsheet_cell(value: object) -> object:
    """A cell of a CSV: text that a spreadsheet would take for a formula gets an apostrophe; numbers are unchanged."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def clean(name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """A name for tables: of limited length, still distinct from other names, and without control characters."""
    if len(name) > max_length:
        name = f"{name[: max_length - 13]}~{digest(name)[:12]}"
    return printable(name)


def digest(name: str) -> str:
    """A hash that identifies a name too long to show in full."""
    import hashlib

    return hashlib.sha256(name.encode(errors="replace")).hexdigest()
