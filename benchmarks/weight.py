"""How heavy the house is to carry: lines of code, files, and lines of docstrings.

    python benchmarks/weight.py [--commit COMMIT] [--by-folder]

A line of code is one with a token that is neither a comment nor part of a docstring, in a Python file of
``overlap_callbacks`` or ``integrations``. Templates, scripts and styles are counted by their lines that are not blank.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("overlap_callbacks", "integrations")
PAGES = {".html", ".j2", ".js", ".css"}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def weigh(source: str) -> tuple[int, int]:
    """Lines of code and of docstrings of a Python file."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(docstrings)


def files_at(commit: str | None) -> dict[str, str]:
    """The sources by their path: of the working tree, or of a commit."""
    if commit is None:
        command = ["git", "ls-files", *FOLDERS]
    else:
        command = ["git", "ls-tree", "-r", "--name-only", commit, *FOLDERS]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found = {}
    for name in names:
        if Path(name).suffix not in {".py", *PAGES}:
            continue
        if commit is None:
            found[name] = (ROOT / name).read_text()
        else:
            shown = subprocess.run(
                ["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            found[name] = shown.stdout
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="weigh this commit; the working tree without it")
    parser.add_argument("--by-folder", action="store_true")
    options = parser.parse_args()
    lines, docstrings, files, pages = Counter(), Counter(), Counter(), Counter()
    for name, source in files_at(options.commit).items():
        folder = "/".join(Path(name).parts[:2]) if len(Path(name).parts) > 2 else Path(name).parts[0]
        if name.endswith(".py"):
            code, text = weigh(source)
            lines[folder] += code
            docstrings[folder] += text
            files[folder] += 1
        else:
            pages[folder] += sum(bool(line.strip()) for line in source.splitlines())
    for folder in sorted(files) if options.by_folder else ():
        print(f"{files[folder]:5} files {lines[folder]:7} lines of code {docstrings[folder]:7} of docstrings  {folder}")
    print(
        f"{files.total()} files, {lines.total()} lines of code, {docstrings.total()} of docstrings, "
        f"{pages.total()} of templates, scripts and styles"
    )


if __name__ == "__main__":
    main()
