from __future__ import annotations

import json

import pytest

from overlap_callbacks.analysis.safe_text import escaped_json, printable, spreadsheet_cell

HOSTILE = "a\x00b\x1b[31m\u202ec\ud800\u2028\u061cd\u2066\x9b"


def test_text_that_could_steer_a_screen_becomes_marks() -> None:
    assert printable(HOSTILE) == "a�b�[31m�c���d��"
    assert printable("tab\tand\nline") == "tab�and�line"
    assert printable("tab\tand\nline", keep="\n") == "tab�and\nline"
    assert printable("Größe 大 ✓ │") == "Größe 大 ✓ │"


def test_json_keeps_its_content_and_has_no_character_that_could_steer_a_screen() -> None:
    content = {"name": HOSTILE.replace("\ud800", "") + "\U000e0001", "plain": "Größe"}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    assert json.loads(escaped_json(text)) == content
    assert escaped_json(text).replace("\n", "").isprintable()
    assert "Größe" in escaped_json(text)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_cell_that_a_spreadsheet_would_compute_becomes_text(text: str) -> None:
    assert spreadsheet_cell(text) == "'" + text


@pytest.mark.parametrize("value", ["gemm", "a=b", "", -1.5, 0, None])
def test_other_cells_stay_as_they_are(value: object) -> None:
    assert spreadsheet_cell(value) == value
