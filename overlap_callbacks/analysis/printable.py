"""Text without the characters that could steer a screen."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Text without the characters that could steer a screen, each replaced by a mark.

    These are all that Unicode does not call printable: control characters, marks that turn the direction of writing,
    surrogates, and spaces other than the plain one.

    Args:
        text: any text.
        keep: unprintable characters that may stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "\ufffd" for char in text)
