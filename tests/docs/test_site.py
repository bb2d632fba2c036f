"""The site: built strictly, self-contained, and working in a browser."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from overlap_callbacks.analysis.results.catalogue import every_figure
from overlap_callbacks.cli import _BY_NAME
from tests.browser import until
from tests.docs.conftest import DOCS

Open = Callable[..., Any]


def pages(site: Path) -> list[str]:
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))


def test_every_text_is_a_page(site: Path) -> None:
    built = pages(site)
    for text in DOCS.rglob("*.md"):
        assert str(text.relative_to(DOCS).with_suffix(".html")) in built


def test_no_file_names_another_host(site: Path) -> None:
    found = []
    for name in pages(site):
        # What a browser fetches by itself; links that a reader may follow are another thing.
        for tag in re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", (site / name).read_text()):
            found += [f"{name}: {tag}" for url in re.findall(r'(?:src|href)="([^"]*)"', tag) if "//" in url]
    found += [
        f"{style.name}: {url}" for style in site.rglob("*.css")
        for url in re.findall(r"url\(([^)]*)\)", style.read_text()) if re.match(r"[\"']?(https?:)?//", url)
    ]  # fmt: skip
    assert found == []


# All pages have one template: for each change every fifth is opened, and all are built.
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_page_opens_in_silence(site: Path, address: str, opened: Open, every: int) -> None:
    page = opened(address + "index.html", address)
    for name in [name for name in pages(site) if name != "404.html"][::every]:
        page.goto(address + name)
        assert page.locator("h1").first.is_visible(), name


def test_pages_open_and_search_from_a_disk(site: Path, opened: Open) -> None:
    page = opened((site / "index.html").as_uri(), site.as_uri())
    search(page, "residual overlap", "metrics.html")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="How to read the dashboard").first.click()
    assert page.locator("h1").first.inner_text().startswith("How to read the dashboard")


def test_search_finds_a_message_and_a_function(address: str, opened: Open) -> None:
    page = opened(address + "index.html", address)
    for words, expected in (
        ("residual overlap", "metrics.html"),
        ("switchable", "api/adapters.html"),
        ("OC107", "troubleshooting.html"),
    ):
        search(page, words, expected)


# From a disk, the test above searches too.
@pytest.mark.parametrize(
    "by_file",
    [pytest.param(False, id="served"), pytest.param(True, id="from a disk", marks=pytest.mark.nightly)],
)
def test_search_finds_a_name_by_a_part_of_it_and_by_all_of_it(
    site: Path, address: str, opened: Open, by_file: bool
) -> None:
    base = site.as_uri() + "/" if by_file else address
    page = opened(base + "index.html", base)
    figures, adapters = "metrics.html", "#overlap_callbacks.integrations"
    for words, expected in (
        ("exposed", figures), ("exposed_comm_ms", figures), ("overlap/exposed_comm_ms", figures),
        ("busbw", figures), ("allreduce_busbw", figures),
        ("pretrain", "frameworks/megatron.html"), ("hook_pretrain", "frameworks/megatron.html"),
        ("switchable", f"{adapters}.pytorch.switchable"), ("sample_experts_every", "options.html"),
    ):  # fmt: skip
        search(page, words, expected)


def test_a_long_signature_has_a_line_for_each_parameter(site: Path) -> None:
    block = re.compile(r'<div class="language-python doc-signature.*?</div>', re.DOTALL)
    texts = [(site / name).read_text() for name in pages(site) if name.startswith("api/")]
    signatures = [html.unescape(re.sub(r"<[^>]+>", "", found)) for text in texts for found in block.findall(text)]
    attach = next(text for text in signatures if text.lstrip().startswith("attach(") and "optimizer" in text)
    assert "\n    optimizer: " in attach
    assert "\n    start_step: int = 0,\n" in attach
    assert max(len(line) for text in signatures for line in text.splitlines()) <= 100


def test_every_command_has_its_help_on_a_page(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "commands.html").read_text()))
    for name in _BY_NAME:
        assert f"Usage: overlap {name} " in page
    assert "--max-exposed" in page


def test_figures_have_unit_and_meaning_from_the_code(site: Path) -> None:
    page = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", (site / "metrics.html").read_text())))
    for figure in every_figure().values():
        assert f"{figure.general_key} {f'{figure.unit} ' if figure.unit else ''}{figure.meaning}" in page, figure.key
    assert "<!-- table" not in page


def search(page: Any, words: str, expected: str) -> None:
    """Type ``words`` key by key, and wait until a page is among the results."""
    box = page.get_by_role("textbox", name="Search")
    box.clear()
    # Not fill(): the search listens to keys, so what is filled in is sought only if it is there before the index is.
    box.press_sequentially(words)
    # What is to be highlighted comes before the heading.
    links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href.replace(/[?]h=[^#]*/, ''))"
    until(page, f"{links}.some(link => link.includes({expected!r}))")


@pytest.mark.parametrize(("scheme", "expected"), [("light", "default"), ("dark", "slate")])
def test_light_and_dark(address: str, opened: Open, scheme: str, expected: str) -> None:
    page = opened(address + "metrics.html", address, color_scheme=scheme)
    assert page.locator("body").get_attribute("data-md-color-scheme") == expected
    page.locator("label[for^=__palette]:visible").first.click()
    until(page, f"document.body.dataset.mdColorScheme !== '{expected}'")


@pytest.mark.parametrize("name", ["index.html", "metrics.html", "troubleshooting.html", "api/monitor.html"])
def test_no_page_is_wider_than_a_phone(address: str, opened: Open, name: str) -> None:
    page = opened(address + name, address, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_no_entry_of_the_api_is_of_several_names(site: Path) -> None:
    for name in pages(site):
        assert not re.search(r"<code>\*{0,2}\w+,</code>", (site / name).read_text()), name


def in_the_api(site: Path) -> set[str]:
    text = "".join((site / name).read_text() for name in pages(site) if name.startswith("api/"))
    return set(re.findall(r'id="(overlap_callbacks\.[\w.]+)"', text))


def test_every_struct_of_a_report_is_in_the_api(site: Path) -> None:
    from overlap_callbacks import OverlapReport
    from overlap_callbacks.sinks import RunInfo

    names = {struct.__name__ for struct in structs_in(OverlapReport) | structs_in(RunInfo)}
    assert {"Estimate", "RankWindow", "DevicePower", "JobPower"} <= names
    assert names - {name.rpartition(".")[2] for name in in_the_api(site)} == set()


def structs_in(kind: Any, seen: frozenset[type] = frozenset()) -> frozenset[type]:
    """The msgspec structs that a type holds, at any depth."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind in seen:
            return seen
        inner: tuple[Any, ...] = tuple(get_type_hints(kind).values())
        seen |= {kind}
    else:
        inner = get_args(kind)
    for part in inner:
        seen |= structs_in(part, seen)
    return seen


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_every_name_that_an_api_page_lists_exists(page: Path) -> None:
    for path, options in re.findall(r"^::: ([\w.]+)\n((?: +.*\n|\n)*)", page.read_text() + "\n", re.MULTILINE):
        parent, _, name = path.rpartition(".")
        try:
            entry: Any = importlib.import_module(path)
        except ImportError:
            entry = getattr(pytest.importorskip(parent, exc_type=ImportError), name)
        for members in re.findall(r"members: \[(.*)\]", options):
            for member in filter(None, members.split(", ")):
                assert hasattr(entry, member), f"{path} has no {member}"


def test_what_is_public_is_in_the_api(site: Path) -> None:
    import overlap_callbacks
    from overlap_callbacks import traces
    from overlap_callbacks.sinks import __all__ as sinks

    known = in_the_api(site)
    for name in {*overlap_callbacks.__all__, *traces.__all__, *sinks} - {"__version__", "FIGURES"}:
        assert any(found.endswith(f".{name}") for found in known), name
