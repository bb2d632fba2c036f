"""The skill for coding agents: short, in the form that agents load, and with the words of the library."""

from __future__ import annotations

import re

from overlap_callbacks.analysis import headline
from overlap_callbacks.analysis.formatting import CLEAR, INCONCLUSIVE, WITHIN_NOISE
from overlap_callbacks.cli import ExitCode
from tests.docs.conftest import SKILL

TEXT = SKILL.read_text()


def test_it_has_at_most_600_words() -> None:
    assert len(TEXT.split()) <= 600


def test_agents_can_load_it() -> None:
    """The folder has the name; the description says what it is for, in at most 1,024 characters."""
    _, front, _ = TEXT.split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert fields["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", fields["name"])
    assert 50 < len(fields["description"]) <= 1024
    assert ": " not in fields["description"]  # YAML would read it as a key


def test_states_and_exit_codes_are_those_of_the_library() -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE)
    states = re.findall(r"^\| (`.*?) \|", tables[0], re.MULTILINE)
    named = set(re.findall(r"`([^`]+)`", " ".join(states)))
    assert named == {
        CLEAR, WITHIN_NOISE, INCONCLUSIVE, headline.NOTHING_OVERLAPS, headline.ONE_WINDOW, headline.INVALID,
        headline.NOT_SETTLED, headline.NOT_VERIFIED,
    }  # fmt: skip
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", tables[1], re.MULTILINE)}
    assert codes == {code.value for code in ExitCode} - {ExitCode.INTERRUPTED}
