"""The table of rooms and files in the docs is that of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.conftest import DOCS, ROOT


@pytest.fixture
def file_map() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_map", DOCS / "map.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_is_up_to_date(file_map: ModuleType) -> None:
    text = (DOCS / "files.md").read_text()
    assert file_map.with_map(text) == text, "docs/files.md is out of date: run python3 docs/map.py"


def test_the_tables_of_figures_are_up_to_date(file_map: ModuleType) -> None:
    for page in ("metrics.md", "wandb.md"):
        text = (DOCS / page).read_text()
        assert file_map.with_tables(text) == text, f"docs/{page} is out of date: run python docs/map.py"


def test_the_map_names_every_file_of_every_room(file_map: ModuleType) -> None:
    sections = file_map.house_map().split("### ")
    for folder in (
        ROOT / "integrations",
        *(file.parent for file in (ROOT / "overlap_callbacks").glob("*/__init__.py")),
    ):
        section = next(text for text in sections if text.startswith(f"`{folder.relative_to(ROOT)}/`"))
        assert named(section) == {
            str(file.relative_to(folder)).removesuffix("__init__.py") for file in folder.rglob("*.py")
        } - {""}


def named(section: str) -> set[str]:
    """The paths in a section's block; what is in a folder is indented below it."""
    paths, folders = set(), [""]
    for line in section.partition("```text\n")[2].partition("```")[0].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        paths.add(folders[depth] + name)
        folders[depth + 1 :] = [folders[depth] + name]
    return paths


def test_a_file_without_a_docstring_is_named(file_map: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    file_map.ROOT = tmp_path
    with pytest.raises(ValueError, match=r"a\.py has no docstring"):
        file_map.tree(tmp_path)


def test_a_page_without_marks_is_refused(file_map: ModuleType) -> None:
    with pytest.raises(ValueError, match="must hold the lines"):
        file_map.with_map("# Architecture")


def test_marks_and_text_around_the_map_stay(file_map: ModuleType) -> None:
    page = f"before\n{file_map.BEGIN}\nold\n{file_map.END}\nafter\n"
    written = file_map.with_map(page)
    assert written.startswith(f"before\n{file_map.BEGIN}\n\n### `integrations/`")
    assert written.endswith(f"\n{file_map.END}\nafter\n")
    assert file_map.with_map(written) == written
