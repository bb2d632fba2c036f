"""Runs commands of the library in this process, with old and new Click; for tests."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner, Result

from overlap_callbacks.cli import main


def invoke(*arguments: str, **options: Any) -> Result:
    """How ``overlap`` ends with these arguments: stdout alone, stderr alone, and the output of both.

    Args:
        *arguments: of the command line.
        **options: of ``CliRunner.invoke``.
    """
    if "mix_stderr" not in inspect.signature(CliRunner).parameters:
        return CliRunner().invoke(main, arguments, **options)
    # Click before 8.2 has either stderr in stdout, or no output of both.
    result = CliRunner(mix_stderr=False).invoke(main, arguments, **options)  # type: ignore[call-arg]
    result.__class__ = _ResultOfBoth
    return result


class _ResultOfBoth(Result):
    @property
    def output(self) -> str:
        return self.stdout + self.stderr
