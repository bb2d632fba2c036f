"""The README: short. And every link of every text leads to a file, and to a heading of it."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.conftest import DOCS, ROOT

_BLOCK = re.compile(r"^ *(```+).*?^ *\1", re.MULTILINE | re.DOTALL)
# Pages that the site's build makes.
_MADE = re.compile(r"\b(\w+\.md)\b").findall((DOCS / "hooks.py").read_text())
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def texts() -> list[str]:
    """The texts of the repository."""
    found = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return found.split()


@functools.cache
def anchors(file: Path) -> frozenset[str]:
    """The anchors of a text's headings, and those that it names itself."""
    text = _BLOCK.sub("", file.read_text())
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*?)(?: \{.*\})?$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip())
        found.append(anchor)
    return frozenset([*found, *re.findall(r"(?:id=\"|\{ ?#)([\w.-]+)", text)])


def test_the_readme_has_at_most_900_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("name", texts())
def test_each_link_leads_to_a_file_and_a_heading(name: str) -> None:
    file, broken = ROOT / name, []
    for link in _LINK.findall(_BLOCK.sub("", file.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (file.parent / target).resolve() if target else file
        of_api = anchor.startswith("overlap_callbacks")  # the strict build of the site holds these
        if path.parent == DOCS and path.name in _MADE:
            continue
        if not path.exists() or (anchor and not of_api and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []
