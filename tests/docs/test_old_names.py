"""Names that ended with the first release: listed once, in ``docs/versions.md``, and known nowhere else."""

from __future__ import annotations

import importlib.util
import re

import click

from overlap_callbacks.analysis.results.kernel_times import PairTime, StepTimeline
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import ProfiledBlock, TimedBlock
from overlap_callbacks.cli import _BY_NAME, main
from overlap_callbacks.integrations._options import AdvancedOptions, Options
from overlap_callbacks.monitor.schedule import Part, Schedule
from overlap_callbacks.sinks.prometheus import gauge
from overlap_callbacks.sinks.wandb.tables import PAIR_COLUMNS
from tests.commands import invoke
from tests.docs.conftest import DOCS, ROOT
from tests.report.runs import full_report

SECTION = (DOCS / "versions.md").read_text().partition("## Names that ended with the first release")[2]
_LINES = [line for line in SECTION.splitlines() if line.startswith("| ") and "`" in line]
ROWS = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in _LINES]


def test_the_list_is_in_one_place() -> None:
    assert len(ROWS) > 15
    assert "| old | new |" not in (ROOT / "CHANGELOG.md").read_text()


def test_keys_have_one_name() -> None:
    old = re.compile(r"(device|memory|throughput|verdict|overlap_run)/|overlap/step_time$")
    assert not [value.key for value in full_report().values() if old.match(value.key)]
    gone = {f"overlap_{name}" for name in ("comm_busbw_gb_s", "traffic_data_bytes", "pipeline_stage_0_bubble_ratio")}
    assert not gone & {gauge(value)[0] for value in full_report().values()}


def test_new_names_of_gauges_are_those_of_the_list() -> None:
    names = {gauge(value)[0] for value in full_report().values()}
    rows = [new for what, _, new in ROWS if what == "Prometheus"]
    assert len(rows) == 3
    assert {new.strip("`").partition("{")[0] for new in rows} <= names


def test_old_names_are_gone_from_python() -> None:
    assert "BESIDE" not in Part.__members__
    assert not hasattr(Schedule, "beside_steps")
    assert not hasattr(OverlapReport, "num_heard")
    for struct in (TimedBlock, ProfiledBlock, StepTimeline):
        assert not hasattr(struct, "arm")
    assert not [name for name in ("victim", "beside", "beside_ms") if hasattr(PairTime, name)]
    for name in ("names", "dimensions", "record", "power"):
        assert importlib.util.find_spec(f"overlap_callbacks.{name}") is None
    assert "remove_between_windows" not in Options.__annotations__ | AdvancedOptions.__annotations__
    assert "victim" not in PAIR_COLUMNS


def test_old_names_are_gone_from_commands() -> None:
    result = invoke("check", "RUN", "--max-exposed", "0.1", "--sure")
    assert result.exit_code == 2
    assert "No such option" in result.stderr
    for name in _BY_NAME:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for parameter in command.params:
            long = [option for option in parameter.opts if option.startswith("--")]
            assert len(long) <= 1, f"{name} has two names for one option: {long}"
            assert not getattr(parameter, "hidden", False), f"{name} hides {parameter.opts}"


def test_nothing_warns_of_an_old_name_but_options_of_attach() -> None:
    warns = re.compile(r"warnings\.warn\(|(Pending)?DeprecationWarning")
    files = [file for folder in ("overlap_callbacks", "integrations") for file in (ROOT / folder).rglob("*.py")]
    found = [file for file in files if file.parent.name != "vendor" and warns.search(file.read_text())]
    assert {file.name for file in found} == {"_options.py"}
