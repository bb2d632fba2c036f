"""The README: short, and its links lead somewhere. (The strict build of the site holds those of the docs.)"""

from __future__ import annotations

import re

import pytest

from tests.docs.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
LINKS = sorted({link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("http")})


def test_the_readme_has_at_most_900_words() -> None:
    assert len(TEXT.split()) <= 900


@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_to_a_file_and_a_heading(link: str) -> None:
    name, _, anchor = link.partition("#")
    path = ROOT / name
    assert path.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
