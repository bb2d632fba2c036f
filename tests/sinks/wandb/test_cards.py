"""The pictures that W&B gets, in a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.headline import Headline
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES
from overlap_callbacks.sinks.wandb import cards
from tests.report.runs import window
from tests.toggling import at_night

Open = Callable[..., Any]

# Of an SVG's words, those that lie outside of it or on one another.
OUTSIDE = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
    }).map(text => text.textContent);
})"""
MEETING = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([_, q]) =>
        p.left < q.right && q.left < p.right && p.top < q.bottom - 1 && q.top < p.bottom - 1).map(([b]) => [a, b]));
})"""


@pytest.mark.parametrize("width", at_night([300, 360, 480, 1000], [360, 480]))
@pytest.mark.parametrize("times", [1.0, 1000.0])
def test_words_lie_within_the_picture_and_apart_and_can_be_read(
    tmp_path: Path, opened: Open, width: int, times: float
) -> None:
    report = window(power=True)
    for figure in STEP_TIMES:
        estimate = getattr(report, figure.name)
        scaled = {bound: getattr(estimate, bound) * times for bound in ("value", "ci_low", "ci_high")}
        report = msgspec.structs.replace(report, **{figure.name: msgspec.structs.replace(estimate, **scaled)})
    assert report.power_trace is not None
    so_far = cards.SoFar(Headline("Overlap is worth it here."), 12, 20, report.figures())
    for name, picture in (
        ("step", cards.step_card(report, so_far)),
        ("power", cards.power_card(report, report.power_trace)),
    ):
        (tmp_path / f"{name}.html").write_text(picture)
        page = opened(tmp_path / f"{name}.html", viewport={"width": width, "height": 600})
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(MEETING) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        text_px = "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
        assert page.evaluate(text_px) >= 8
