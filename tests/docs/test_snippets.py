"""Blocks of Python in the docs: valid, of names that exist, with options that are taken."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from overlap_callbacks.monitor.monitor import OverlapMonitor
from overlap_callbacks.monitor.schedule import Schedule
from tests.docs.conftest import DOCS, ROOT, SKILL

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", SKILL]


def blocks() -> Iterator[Any]:
    for file in FILES:
        for number, found in enumerate(_BLOCK.finditer(file.read_text())):
            yield pytest.param(found[1], id=f"{file.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_is_valid_and_names_what_there_is(block: str) -> None:
    tree = ast.parse(block)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "overlap_callbacks":
            try:
                module = importlib.import_module(node.module)
            except ImportError as error:
                pytest.skip(f"an optional package is missing: {error}")
            for name in node.names:
                known[name.asname or name.name] = named(module, name.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            check_call(known[node.func.id], [keyword.arg for keyword in node.keywords if keyword.arg])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            assert hasattr(known[node.value.id], node.attr), ast.unparse(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "monitor":
            assert hasattr(OverlapMonitor, node.attr), ast.unparse(node)


def named(module: ModuleType, name: str) -> Any:
    """What a module has under a name; a submodule need not have been imported before."""
    try:
        return getattr(module, name)
    except AttributeError:
        return importlib.import_module(f"{module.__name__}.{name}")


def check_call(function: Any, keywords: list[str]) -> None:
    """Refuse keywords that the function does not take."""
    parameters = inspect.signature(function).parameters
    rest = [name for name in keywords if name not in parameters]
    options = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if options == "options":
        from overlap_callbacks.integrations._options import AdvancedOptions, flat

        flat(dict.fromkeys(rest))
        assert set(rest).isdisjoint(AdvancedOptions.__annotations__), "these go under advanced={...}"
    elif options is None:
        assert rest == [], function


def test_quick_starts_have_blocks() -> None:
    for file in (DOCS / "quickstart.md", *sorted((DOCS / "frameworks").glob("*.md"))):
        assert _BLOCK.search(file.read_text()), file


@pytest.mark.parametrize("file", sorted((DOCS / "frameworks").glob("*.md")), ids=lambda file: file.stem)
def test_a_quick_start_begins_with_the_line_and_ends_with_limits(file: Path) -> None:
    text = file.read_text()
    line, measured, limits = (text.find(part) for part in ("```python", "## What is measured", "## Limits"))
    assert 0 < line < measured < limits


def test_every_option_is_explained_with_its_default() -> None:
    text = (DOCS / "options.md").read_text()
    found = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    of_schedule = {p.name: p.default for p in inspect.signature(Schedule).parameters.values()}
    of_monitor = {p.name: p.default for p in inspect.signature(OverlapMonitor).parameters.values()}
    of_monitor.pop("framework")  # the adapter's own
    expected = {**of_schedule, **of_monitor}
    assert {name: ast.literal_eval(default) for name, default in found.items()} == expected
    example = Schedule()
    assert f"{example.window_steps} by default" in text


def test_the_methods_that_an_adapter_calls_exist() -> None:
    table = (DOCS / "extending.md").read_text().partition("## A sink")[0]
    for row in re.findall(r"^\|.*\| (.*) \|$", table, re.MULTILINE):
        for name in re.findall(r"(\w+)\(", row):
            assert hasattr(OverlapMonitor, name), name
