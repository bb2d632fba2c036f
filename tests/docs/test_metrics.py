"""Every key of a report is explained, and nothing is explained that no report has."""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from overlap_callbacks import FIGURES
from overlap_callbacks.analysis.results.arrivals import Arrivals, DimensionWaiting, Lateness
from overlap_callbacks.analysis.results.experts import ExpertLoads
from overlap_callbacks.analysis.results.memory import MemoryPeak
from overlap_callbacks.analysis.results.messages import DimensionTraffic, Traffic
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from overlap_callbacks.analysis.results.stages import PipelineBubble, StageBubble
from overlap_callbacks.analysis.results.workload import Throughput
from tests.docs.conftest import DOCS
from tests.report.runs import window

_TEXT = (DOCS / "metrics.md").read_text()
_HEADINGS = re.findall(r"^### `([^`]+)`$", _TEXT, re.MULTILINE)
_ROWS = re.findall(r"^\| `([^`]+)` \|", _TEXT, re.MULTILINE)
_SUFFIXES = re.compile(r"_(ci_low|ci_high|rank_low|rank_high)$")


def general(key: str) -> str:
    """The key as the text has it: without bounds, with a placeholder for a mode, a collective or a dimension."""
    key = _SUFFIXES.sub("", key)
    if key.startswith("comm/"):
        return re.sub(r"/.*_(bytes|messages|busbw_gb_s)$", r"/<collective>_\1", key)
    if key.startswith("traffic/"):
        return re.sub(r"/.*?_(messages|sent_bytes|bytes)$", r"/<dimension>_\1", key)
    if key.startswith("pipeline/"):
        return re.sub(r"/stage_\d+_", "/stage_<n>_", key)
    if key.startswith("dimension/"):
        return re.sub(
            r"/.*?_(comm_ms|exposed_ms|bytes|comm_slowdown|compute_slowdown|step_fraction)$", r"/<dimension>_\1", key
        )
    modes = "|".join(mode.value for mode in Mode)
    return re.sub(rf"^(power|device|memory)/({modes})_", r"\1/<mode>_", key)


def test_every_key_of_a_full_report_is_explained() -> None:
    parts: dict[str, Any] = {"power": True, "memory": tuple(MemoryPeak(mode, 8, 8) for mode in Mode)}
    report = window(0, tokens_per_step=4096, **parts) if _takes_tokens() else window(0, **parts)
    sent = Traffic((DimensionTraffic("data", 8, 800, 700.0, 100.0),), 16, 15)
    fast = Throughput(
        tokens_per_s=1.0, samples_per_s=1.0, flop_per_step=1.0, flop_per_s_per_device=1.0, mfu=0.5, num_devices=1
    )
    loads = ExpertLoads("expert", 2, 2, 1, 0, 4.0, 100.0, 1.5, 0.5, 1.2, 0.2)
    late = Lateness(1, 0, "data", 32, 20, 8, 7, 0.5, 2.0, 0.2)
    arrivals = Arrivals(8, (DimensionWaiting("data", 64, 3.0, 1.0),), (late,))
    pipeline = PipelineBubble(2, 4, 1, (StageBubble(0, 1, 100.0, 20.0),))
    race = RaceCheck(RaceVerdict.EQUAL)
    report = msgspec.structs.replace(
        report, race=race, traffic=sent, arrivals=arrivals, pipeline=pipeline, throughput=fast, experts=loads
    )
    keys = {general(key) for key in report.metrics()}
    assert keys - {*_HEADINGS, *_ROWS} == set()
    sections = {key.partition("/")[0] for key in keys}
    assert sections == {
        "overlap",
        "comm",
        "dimension",
        "traffic",
        "power",
        "device",
        "memory",
        "verdict",
        "throughput",
        "expert",
        "straggler",
        "pipeline",
        "race",
    }


def _takes_tokens() -> bool:
    try:
        window(0, power=True, tokens_per_step=4096)
    except TypeError:
        return False
    return True


def test_every_key_of_the_code_is_explained_and_no_other(hooks: ModuleType) -> None:
    known = set(hooks.described())
    flags = {general(key) for key in window(0).metrics() if key.startswith("overlap/")} - known
    assert set(_HEADINGS) == known | flags
    assert len(_HEADINGS) == len(set(_HEADINGS))


def test_the_method_defines_figures_that_there_are_and_last_the_one_that_is_no_estimate() -> None:
    equations = (DOCS / "method.md").read_text().partition("### Receives")[0]
    *defined, last = re.findall(r"^\|[^|]*`overlap/(\w+)` \|", equations, re.MULTILINE)
    assert {*defined, last} - {figure.name for figure in FIGURES} == {last}


def test_each_explanation_says_what_is_good_and_what_to_do() -> None:
    parts = re.split(r"^### `([^`]+)`$", _TEXT, flags=re.MULTILINE)
    for key, text in zip(parts[1::2], parts[2::2], strict=True):
        definition = text.strip().partition("- **Good:**")[0]
        assert len(definition.split()) >= 4, f"{key} has no definition"
        if key == "device/<mode>_nvlink_tx_gb_s":
            continue  # as the one before it
        assert "**Good:**" in text, key
        assert "**Do:**" in text, key


def test_the_page_has_unit_and_meaning_from_the_code(hooks: ModuleType, site: Path) -> None:
    page = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", (site / "metrics.html").read_text())))
    for key, (_, meaning) in hooks.described().items():
        assert meaning in page, key
    assert "<!-- table" not in (site / "metrics.html").read_text()


def test_an_unknown_table_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(KeyError):
        hooks.on_page_markdown("<!-- table: nothing -->", None, None, None)
