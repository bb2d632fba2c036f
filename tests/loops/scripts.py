"""Scripts of other repositories, run as they are but for the lines that the documentation tells to add.

None of their code is in this repository. ``OVERLAP_LOOPS`` names a folder with checkouts, such as
``nanoGPT``. Without it the tests of these scripts skip.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = "OVERLAP_LOOPS"


def checkout(name: str) -> Path:
    """The checkout of a repository; skips the test without it."""
    folder = Path(os.environ.get(FOLDER, ""), name)
    if not os.environ.get(FOLDER) or not folder.is_dir():
        pytest.skip(f"no checkout of {name} in the folder that {FOLDER} names")
    return folder.resolve()


def run_with_lines(
    script: Path, arguments: list[str], additions: dict[str, str], options: dict[str, Any] | None
) -> dict[str, Any]:
    """Run a script as ``__main__``; where there are options, with lines added to its text.

    Args:
        script: its path; it runs in its own folder.
        arguments: of its command line.
        additions: from a text of the script, which is there once, to what to put after it. What is added may use the
            names ``attach``, ``attach_accelerate`` and ``options``.
        options: of the library; None for the script as it is.

    Returns:
        The script's names at its end.
    """
    text = script.read_text()
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    if options is not None:
        from overlap_callbacks.integrations.pytorch import attach

        names |= {"attach": attach, "attach_accelerate": _attach_accelerate, "options": options}
        for line, addition in additions.items():
            assert text.count(line) == 1, (line, text.count(line))
            text = text.replace(line, line + addition)
    torch.manual_seed(0)  # for scripts that set none
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    exec(compile(text, str(script), "exec"), names)
    return names


def _attach_accelerate(*args: Any, **options: Any) -> Any:
    from overlap_callbacks.integrations.transformers import attach_accelerate

    return attach_accelerate(*args, **options)
