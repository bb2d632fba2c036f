"""Every key of a report is explained, and nothing is explained that no report has."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from overlap_callbacks import FIGURES
from overlap_callbacks.analysis.results.catalogue import every_figure
from tests.docs.conftest import DOCS
from tests.report.runs import full_report

_TEXT = (DOCS / "metrics.md").read_text()
_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
# Names, what is good, and what to do.
_ADVICE = re.compile(r"^- (.*?)\*\*Good:\*\*(.+?)\*\*Do:\*\*(.+?)(?=\n\n|\n- |\Z)", re.MULTILINE | re.DOTALL)


def test_every_key_of_a_full_report_is_explained() -> None:
    keys = {value.figure.general_key for value in full_report().values()}
    assert keys - {*_ROW.findall(_TEXT)} == set()
    sections = {key.partition("/")[0] for key in keys}
    assert sections == {
        "overlap",
        "comm",
        "dimension",
        "traffic",
        "power",
        "gpu",
        "expert",
        "straggler",
        "pipeline",
        "race",
    }


def test_every_key_of_the_code_is_explained_once_and_no_other() -> None:
    assert sorted(_ROW.findall(_TEXT)) == sorted(figure.general_key for figure in every_figure().values())


def test_the_method_defines_figures_that_there_are_and_last_the_one_that_is_no_estimate() -> None:
    equations = (DOCS / "method.md").read_text().partition("### Receives")[0]
    *defined, last = re.findall(r"^\|[^|]*`overlap/(\w+)` \|", equations, re.MULTILINE)
    assert {*defined, last} - {figure.name for figure in FIGURES} == {last}


def test_each_figure_has_a_line_on_what_is_good_and_what_to_do() -> None:
    for section in re.split(r"^#{2,3} ", _TEXT, flags=re.MULTILINE)[1:]:
        names = [key.rpartition("/")[2].removeprefix("<mode>_") for key in _ROW.findall(section)]
        if not names:
            continue
        advice = _ADVICE.findall(section)
        for _, good, do in advice:
            assert good.strip(), section
            assert do.strip(), section
        named = [name for names, *_ in advice for name in re.findall(r"`([^`]+)`", names)]
        # Either a line for each, some together, or one line for the whole table.
        assert sorted(named) == sorted(names) or (named == [] and len(advice) == 1), section


def test_figures_whose_limit_is_passed_from_above_are_named_where_alerts_are_explained() -> None:
    (sentence,) = re.findall(r"Lower is worse for (.*?)\.", (DOCS / "wandb.md").read_text(), re.DOTALL)
    assert re.findall(r"`(\w+)`", sentence) == [figure.name for figure in FIGURES if figure.less_is_worse]


def test_one_page_has_lists_of_sinks() -> None:
    texts = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
    pages = [name for name, text in texts.items() if "JsonlSink(" in text and "WandbSink(" in text]
    assert pages == ["sinks.md"]


def test_an_unknown_table_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(KeyError):
        hooks.on_page_markdown("<!-- table: nothing -->", None, None, None)
