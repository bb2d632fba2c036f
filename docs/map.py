#!/usr/bin/env python3
"""Writes into the docs what the code says: rooms and files into files.md; tables of figures into two other pages.

Of a file it is the first line of its docstring; of a figure, its entry in the catalogue. ``python docs/map.py`` writes
them; ``python docs/map.py --check`` only says whether they are up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
METRICS = ROOT / "docs" / "metrics.md"
WANDB = ROOT / "docs" / "wandb.md"
CORE = ROOT / "overlap_callbacks"
# In the order of a step's way through them; the other folders follow, by name.
ORDER = (
    "integrations",
    "monitor",
    "gate",
    "instruments",
    "analysis",
    "sinks",
    "traces",
    "report",
    "experiments",
    "cli",
)
BEGIN = "<!-- map: written by `python3 docs/map.py` from the docstrings; change it there -->"
END = "<!-- end of the map -->"


def main() -> int:
    """Write map and tables, or check them; 1 if one was out of date in a check."""
    stale = 0
    for page, written in ((PAGE, with_map), (METRICS, with_tables), (WANDB, with_tables)):
        text = page.read_text()
        wanted = written(text)
        if "--check" not in sys.argv[1:]:
            page.write_text(wanted)
        elif text != wanted:
            print(f"{page.relative_to(ROOT)} is out of date: run python docs/map.py", file=sys.stderr)
            stale = 1
    return stale


# Before a table of figures stands a line with the beginnings of their keys.
_TABLE = re.compile(r"(<!-- figures: (.+?) -->\n\n)(?:\|.*\n)*")


def with_tables(page: str) -> str:
    """The page with a table of figures below each line that asks for one."""
    return _TABLE.sub(lambda found: found[1] + figures_table(tuple(found[2].split())), page)


def figures_table(beginnings: tuple[str, ...]) -> str:
    """Key, unit and meaning of the figures whose keys begin so; ``short``: the keys that trackers get by default."""
    sys.path.insert(0, str(ROOT))
    from overlap_callbacks.analysis.results.catalogue import SHORT_KEYS, every_figure

    if beginnings == ("short",):
        keys = (figure.general_key for key, figure in every_figure().items() if key in SHORT_KEYS)
        return "\n".join(["| key |", "| --- |", *[f"| `{key}` |" for key in keys]]) + "\n"
    lines = ["| key | unit | meaning |", "| --- | --- | --- |"]
    for key, figure in every_figure().items():
        if key.startswith(beginnings):
            lines.append(f"| `{figure.general_key}` | {figure.unit} | {escaped(figure.meaning)} |")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Plain text as Markdown, in a table too."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def with_map(page: str) -> str:
    """The page with the map of today's files between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{house_map()}\n{END}{after}"


def house_map() -> str:
    """A section for each room, with its files."""
    folders = [CORE / name for name in ORDER[1:]]
    others = (file.parent for file in CORE.glob("*/__init__.py"))
    rooms = [ROOT / ORDER[0], *folders, *sorted(folder for folder in others if folder not in folders)]
    sections = [
        f"### `{room.relative_to(ROOT)}/`\n\n{summary(room / '__init__.py')}\n\n{block(tree(room))}" for room in rooms
    ]
    loose = [(file.name, clause(summary(file))) for file in sorted(CORE.glob("*.py"))]
    return "\n".join([*sections, f"### Outside the rooms\n\n{block(loose)}"])


def block(lines: list[tuple[str, str]]) -> str:
    """Names and what they are for, in two columns."""
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(["```text", *[f"{name:{width}}{text}".rstrip() for name, text in lines], "```\n"])


def tree(folder: Path, indent: str = "", *, names_only: bool = False) -> list[tuple[str, str]]:
    """The files of a folder, then each subfolder and what is in it, indented; no more where names are subjects."""
    files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    lines = [(indent + file.name, "" if names_only else clause(summary(file))) for file in files]
    for inner in sorted(file.parent for file in folder.glob("*/__init__.py")):
        said = summary(inner / "__init__.py")
        by_subject = "one file per subject" in said
        lines.append((f"{indent}{inner.name}/", clause(said) + ", one file per subject" * by_subject))
        lines += tree(inner, indent + "  ", names_only=by_subject)
    return lines


def summary(file: Path) -> str:
    """The first paragraph of a module's docstring, as one line of Markdown."""
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    if not docstring:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring: say in one line what it is for")
    line = " ".join(docstring.partition("\n\n")[0].split())
    return line.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def clause(text: str) -> str:
    """What a summary says first, in a few words and without Markdown; the file's name tells the subject already."""
    plain = re.sub(r" \([^()]*\)", "", text.replace("`", "").replace("&lt;", "<").replace("\\|", "|"))
    parts = [part.rstrip(".:;?") for part in re.split(r"(?<=[.:;?])\s+", plain)]
    parts = [
        part for part in parts if ("(" in part or len(part.split()) > 2) and not re.fullmatch(r"overlap \w+", part)
    ]
    said = re.sub(r"^(The|An?) (?!\w+'s )", "", parts[0] if parts else plain.rstrip("."))
    for end in (", and ", ", ", " so that ", " that ", " while "):
        head = said.partition(end)[0]
        if len(said.split()) > 6 and len(head.split()) > 2:
            said = head.removesuffix(", and")
    return said[:1].upper() + said[1:] if " " in said and "(" not in said.partition(" ")[0] else said


if __name__ == "__main__":
    sys.exit(main())
