"""The page of the environment names every rule and every variable of the code, and no other."""

from __future__ import annotations

import re

from overlap_callbacks.analysis.environment import job, privacy
from overlap_callbacks.analysis.environment.lint import RULES
from tests.docs.conftest import DOCS

_TEXT = (DOCS / "environment.md").read_text()
_ROWS = re.findall(r"^\| `([a-z0-9-]+)` \| (\w+) \|.*\]\((https://\S+)\) \|$", _TEXT, re.MULTILINE)


def test_each_rule_is_explained_with_its_severity_and_source() -> None:
    assert sorted(_ROWS) == sorted((rule.name, rule.severity.value, rule.source) for rule in RULES)


def test_the_variables_that_are_kept_are_named() -> None:
    section = _TEXT[_TEXT.index("### Which variables") : _TEXT.index("### Large jobs")]
    named = set(re.findall(r"`([A-Z0-9_]+)`", section))
    kept = {*privacy._PREFIXES, *privacy._NAMES, *privacy._SECRET.pattern.split("|")}
    assert named == kept


def test_the_limits_are_those_of_the_code() -> None:
    for number in (privacy.MAX_VALUE_LENGTH, privacy.MAX_VARIABLES, job.MAX_PLACES, job.MAX_DIFFERENCES):
        assert re.search(rf"\b{number}\b", _TEXT)
