"""The page in a browser: charts, tables, themes, paper, phones, and strings that mean harm."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.kernel_times import ALONE, KernelTime, PairTime
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime
from overlap_callbacks.report import write_page
from overlap_callbacks.report.html import write_document
from overlap_callbacks.report.record import read
from overlap_callbacks.report.views.elements import Chart, Document, RunPage
from tests.analysis.test_formatting import SHOWN
from tests.browser import until
from tests.environments import gpu_rank
from tests.report.runs import many, rank_window, run_info, window, write
from tests.samples import aggregate_windows
from tests.toggling import at_night

Open = Callable[..., Any]

HOSTILE = (
    "<script>window.harmed = 1; alert(1)</script>",
    "</script></title></style><img src=x onerror='window.harmed = 1'>",
    '"><svg onload="window.harmed = 1">',
    "' onmouseover='window.harmed = 1' x='",
    "<!-- <script> --><link rel=stylesheet href=https://example.com/x.css>",
    "{{ 7 * 7 }}{% raw %} ${window.harmed = 1}",
    "\u202eevil\u2028\x00\x1b[31m",
    "W" * 5000,
    "x y " * 2000,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with everything in it."""
    folder = tmp_path_factory.mktemp("whole")
    record = read(write(folder / "run", *[window(i, power=True, slowdown=0.12 + 0.002 * i) for i in range(8)]))
    write_page([record], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    records = [
        read(write(folder / "one", window(0), window(1))),
        read(write(folder / ("a very long name of a run, " * 5), *many(100))),
        read(write(folder / "empty")),
    ]
    write_page(records, folder / "report.html")
    return folder / "report.html"


# Marks that carry data: bars, dots, lines, areas, rules; not axes, grids or labels.
COUNT_MARKS = """
[...document.querySelectorAll('[data-chart]')].map((chart) => [
  chart.closest('figure').querySelector('strong').textContent,
  chart.querySelectorAll(
    '[aria-label=bar] rect, [aria-label=rect] rect, [aria-label=dot] circle, [aria-label=line] path'
  ).length,
  [...chart.querySelectorAll('svg *')].some(
    (element) => [...element.attributes].some(({ value }) => /NaN|undefined|Infinity/.test(value))
  ),
])
"""


def test_every_chart_has_data(whole: Path, several: Path, opened: Open) -> None:
    for file, charts in ((whole, 15), (several, 3 + 2 * 10)):
        found = opened(file).evaluate(COUNT_MARKS)
        assert len(found) == charts
        assert [title for title, marks, broken in found if not marks or broken] == []


def test_bars_start_at_zero_and_have_the_lengths_of_their_figures(whole: Path, opened: Open) -> None:
    page = opened(whole)
    bars = page.locator("[data-chart='0'] [aria-label=bar] rect").evaluate_all(
        "bars => bars.map((bar) => [+bar.getAttribute('x'), +bar.getAttribute('width')])"
    )
    rows = page.evaluate("JSON.parse(document.getElementById('charts').textContent)[0].rows.map((row) => row.value)")
    assert len({x for x, _ in bars}) == 1
    assert [width / bars[0][1] for _, width in bars] == pytest.approx([value / rows[0] for value in rows], rel=1e-3)


def test_charts_write_figures_with_the_digits_of_words_and_tables(tmp_path: Path, opened: Open) -> None:
    charts = [
        Chart("intervals", unit, {"unit": unit, "rows": [{"figure": unit, "run": f"{value}", "value": value}]})
        for value, unit, _ in SHOWN
    ]
    run = RunPage("run", "run", "", "", tuple(charts), ())
    write_document(Document("Digits", (run,), ""), tmp_path / "digits.html")
    drawn = opened(tmp_path / "digits.html").locator("[data-chart]").all()
    found = [" | ".join(chart.locator("svg text").all_text_contents()) for chart in drawn]
    plain = [text.replace("\N{MINUS SIGN}", "-").replace(",", "").split(" | ") for text in found]
    assert [shown for texts, (_, _, shown) in zip(plain, SHOWN, strict=True) if shown not in texts] == []


def test_a_table_sorts_on_click_by_number_and_by_name(whole: Path, opened: Open) -> None:
    page = opened(whole)
    table = page.locator("table.sorts").first

    def column(number: int) -> list[str]:
        found: list[str] = table.locator(f"tbody td:nth-child({number})").all_text_contents()
        return found

    def head(name: str) -> Any:
        return table.get_by_role("button", name=name)

    def numbers() -> list[float]:
        return [float(text.replace(",", "")) for text in column(5)]

    assert numbers() != sorted(numbers())
    head("Sequential, ms").click()
    assert numbers() == sorted(numbers(), reverse=True)
    assert table.locator("th").nth(4).get_attribute("aria-sort") == "descending"
    head("Sequential, ms").click()
    assert numbers() == sorted(numbers())
    head("Kernel").click()
    assert [text.lower() for text in column(1)] == sorted(text.lower() for text in column(1))
    assert table.locator("[aria-sort]").count() == 1


def test_empty_cells_stay_last_whichever_way_a_column_is_sorted(tmp_path: Path, opened: Open) -> None:
    kernels = (
        KernelTime("a", False, 1, 1, 2.0, 1.0),
        KernelTime("only overlapped", False, 1, 0, 3.0, 0.0),
        KernelTime("c", False, 1, 1, 4.0, 1.0),
    )
    write_page([read(write(tmp_path, window(kernels=kernels)))], tmp_path / "report.html")
    table = opened(tmp_path / "report.html").locator("table.sorts").first
    for expected in (["c", "a", "only overlapped"], ["a", "c", "only overlapped"]):
        table.get_by_role("button", name="Slowdown").click()
        assert table.locator("tbody td:first-child").all_text_contents() == expected


def test_a_long_table_shows_whole_rows_and_how_many_more_there_are(tmp_path: Path, opened: Open) -> None:
    kernels = tuple(KernelTime(f"kernel {i}", False, 1, 1, 40.0 - i, 1.0) for i in range(30))
    write_page([read(write(tmp_path, window(kernels=kernels)))], tmp_path / "report.html")
    table = opened(tmp_path / "report.html").locator("table.sorts").first
    rows = table.locator("tbody tr:visible")
    assert rows.count() == 8
    box = table.locator("xpath=..")
    assert box.evaluate("box => box.scrollHeight <= box.clientHeight")
    more = box.locator("xpath=following-sibling::button[1]")
    assert more.text_content() == "Show all 30 rows"
    table.get_by_role("button", name="Lost, ms").click()
    table.get_by_role("button", name="Lost, ms").click()
    assert rows.first.locator("td").first.text_content() == "kernel 29"
    assert rows.count() == 8
    more.click()
    assert rows.count() == 30
    assert more.text_content() == "Show 8 rows only"


COLOURS = """() => {
  const fill = (selector) => getComputedStyle(document.querySelector(selector)).fill;
  return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
          fill("[data-chart='0'] [aria-label=bar] rect"), fill("[data-chart='0'] [aria-label='x-axis tick label']")];
}"""


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_dark_and_light_follow_the_system_and_the_button(whole: Path, opened: Open) -> None:
    light = opened(whole, color_scheme="light")
    dark = opened(whole, color_scheme="dark")
    in_light, in_dark = light.evaluate(COLOURS), dark.evaluate(COLOURS)
    assert luminance(in_light[0]) > 0.9
    assert luminance(in_dark[0]) < 0.05
    assert all(one != other for one, other in zip(in_light, in_dark, strict=True))
    for paper, ink, *_ in (in_light, in_dark):
        assert contrast(paper, ink) > 10
    light.get_by_role("button", name="Switch between light and dark").click()
    assert light.evaluate(COLOURS) == in_dark
    dark.get_by_role("button", name="Switch between light and dark").click()
    assert dark.evaluate(COLOURS) == in_light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_either_theme(whole: Path, opened: Open, scheme: str) -> None:
    pairs = opened(whole, color_scheme=scheme).evaluate(
        """() => ['.caption', '.note', 'td', 'th', '.tiles dt', '.tiles small', '.legend'].map((selector) => {
          const element = document.querySelector(selector);
          let back = element;
          while (getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
          return [getComputedStyle(element).color, getComputedStyle(back).backgroundColor, selector];
        })"""
    )
    assert [(name, contrast(ink, paper)) for ink, paper, name in pairs if contrast(ink, paper) < 4.5] == []


@pytest.mark.parametrize("width", at_night([320, 390, 768], [390]))
def test_a_phone_does_not_scroll_sideways(whole: Path, several: Path, opened: Open, width: int) -> None:
    for file in (whole, several):
        page = opened(file, viewport={"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        beyond = page.evaluate(
            "[...document.querySelectorAll('svg')].filter((s) => s.getBoundingClientRect().right > innerWidth).length"
        )
        assert beyond == 0


def test_charts_are_drawn_anew_for_another_width(whole: Path, opened: Open) -> None:
    page = opened(whole)
    wide = page.locator("svg").first.get_attribute("width")
    page.set_viewport_size({"width": 390, "height": 800})
    until(page, f"document.querySelector('svg').getAttribute('width') !== '{wide}'")
    size = page.locator("svg text").first.evaluate("(text) => getComputedStyle(text).fontSize")
    assert size == "12px"  # a chart that was merely shrunk would have smaller letters


def test_print_is_ink_on_white_and_unfolds_the_figures(whole: Path, opened: Open) -> None:
    page = opened(whole, unfolded=False, color_scheme="dark")
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 14
    page.emulate_media(media="print")
    paper, ink, *_ = page.evaluate(COLOURS)
    assert luminance(paper) == 1
    assert luminance(ink) == 0
    assert not page.locator("#theme").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.get_by_text("eq. 1: (T_comp,ov").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.get_by_text("eq. 1: (T_comp,ov").is_visible()


def test_hovering_a_bar_shows_its_figure(whole: Path, opened: Open) -> None:
    page = opened(whole)
    page.locator("[data-chart='0'] [aria-label=bar] rect").nth(1).hover()
    assert "95% interval" in page.locator("[data-chart='0'] [aria-label=tip]").text_content()


def test_hostile_and_endless_text_stays_text(tmp_path: Path, opened: Open) -> None:
    found = window(
        1,
        kernels=tuple(KernelTime(text, False, 1, 1, 2.0, 1.0) for text in HOSTILE),
        pairs=tuple(PairTime(text, False, text, 1.0, 1.0, 2.0, 1.0) for text in HOSTILE),
        dimensions=tuple(DimensionTime(text, 1, 1, 3.0, 1.0, 2.0, 1.0) for text in HOSTILE),
        collectives=tuple(CollectiveTime(text, text, 2, text, 1, 1, 1, 1.0, text) for text in HOSTILE),
        problems=HOSTILE,
        device=HOSTILE[0],
    )
    run = run_info(
        framework=HOSTILE[1], hostname=HOSTILE[2], device=HOSTILE[0], backend=HOSTILE[3], started_at=HOSTILE[7],
        schedule={text: text for text in HOSTILE}, meanings={"compute_slowdown": HOSTILE[0]},
    )  # fmt: skip
    names = ("<script>window.harmed = 1<", "a\"onload='x'&amp;{{7*7}}", "n" * 200)
    records = [read(write(tmp_path / name, window(0), found, run=run)) for name in names]
    write_page(records, tmp_path / "report.html")
    for width in (1100, 390):
        page = opened(tmp_path / "report.html", viewport={"width": width, "height": 800})
        assert page.evaluate("window.harmed") is None
        assert page.locator("body script").count() == 6  # the data, two libraries, three of ours
        assert page.locator("img, iframe, link, object, embed, [onload], [onerror], [onmouseover]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.get_by_text(HOSTILE[0]).count() >= 1
        assert page.get_by_text("{{ 7 * 7 }}").count() >= 1
        assert [title for title, marks, broken in page.evaluate(COUNT_MARKS) if not marks or broken] == []
        rows = page.locator("table.sorts").first.locator("tbody td:first-child").all_text_contents()
        assert len(rows) == len(HOSTILE)
        assert HOSTILE[0] in rows
        assert max(map(len, rows)) == 300
        tables = page.locator("table.sorts:visible")
        for i in range(min(tables.count(), 4)):
            tables.nth(i).locator("th button").first.click()
    assert (tmp_path / "report.html").stat().st_size < 5_000_000


def test_a_script_that_got_in_would_not_run_and_could_send_nothing(whole: Path, tmp_path: Path, browser: Any) -> None:
    # The page's own policy: even if something slipped through, it could do nothing.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        slipped = f"<script>window.harmed = 1</script><img src='{address}/x.png' onerror='window.harmed = 2'>"
        slipped += f"<link rel=stylesheet href='{address}/x.css'><iframe src='{address}'></iframe>"
        file = tmp_path / "harmed.html"
        content = whole.read_text(encoding="utf-8").replace("<main>", f"<main>{slipped}", 1)
        file.write_text(content, encoding="utf-8")
        context = browser.new_context()
        page = context.new_page()
        page.goto(file.as_uri())
        until(page, "document.querySelector('[data-chart] svg') !== null")
        assert page.evaluate("window.harmed") is None
        context.close()
        # Chromium may connect on the mere sight of an address; it must not say anything.
        server.settimeout(0.5)
        received = b""
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            with connection:
                connection.settimeout(0.5)
                with contextlib.suppress(TimeoutError):  # on a busy machine it may stay open, and silent
                    received += connection.recv(1000)
        assert received == b""


def test_without_scripts_the_figures_can_still_be_read(whole: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(whole.as_uri())
    assert "Charts and sorting need JavaScript" in page.content()
    assert page.get_by_role("heading", level=1).is_visible()
    assert page.locator("table.sorts").first.is_visible()
    context.close()


@pytest.mark.parametrize("kind", ["empty", "one", "invalid", "bare"])
def test_pages_of_little_open_without_a_complaint(tmp_path: Path, opened: Open, kind: str) -> None:
    windows = {
        "empty": [],
        "one": [window()],
        "invalid": [msgspec.structs.replace(window(i), valid=False) for i in range(3)],
        "bare": [window(i, profiled=(), kernels=(), pairs=(), pictures=(), collectives=()) for i in range(3)],
    }[kind]
    write_page([read(write(tmp_path, *windows))], tmp_path / "report.html")
    found = opened(tmp_path / "report.html").evaluate(COUNT_MARKS)
    assert [title for title, marks, broken in found if not marks or broken] == []


def test_of_a_thousand_windows_each_takes_a_dozen_elements_at_most(tmp_path: Path, opened: Open) -> None:
    elements = []
    for count in (250, 1000):
        write_page([read(write(tmp_path / str(count), *many(count)))], tmp_path / "report.html")
        page = opened(tmp_path / "report.html")
        assert all(marks for _, marks, _ in page.evaluate(COUNT_MARKS))
        elements.append(page.evaluate("document.querySelectorAll('*').length"))
    assert elements[1] - elements[0] <= 12 * 750


@pytest.mark.parametrize(("width", "most"), [(1200, 3050), (360, 5450)])
def test_a_page_is_short_and_its_first_screen_holds_the_answer(
    whole: Path, opened: Open, width: int, most: int
) -> None:
    page = opened(whole, unfolded=False, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollHeight") < most
    for selector in ("h1.verdict", ".more-of-verdict", ".tiles"):
        assert page.locator(selector).first.bounding_box()["y"] < 500
    # All answers stand there without a click, and no box that scrolls lies within another.
    hidden = "[...document.querySelectorAll('section .answer')].filter((each) => !each.checkVisibility()).length"
    assert page.evaluate(hidden) == 0
    nested = """() => {
      const scrolls = (each) => ['auto', 'scroll'].includes(getComputedStyle(each).overflowX);
      const boxes = [...document.querySelectorAll('body *')].filter(scrolls);
      return boxes.filter((box) => boxes.some((other) => other !== box && other.contains(box))).length;
    }"""
    assert page.evaluate(nested) == 0


@pytest.mark.parametrize(("runs", "width", "most"), [(1, 1200, 2750), (2, 360, 8450)])
def test_a_page_is_half_as_long_as_it_was(tmp_path: Path, opened: Open, runs: int, width: int, most: int) -> None:
    """One run of a job without power sensors, and two on a phone: they had 5,500 and 16,900 pixels."""
    records = [read(write(tmp_path / f"run-{number}", *[window(i) for i in range(4)])) for number in range(runs)]
    write_page(records, tmp_path / "report.html")
    page = opened(tmp_path / "report.html", unfolded=False, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollHeight") <= most


def test_a_page_whose_tables_are_full_is_half_as_long_as_it_was(tmp_path: Path, opened: Open) -> None:
    """As that of the demo, whose kernels and pairs are many, and which tells what it runs on and who sends to whom."""
    kernels = tuple(KernelTime(f"aten::kernel_{i}", False, 9, 9, 90.0 - i, 60.0 - i) for i in range(45))
    beside = (ALONE, "all_reduce")
    pairs = tuple(PairTime(f"family {i}", False, beside[i % 2], 1.0, 1.0, 30.0, 20.0) for i in range(14))
    detail: dict[str, Any] = {"kernels": kernels, "pairs": pairs, "dimensions": (), "dimension_pairs": ()}
    exposed = tuple(
        msgspec.structs.replace(block, bubble_ms=None, p2p_ms=0.0, hidden_comm_ms=0.0, idle_ms=60.0)
        for block in rank_window().profiled
    )
    windows = [
        aggregate_windows(
            [rank_window(i, rank, profiled=exposed, environment=gpu_rank(rank), **detail) for rank in (0, 1)],
            world_size=2, every_n_steps=500,
        )
        for i in range(5)
    ]  # fmt: skip
    write_page([read(write(tmp_path / "run", *windows))], tmp_path / "report.html")
    page = opened(tmp_path / "report.html", unfolded=False, viewport={"width": 1200, "height": 900})
    assert page.get_by_role("button", name="Show all 45 rows").is_visible()
    assert page.get_by_role("button", name="Show all 14 rows").is_visible()
    assert page.evaluate("document.documentElement.scrollHeight") <= 2750


def test_a_folded_part_draws_its_charts_when_it_opens(whole: Path, opened: Open) -> None:
    page = opened(whole, unfolded=False)
    section = page.locator("details.section", has=page.get_by_role("heading", name="What does it do to power?"))
    assert section.locator("svg").count() == 0
    section.locator("summary").first.click()
    until(page, "[...document.querySelectorAll('details.section[open] [data-chart]')].every((each) => each.firstChild)")
    assert section.locator("svg").count() == 2
    # Warm-up steps are grey, and a line marks the profiled blocks.
    fills = section.locator("[aria-label=rect] rect").evaluate_all("all => all.map((one) => one.getAttribute('fill'))")
    assert {"var(--idle)", "var(--overlapped)", "var(--sequential)"} <= set(fills)
    assert section.locator("[aria-label=link] path").count() == 2 * 4
