"""``NO_COLOR``: no command and no log line colours or styles what it writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import overlap_callbacks
from tests import commands, kineto
from tests.report.runs import window, write

# What colours and styles text on a terminal.
STYLE = re.compile(r"\x1b\[[0-9;:]*m")
ROOT = Path(overlap_callbacks.__file__).parent


def _run(folder: Path) -> list[str]:
    return ["show", str(write(folder / "run", window(0, power=True), window(1, power=True)))]


def _report(folder: Path) -> list[str]:
    return ["report", *_run(folder)[1:]]


def _trace(folder: Path) -> list[str]:
    return ["analyze", str(kineto.write(folder / "trace.json", kineto.training(steps=2, layers=2, operators=2)))]


@pytest.mark.parametrize("command", [_run, _report, _trace])
def test_no_colour_and_no_style_is_written_where_the_user_wants_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[[Path], list[str]]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if on a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = command(tmp_path)
    styled = commands.invoke(*arguments)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = commands.invoke(*arguments)
    assert styled.exit_code == plain.exit_code == 0, plain.output
    assert not STYLE.search(plain.output)
    if command is not _report:  # which writes one plain line
        assert STYLE.search(styled.output)
        assert STYLE.sub("", styled.output) == plain.output


def test_every_console_is_made_where_that_is_heeded_and_nothing_else_styles_text() -> None:
    makers, stylers = [], []
    for file in sorted(ROOT.rglob("*.py")):
        text, name = file.read_text(), file.relative_to(ROOT).as_posix()
        if re.search(r"Console\(", text):
            makers.append(name)
        if re.search(r"\\x1b\\?\[|\\033\[|\bsecho\(|click\.style\(|rich import print", text):
            stylers.append(name)
    assert makers == ["cli/_output.py"]
    assert stylers == ["experiments/supervisor.py"]  # which takes colours out of what jobs have written
