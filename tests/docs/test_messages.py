"""Each message of a job and each note has a code, and the page on troubleshooting has one row for each code.

Messages are read from the code: what is logged, and the notes on windows and traces. Holes (what is filled in) stand
for anything; in ``docs/troubleshooting.md`` they are written as an ellipsis.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from tests.docs.conftest import DOCS, ROOT

HOLE = "\0"
CODE = re.compile(r"\bOC\d{3}\b")
MOST_WORDS = 5500
PAGE = (DOCS / "troubleshooting.md").read_text()

# Where messages of jobs and notes arise. Commands raise errors that explain themselves.
_ROOMS = ("analysis", "gate", "instruments", "monitor", "sinks", "traces")

# Calls whose text a user sees, and errors that are logged unless in strict mode.
_SAYS = frozenset(
    {
        "Ruling", "Skip", "_miss_profile", "_missing", "_note", "_tell", "abandon", "announce", "announce_once", "info",
        "info_once", "misuse", "note", "say", "switch_off", "warn", "warn_on_first", "warn_once", "warning",
        "RefusedError", "StoreFailedError", "UndecidedError",
    }
)  # fmt: skip
# Lists of notes; variables that hold a message on its way; and whose functions yield or return notes.
_NOTES = frozenset({"all_problems", "found", "notes", "problems", "reasons", "warnings"})
_HOLDS = frozenset({"message", "note", "notes", "problem", "reason", "stuck", "warning", "why"})
_YIELDS = frozenset({"checks.py", "comparison.py", "nsys.py", "ranks.py"})
_RETURNS = frozenset(
    {
        "_lower_bound", "_not_taken_by", "_of_host_libraries", "check_gate_health", "escaped_communication", "refusal",
        "residual_overlap", "rhythm_note", "stalls_in_words", "step_mismatch", "uncounted_modes", "uncounted_note",
        "unlike_ranks",
    }
)  # fmt: skip
# Files, classes and functions whose texts are no messages: parts of the page, reasons in a message, errors of commands.
_NOT_SHOWN = frozenset(
    {
        "_Repetitions", "_deepspeed_race.py", "_misfits", "_not_sequential", "_pytorch_race.py", "_unlike", "advice.py",
        "amd.py", "cause.py", "headline.py", "step_time.py",
    }
)  # fmt: skip
_REASONS = (
    "the job's store does not answer",
    "another OverlapMonitor of this process is measuring, and only one can: close() it first",
    "; on CUDA 13 and later, many process groups may do that to the first profile of a job, and to no other",
)
# What passes on a message that has its code, and results, in which there is nothing to look up.
_OTHERS = (
    f"sequential mode is refused, and measuring is switched off: {HOLE}",
    f"measuring is switched off: {HOLE}",
    f"measuring is switched off, training goes on: {HOLE}",
    f"a window is left out: {HOLE}",
    f"a window has no sequential steps: {HOLE}",
    f"the mode stays overlapped: {HOLE}",
    f"window left out: {HOLE}",
    f"window {HOLE} was cut short: {HOLE}",
    f"cut short: {HOLE}",
    f"kernel times are missing: {HOLE}",
    f"{HOLE}; the rest is measured",
    f"overlap-callbacks{HOLE}: {HOLE}",
    f"the record is in {HOLE}: overlap show {HOLE}",
    f"the quick answer: {HOLE}{HOLE}",
    f"{HOLE} {HOLE} has all of it",
)


def text_of(node: ast.AST | None) -> str:
    """A text with holes; empty where it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdgr]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
        return "".join(part or HOLE for part in parts) if any(parts) else ""
    return ""


def sources() -> list[Path]:
    return [*sorted((ROOT / "overlap_callbacks").rglob("*.py")), *sorted((ROOT / "integrations").rglob("*.py"))]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def every_text() -> list[str]:
    """All texts of the code that have several words, each once, whatever they serve."""
    nodes = (node for file in sources() for node in ast.walk(tree_of(file)))
    return [*dict.fromkeys([text for node in nodes if " " in (text := text_of(node))])]


def said(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each message and note in a file."""
    tree = tree_of(file)
    constants = {
        _name(target): node.value for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    }
    for node in _shown(tree):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.Call) and (_name(node.func) in _SAYS or _appends(node.func)):
            found = [*node.args, *[keyword.value for keyword in node.keywords]]
        elif _holds(node):
            found = [*getattr(node.value, "elts", [node.value])]
        elif isinstance(node, ast.FunctionDef) and node.name in _RETURNS:
            found = [of.value for of in ast.walk(node) if isinstance(of, ast.Return)]
        elif isinstance(node, ast.Yield) and file.name in _YIELDS:
            found = [node.value]
        for part in found:
            text = text_of(constants.get(_name(part), part)).removeprefix("overlap-callbacks: ")
            # Not a kind ("late"), nor a text that only passes another on.
            if len(re.sub(r"[^A-Za-z]", "", text)) >= 10 and " " in text:
                yield node.lineno, text  # type: ignore[attr-defined]


def _shown(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if getattr(child, "name", None) not in _NOT_SHOWN:
            yield from _shown(child)


def _holds(node: ast.AST) -> TypeGuard[ast.Assign | ast.AugAssign]:
    if isinstance(node, ast.AugAssign):
        return _name(node.target) in _NOTES | _HOLDS
    return isinstance(node, ast.Assign) and any(_name(target) in _HOLDS for target in node.targets)


def _appends(function: ast.AST) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "append" and _name(function.value) in _NOTES


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_explained_by(words: str, text: str) -> bool:
    """Whether a text contains the words of a row, in order."""
    at = 0
    for part in words.split("…"):
        at = text.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


def places() -> dict[str, list[str]]:
    """Files in which each code stands, once for each time."""
    found: dict[str, list[str]] = {}
    for file in sources():
        for code in CODE.findall(file.read_text()):
            found.setdefault(code, []).append(str(file.relative_to(ROOT)))
    return found


def rows() -> list[tuple[str, str, str]]:
    """Code, first words and explanation of each row."""
    return re.findall(r"^\| (OC\d{3}) \| `([^`]+)` \| (.*\S) \|$", PAGE, re.MULTILINE)


def test_no_code_is_used_for_two_messages() -> None:
    assert not {code: files for code, files in places().items() if len(files) > 1}


def test_each_code_has_one_row() -> None:
    assert Counter(code for code, _, _ in rows()) == Counter([*places()])
    assert len(rows()) == len(re.findall(r"^\| OC", PAGE, re.MULTILINE))


def test_each_message_has_a_code() -> None:
    missing = [
        f"{file.relative_to(ROOT)}:{line}: {text.replace(HOLE, '…')}"
        for file in sources()
        if file.relative_to(ROOT).parts[1] in _ROOMS or file.relative_to(ROOT).parts[0] == "integrations"
        for line, text in said(file)
        if not CODE.search(text) and text not in (*_OTHERS, *_REASONS) and not {file.name, *file.parts} & _NOT_SHOWN
    ]
    assert not missing, "give them codes, and rows in docs/troubleshooting.md:\n" + "\n".join(missing)


def test_the_words_of_each_row_are_said() -> None:
    unsaid = [
        (code, words) for code, words, _ in rows() if not any(is_explained_by(words, text) for text in every_text())
    ]
    assert not unsaid


def test_each_row_refers_to_rows_that_are_there() -> None:
    assert set(CODE.findall(PAGE)) == set(places())


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= MOST_WORDS
