"""Runs commands of the library in this process, with old and new Click; for tests."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner, Result

from overlap_callbacks.cli import main
from tests import schemas


def invoke(*arguments: str, **options: Any) -> Result:
    """How ``overlap`` ends with these arguments: stdout alone, stderr alone, and the output of both.

    What ``--json`` prints fits its schema.

    Args:
        *arguments: of the command line.
        **options: of ``CliRunner.invoke``.
    """
    if "mix_stderr" not in inspect.signature(CliRunner).parameters:
        result = CliRunner().invoke(main, arguments, **options)
        schemas.check(arguments, result.stdout)
        return result
    # Click before 8.2 has either stderr in stdout, or no output of both.
    result = CliRunner(mix_stderr=False).invoke(main, arguments, **options)  # type: ignore[call-arg]
    result.__class__ = _ResultOfBoth
    schemas.check(arguments, result.stdout)
    return result


class _ResultOfBoth(Result):
    @property
    def output(self) -> str:
        return self.stdout + self.stderr
