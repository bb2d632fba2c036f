from __future__ import annotations

from overlap_callbacks.analysis.safe_text import printable

HOSTILE = "a\x00b\x1b[31m\u202ec\ud800\u2028\u061cd\u2066\x9b"


def test_text_that_could_steer_a_screen_becomes_marks() -> None:
    assert printable(HOSTILE) == "a�b�[31m�c���d��"
    assert printable("tab\tand\nline") == "tab�and�line"
    assert printable("tab\tand\nline", keep="\n") == "tab�and\nline"
    assert printable("Größe 大 ✓ │") == "Größe 大 ✓ │"
