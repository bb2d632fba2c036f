"""Builds parts of the site from the code, so that they cannot go stale: peaks, examples, commands, changelog, API.

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
# An entry of the API, with options of its own.
_ENTRY = re.compile(r"^::: ([\w.]+)\n(?:    options:\n)?((?:      .*\n)*)", re.MULTILINE)

# What the search shows first: figures and options before pages that name everything. A title counts a thousandfold, and
# those of the API hold every name.
_BOOST = {"metrics.md": 4, "options.md": 2, "changelog.md": 0.1, "files.md": 0.1, "commands.md": 0.1}

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
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in tables, place entries of the API, weigh pages in the search, and lead links to scripts to their page."""
    markdown = _TABLE.sub(lambda match: TABLES[match[1]](), markdown)
    if page.file.src_path.startswith("api/"):
        markdown = _ENTRY.sub(lambda match: with_options(markdown, match), markdown)
    page.meta["search"] = {
        "boost": _BOOST.get(page.file.src_path, 0.002 if page.file.src_path.startswith("api/") else 1)
    }
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


# -- the API


def with_options(markdown: str, entry: re.Match[str]) -> str:
    """An entry of the API one level below the heading that it is under; a module's own heading is left out."""
    path, own = entry.groups()
    defaults = {"heading_level": 3 if "\n## " in markdown[: entry.start()] else 2}
    if any((ROOT / path.replace(".", "/")).with_suffix(suffix).exists() for suffix in (".py", "")):
        defaults |= {"show_root_heading": "false", "show_root_toc_entry": "false"}
    lines = [f"      {name}: {value}\n" for name, value in defaults.items() if f"{name}:" not in own]
    return "".join([f"::: {path}\n    options:\n", *lines, own])


# -- examples


def examples() -> str:
    """The page of all scripts in ``examples/``, each under its own heading."""
    parts = ["# Examples\n\nThe scripts of `examples/`. Tests run each of them.\n"]
    for script in sorted((ROOT / "examples").glob("*.py")):
        source = script.read_text()
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].replace("``", "`")
        parts.append(f"## {script.name} {{ #{script.stem} }}\n\n{summary}\n\n```python\n{source}```\n")
    return "\n".join(parts)


# -- commands


def commands() -> str:
    """The page of all commands: the help of each, as it is printed."""
    import click

    from overlap_callbacks.cli import _COMMANDS, main

    parts = ["# Commands\n\nEvery command ends with one of [these exit codes](check.md#exit-codes).\n"]
    group = click.Context(main, info_name="overlap")
    for names in _COMMANDS.values():
        for name, (_, _, line) in names.items():
            command = main.get_command(group, name)
            context = click.Context(command, group, name, terminal_width=80)
            found = [context]
            if isinstance(command, click.Group):
                found += [
                    click.Context(one, context, each, terminal_width=80) for each, one in command.commands.items()
                ]
            more = f" [More]({name}.md)" if (ROOT / "docs" / f"{name}.md").exists() else ""
            parts.append(f"## overlap {name} {{ #{name} }}\n\n{line}{more}\n")
            parts += [f"```text\n{each.command.get_help(each)}\n```\n" for each in found]
    return "\n".join(parts)
