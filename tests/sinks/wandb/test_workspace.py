from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from overlap_callbacks.analysis.results.catalogue import every_figure, keys_of
from overlap_callbacks.sinks.wandb import workspace
from overlap_callbacks.sinks.wandb.sink import POWER_CARD, STEP_CARD, TRAFFIC_CARD
from overlap_callbacks.sinks.wandb.tables import tables
from tests import commands
from tests.report.runs import full_report
from tests.sinks.wandb.server import WandbServer

pytest.importorskip("wandb_workspaces")

# wandb-workspaces warns of its own use of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

COMMAND = ["workspace", "--entity", "team", "--project", "llama"]


@pytest.fixture
def server(apart: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    import wandb

    wandb.teardown()
    with WandbServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
        wandb.teardown()


def invoke(*arguments: str) -> Any:
    return commands.invoke(*COMMAND, *arguments)


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for section in spec["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]


def test_every_key_that_it_shows_is_one_that_is_logged() -> None:
    report = full_report()
    logged = {*report.metrics(), *tables(report, {}), STEP_CARD, POWER_CARD, TRAFFIC_CARD}
    of_memory = {key for key in report.metrics() if "_memory_peak_" in key}
    assert not set(workspace.keys(workspace.SECTIONS)) - logged - {"gpu/sequential_memory_peak_bytes"}
    assert len(of_memory) == 3, "bounds alone are known of the peak of sequential steps"


def test_it_shows_every_figure_that_has_one_key_or_one_of_each_mode() -> None:
    shown = workspace.keys(workspace.SECTIONS)
    figures = [figure for figure in every_figure().values() if set(figure.labels) <= {"mode"}]
    assert not {key for figure in figures for key in keys_of(figure)}.difference(shown)


def test_it_is_saved_in_the_project_once_with_all_its_sections(server: WandbServer) -> None:
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    (view,) = server.views.values()
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "llama", "Overlap cost")
    assert json.loads(result.stdout[result.stdout.index("{") :])["url"].startswith("http")
    spec = json.loads(view["spec"])
    names = [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]]
    assert names[: len(workspace.SECTIONS)] == [section.name for section in workspace.SECTIONS]
    first = spec["section"]["panelBankConfig"]["sections"][0]
    assert first["flowConfig"]["columnsPerPage"] == 3
    assert first["panels"][0]["config"]["mediaKeys"] == ["overlap/answer"]
    titles = [panel["config"]["chartTitle"].partition("?")[0] for panel in first["panels"][1:]]
    assert list(dict.fromkeys(titles)) == ["Is overlap worth it", "What does it cost", "What holds it back"]
    shown = json.dumps(spec)
    assert not [key for key in set(workspace.keys(workspace.SECTIONS)) if key not in shown]


def test_a_dry_run_says_what_it_would_show_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    result = invoke("--dry-run", "--name", "Mine")
    assert result.exit_code == 0
    assert result.output.startswith("team/llama\nMine\n")
    assert "Is overlap worth it? Step time [ms]" in result.output
    assert "bars: overlap/e2e_ideal_ms, overlap/e2e_overlapped_ms, overlap/e2e_sequential_ms" in result.output


def test_a_dry_run_as_json_is_the_whole_of_what_would_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    result = invoke("--dry-run", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["entity"], found["project"], found["name"]) == ("team", "llama", "Overlap cost")
    assert len(panels(found["spec"])) == sum(len(section.panels) for section in workspace.SECTIONS)
    lines = next(one for one in panels(found["spec"]) if one["viewType"] == "Run History Line Plot")
    assert lines["config"]["xAxis"] == "overlap/step"


def test_nobody_logged_in_is_said_rather_than_asked(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    result = invoke()
    assert result.exit_code == 2
    assert "nobody is logged in to W&B: run `wandb login`, or set WANDB_API_KEY" in result.output


def test_a_server_that_refuses_is_an_error_that_says_where(
    server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_op_UpsertView2", lambda _: 1 / 0, raising=False)
    result = invoke()
    assert result.exit_code == 2
    assert "W&B did not save the workspace of team/llama" in result.output


def test_the_package_missing_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    result = invoke()
    assert result.exit_code == 2
    assert "pip install 'overlap-callbacks[workspace]'" in result.output


@pytest.mark.parametrize("parameter", ["entity", "project", "name"])
def test_an_empty_name_is_refused(parameter: str) -> None:
    names = {"entity": "team", "project": "llama", "name": "Overlap cost", parameter: " "}
    with pytest.raises(workspace.WorkspaceError, match=f"{parameter} must not be empty, got ' '"):
        workspace.build(**names)
