#!/usr/bin/env python3
"""Writes the table of rooms and files into docs/architecture.md, from the first line of each module's docstring.

``python3 docs/map.py`` writes it; ``python3 docs/map.py --check`` only says whether it is up to date.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
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
    """Write the map, or check it; 1 if it was out of date in a check."""
    text = PAGE.read_text()
    wanted = with_map(text)
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print(f"{PAGE.relative_to(ROOT)} is out of date: run python3 docs/map.py", file=sys.stderr)
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


def with_map(page: str) -> str:
    """The page with the map of today's files between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{house_map()}\n{END}{after}"


def house_map() -> str:
    """A section for each room, with a table of its files."""
    folders = [CORE / name for name in ORDER[1:]]
    others = (file.parent for file in CORE.glob("*/__init__.py"))
    rooms = [ROOT / ORDER[0], *folders, *sorted(folder for folder in others if folder not in folders)]
    sections = [
        f"### `{room.relative_to(ROOT)}/`\n\n{summary(room / '__init__.py')}\n\n{table(room)}" for room in rooms
    ]
    return "\n".join([*sections, f"### Beside the rooms\n\n{table(CORE, recurse=False)}"])


def table(folder: Path, *, recurse: bool = True) -> str:
    """The files of a folder, those of its subfolders last."""
    lines = ["| file | what it is for |", "| --- | --- |"]
    files = [file for file in folder.rglob("*.py") if recurse or file.parent == folder]
    for file in sorted(files, key=lambda file: (len(file.parts), file.parent, file.name != "__init__.py", file.name)):
        name = str(file.relative_to(folder))
        if name == "__init__.py" and recurse:
            continue  # said above the table
        if name != "__init__.py" and file.name == "__init__.py":
            name = f"{file.parent.relative_to(folder)}/"
        lines.append(f"| `{name}` | {summary(file)} |")
    return "\n".join(lines) + "\n"


def summary(file: Path) -> str:
    """The first paragraph of a module's docstring, as one line of Markdown."""
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    if not docstring:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring: say in one line what it is for")
    line = " ".join(docstring.partition("\n\n")[0].split())
    return line.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
