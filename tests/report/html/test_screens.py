"""The five screens, light and dark, wide and on a phone: nothing runs out of them, and their head can be read.

``OVERLAP_SCREENS=FOLDER`` keeps their pictures there, to be looked at: a change of the page needs eyes too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report import write_page
from tests.report.html.test_browser import contrast
from tests.report.screens import SCREENS
from tests.toggling import SAMPLE_OR_ALL

# Of each line of the head: its colour, the one behind it, and where it ends.
HEAD = """() => [...document.querySelectorAll('h1, h1 ~ .more-of-verdict, .verdicts .says, .verdicts .more-of-verdict')]
  .filter((line) => line.checkVisibility()).map((line) => {
    let back = line;
    while (getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
    return [line.textContent, getComputedStyle(line).color, getComputedStyle(back).backgroundColor,
            line.getBoundingClientRect().right];
  })"""
# How many texts the charts have, and those that lie upon each other or beyond the window.
TEXTS = """() => {
  const upon = ([, a], [, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  const wrong = [];
  let number = 0;
  for (const svg of document.querySelectorAll('[data-chart] svg')) {
    if (!svg.checkVisibility()) continue;
    const boxes = [...svg.querySelectorAll('[aria-label*=tick] text, [aria-label=text] text')]
      .filter((text) => text.textContent.trim()).map((text) => [text.textContent, text.getBoundingClientRect()]);
    number += boxes.length;
    boxes.forEach((a, i) => boxes.slice(i + 1).filter((b) => upon(a, b))
      .forEach((b) => wrong.push(`${a[0]} on ${b[0]}`)));
    wrong.push(...boxes.filter(([, a]) => a.right > innerWidth + 1 || a.left < -1).map(([text]) => text));
  }
  return [number, wrong];
}"""


@pytest.mark.parametrize("every", SAMPLE_OR_ALL)
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_can_be_read_in_either_theme_and_width(
    name: str, every: bool, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    write_page(SCREENS[name](tmp_path), tmp_path / "page.html")
    views = [("light", 1200), ("dark", 360), ("light", 360), ("dark", 1200)]
    for scheme, width in views if every or os.environ.get("OVERLAP_SCREENS") else views[:2]:
        shown = opened(
            tmp_path / "page.html", unfolded=False, viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        if os.environ.get("OVERLAP_SCREENS"):
            folder = Path(os.environ["OVERLAP_SCREENS"])
            folder.mkdir(parents=True, exist_ok=True)
            shown.screenshot(path=folder / f"{name}-{scheme}-{width}.png", full_page=True)
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        lines = shown.evaluate(HEAD)
        assert len(lines) >= 3
        assert [line for line, *_, right in lines if right > width] == []
        assert [line for line, ink, paper, _ in lines if contrast(ink, paper) < 4.5] == []
        number, wrong = shown.evaluate(TEXTS)
        assert wrong == []
        assert number > 20 or name == "invalid"  # whose charts are folded
