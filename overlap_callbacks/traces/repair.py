"""Removes the faults from the text of an event that real traces have, so that it is valid JSON."""

from __future__ import annotations

import re

# Strings, which are kept, and numbers that JSON does not allow or nothing can use, which become null.
_TOKENS = re.compile(
    r'"(?:[^"\\]|\\.)*"|[-+]?\b(?:NaN|nan|Infinity|inf)\b|-?\d[\d.]*[eE][-+]?\d{4,}|-?\d{400,}', re.DOTALL
)
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_DECIMAL_COMMA = re.compile(r"(:\s*-?\d+),(\d+)(?=\s*[,}])")
_CONTROL = re.compile(r"[\x00-\x1f]")


def valid_json(text: bytes) -> bytes:
    """The text with the faults removed that real traces have; it may still be invalid."""
    printable = _CONTROL.sub(" ", text.decode(errors="replace"))

    def repaired(match: re.Match[str]) -> str:
        token = match.group()
        return _BAD_ESCAPE.sub(r"\\\\", token) if token.startswith('"') else "null"

    return _DECIMAL_COMMA.sub(r"\1.\2", _TOKENS.sub(repaired, printable)).encode()
