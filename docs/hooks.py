"""Builds parts of the site from the code, so that they cannot go stale: peaks, examples, the changelog, the API.

MkDocs calls the ``on_*`` functions by their names.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # the checkout of these pages, even if another version is installed

# A page asks for a table with ``<!-- table: peaks -->``.
_TABLE = re.compile(r"^<!-- table: ([a-z ]+) -->$", re.MULTILINE)
# Links to scripts, for readers of the repository. In the site they become links to the page of examples.
_EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)")

_staged: list[Path] = []


@event_priority(100)  # before mkdocstrings looks at its own
def on_config(config: Any) -> Any:
    """Show mkdocstrings the package as it is installed, with the adapters in it."""
    if not _staged:
        folder = Path(tempfile.mkdtemp(prefix="overlap-callbacks-docs-"))
        package = folder / "overlap_callbacks"
        package.mkdir()
        for entry in (ROOT / "overlap_callbacks").iterdir():
            (package / entry.name).symlink_to(entry)
        (package / "integrations").symlink_to(ROOT / "integrations")
        _staged.append(folder)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(_staged[0])]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from other files of the repository."""
    changelog = "---\nhide:\n  - navigation\n---\n\n" + (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changelog.md", content=changelog))
    files.append(File.generated(config, "examples.md", content=examples()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in tables, and lead links to scripts to the page of examples."""
    markdown = _TABLE.sub(lambda match: TABLES[match[1]](), markdown)
    depth = page.file.src_path.count("/")
    return _EXAMPLE.sub(lambda match: f"]({'../' * depth}examples.md#{match[1]})", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keep a number and its percent sign on one line."""
    return re.sub(r"(\d) %", "\\1\N{NO-BREAK SPACE}%", html)


def on_post_build(config: Any) -> None:
    """Write the search index as a script too: pages opened from a disk may not fetch files."""
    folder = Path(config.site_dir) / "search"
    (folder / "search_index.js").write_text(f"var __index = {(folder / 'search_index.json').read_text()}")


def on_shutdown() -> None:
    """Remove the staged package."""
    while _staged:
        shutil.rmtree(_staged.pop())


def peaks() -> str:
    """The peaks of devices, as a table."""
    from overlap_callbacks.analysis.throughput import DEVICES, PRECISIONS

    lines = [f"| device | {' | '.join(PRECISIONS)} | source |", f"|{' --- |' * (len(PRECISIONS) + 2)}"]
    for device in DEVICES:
        rates = [f"{device.tflop_per_s[name]:,g}" if name in device.tflop_per_s else "" for name in PRECISIONS]
        lines.append(f"| {device.label} | {' | '.join(rates)} | [data sheet]({device.source}) |")
    return "\n".join(lines)


TABLES = {"peaks": peaks}


# -- examples


def examples() -> str:
    """The page of all scripts in ``examples/``, each under its own heading."""
    parts = ["# Examples\n\nThe scripts of `examples/`. Tests run each of them.\n"]
    for script in sorted((ROOT / "examples").glob("*.py")):
        source = script.read_text()
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].replace("``", "`")
        parts.append(f"## {script.name} {{ #{script.stem} }}\n\n{summary}\n\n```python\n{source}```\n")
    return "\n".join(parts)
