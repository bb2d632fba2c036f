from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import overlap_callbacks.report

VENDOR = Path(overlap_callbacks.report.__file__).parent / "html" / "vendor"
ROWS = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (\S+) \|.*`([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.M)


def test_every_library_is_listed() -> None:
    assert {row[0] for row in ROWS} == {file.name for file in VENDOR.glob("*.js")}


@pytest.mark.parametrize(("file", "package", "version", "digest"), ROWS)
def test_a_library_is_as_it_was_published_and_has_its_licence(
    file: str, package: str, version: str, digest: str
) -> None:
    content = (VENDOR / file).read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest
    assert f"v{version}".encode() in content[:100]
    assert "Permission to use, copy, modify" in (VENDOR / f"{file.partition('.')[0]}.LICENSE").read_text()


def test_the_libraries_can_be_inlined_in_a_page() -> None:
    for file in VENDOR.glob("*.js"):
        text = file.read_text().lower()
        assert "</script" not in text
        assert "<!--" not in text
