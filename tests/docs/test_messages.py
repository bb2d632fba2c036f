"""What the library says to a user is explained, and what is explained is still said.

Messages are read from the code: what is raised, what is warned of, and the notes of reports and traces. Holes (what is
filled in) stand for anything; in ``docs/troubleshooting.md`` they are written as an ellipsis.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.conftest import DOCS, ROOT

HOLE = "\0"

_TEXT = (DOCS / "troubleshooting.md").read_text()
ENTRIES = re.findall(r"^\| `([^`]+)` \|", _TEXT, re.MULTILINE)

# Calls whose text a user sees.
_SAYS = frozenset(
    {
        "NoPower", "Ruling", "_give_up", "_miss_profile", "_note", "_tell", "abandon", "announce", "info",
        "info_once", "misuse", "note", "skip_step", "switch_off", "warn_once", "warning",
    }
)  # fmt: skip
# Variables and attributes that hold such a text on its way.
_REASONS = frozenset({"_reason", "message", "reason", "why"})
# Raised for developers of the library, or passed on with a text that is searched elsewhere.
_NOT_SHOWN = (
    "a mark of the host and a mark of a stream have no common clock",
    "no mark of this stream was seen to be passed yet",
    "a node of a strong component has a way back to itself",
    "end_ns must be after start_ns",
    "the blocks of a mode and their sums do not belong together",
    "the rows of an aggregate have different lengths",
    "a part does not say for which ranks it speaks",
    "a part's spread is of other figures",
    "the numbers of a device are not those of power",
    "the sums over devices are not those of power",
    f"a step cannot take {HOLE} of an overlapped step longer",
    "records must hold at least one record",
    "traces must hold at least one trace",
    f"module {HOLE} has no attribute",
    # The text after a message that comes from elsewhere.
    f"{HOLE}; measuring is switched off, training goes on",
    f"{HOLE}, which was cut short",
    f"{HOLE}; the rest is measured",
    f"the record is in {HOLE}: overlap show {HOLE}",
    f"{HOLE}; this one is switched off, training goes on",
    f"overlap-callbacks{HOLE}: {HOLE}",
    f"nvmlDeviceGetFieldValues: {HOLE}",
)
# Lists of notes, wherever they are appended to; and what yields notes.
_NOTES = frozenset({"problems", "all_problems", "found"})


def text_of(node: ast.AST) -> str | None:
    """A text with holes; None where it is none."""
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, str):
            return None
        return re.sub(r"%[sdgr]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
        return None if parts == [None, None] else "".join(part or HOLE for part in parts)
    return None


def sources() -> list[Path]:
    return [*sorted((ROOT / "overlap_callbacks").rglob("*.py")), *sorted((ROOT / "integrations").rglob("*.py"))]


@functools.cache
def every_text() -> list[str]:
    """All texts of the code, whatever they serve."""
    nodes = (node for file in sources() for node in ast.walk(ast.parse(file.read_text())))
    return [text for node in nodes if (text := text_of(node)) is not None]


def said() -> Iterator[tuple[str, str]]:
    """Place and text of what a user may see."""
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            texts: list[str | None] = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = [text_of(argument) for argument in node.exc.args[:1]]
            elif isinstance(node, ast.Call) and (_name(node.func) in _SAYS or _appends_note(node)):
                texts = [text_of(argument) for argument in [*node.args, *(k.value for k in node.keywords)]]
            elif _keeps_reason(node) or (_yields(node) and file.name == "skew.py"):
                texts = [text_of(node.value)]  # type: ignore[attr-defined]
            for found in texts:
                text = (found or "").removeprefix("overlap-callbacks: ")
                # Not a kind ("late"), nor a text that only passes another on.
                if len(re.sub(r"[^A-Za-z]", "", text)) >= 10 and " " in text:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", text  # type: ignore[attr-defined]


def _appends_note(node: ast.Call) -> bool:
    function = node.func
    return isinstance(function, ast.Attribute) and function.attr == "append" and _name(function.value) in _NOTES


def _keeps_reason(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(_name(target) in _REASONS for target in node.targets)


def _yields(node: ast.AST) -> bool:
    return isinstance(node, ast.Yield) and node.value is not None


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def explains(entry: str, text: str) -> bool:
    """Whether a text contains an entry's parts, in order."""
    at = 0
    for part in entry.split("…"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_explained_is_still_said(entry: str) -> None:
    assert any(explains(entry, text) for text in every_text())


def test_what_is_said_is_explained() -> None:
    missing = {
        f"{place}: {text.replace(HOLE, '…')}" for place, text in said()
        if not any(explains(entry, text) for entry in ENTRIES) and not any(hidden in text for hidden in _NOT_SHOWN)
    }  # fmt: skip
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(sorted(missing))


def test_entries_are_not_given_twice_and_say_what_to_do() -> None:
    assert len(ENTRIES) == len(set(ENTRIES))
    for row in re.findall(r"^\| `.*\|$", _TEXT, re.MULTILINE):
        cells = re.split(r"(?<!\\)\|", row.strip("|"))
        assert len(cells) == 3, row
        assert cells[2].strip(), row
