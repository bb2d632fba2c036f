"""Every key of a report is explained, and nothing is explained that no report has."""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import ModuleType

import pytest

from overlap_callbacks import FIGURES
from tests.docs.conftest import DOCS
from tests.report.runs import full_report

_TEXT = (DOCS / "metrics.md").read_text()
_HEADINGS = re.findall(r"^### `([^`]+)`$", _TEXT, re.MULTILINE)
_ROWS = re.findall(r"^\| `([^`]+)` \|", _TEXT, re.MULTILINE)


def test_every_key_of_a_full_report_is_explained() -> None:
    keys = {value.figure.general_key for value in full_report().values()}
    assert keys - {*_HEADINGS, *_ROWS} == set()
    sections = {key.partition("/")[0] for key in keys}
    assert sections == {
        "overlap",
        "comm",
        "dimension",
        "traffic",
        "power",
        "gpu",
        "expert",
        "straggler",
        "pipeline",
        "race",
    }


def test_every_key_of_the_code_is_explained_and_no_other(hooks: ModuleType) -> None:
    assert set(_HEADINGS) == set(hooks.described())
    assert len(_HEADINGS) == len(set(_HEADINGS))


def test_the_method_defines_figures_that_there_are_and_last_the_one_that_is_no_estimate() -> None:
    equations = (DOCS / "method.md").read_text().partition("### Receives")[0]
    *defined, last = re.findall(r"^\|[^|]*`overlap/(\w+)` \|", equations, re.MULTILINE)
    assert {*defined, last} - {figure.name for figure in FIGURES} == {last}


def test_each_explanation_says_what_is_good_and_what_to_do() -> None:
    parts = re.split(r"^### `([^`]+)`$", _TEXT, flags=re.MULTILINE)
    for key, text in zip(parts[1::2], parts[2::2], strict=True):
        definition = text.strip().partition("- **Good:**")[0]
        assert len(definition.split()) >= 4, f"{key} has no definition"
        if key == "gpu/<mode>_nvlink_tx_gb_s":
            continue  # as the one before it
        assert "**Good:**" in text, key
        assert "**Do:**" in text, key


def test_the_page_has_unit_and_meaning_from_the_code(hooks: ModuleType, site: Path) -> None:
    page = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", (site / "metrics.html").read_text())))
    for key, (_, meaning) in hooks.described().items():
        assert meaning in page, key
    assert "<!-- table" not in page
    assert ".meaning }" not in page  # what is emphasised begins and ends with a word


def test_an_unknown_table_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(KeyError):
        hooks.on_page_markdown("<!-- table: nothing -->", None, None, None)
