"""The schemas of ``--json``: up to date, one for each command that has the option, and strict."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import msgspec
import pytest

from overlap_callbacks import cli
from overlap_callbacks.analysis.advice import DOCS
from overlap_callbacks.analysis.headline import _READ_NOTES
from overlap_callbacks.analysis.results.request import JobAnswer, Status
from overlap_callbacks.cli import _BY_NAME, main
from overlap_callbacks.experiments.bench.view import bench_data
from overlap_callbacks.experiments.study.sweep import Study
from overlap_callbacks.experiments.study.view import study_data
from overlap_callbacks.experiments.tune.ranking import ranked
from overlap_callbacks.experiments.tune.view import tuning_data
from tests import kineto, schemas
from tests.analysis.bench_results import gemm_results, transfer_results
from tests.analysis.communication.layouts import Layout
from tests.commands import invoke
from tests.experiments import tune_results
from tests.experiments.study_page import studies
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report, window, write
from tests.report.scaling_runs import write_sized
from tests.report.traffic_runs import write_run

ROOT = Path(__file__).parent.parent.parent
RECORDS, REAL = ROOT / "tests" / "report" / "records", ROOT / "tests" / "traces" / "real"


@pytest.fixture(scope="module")
def written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_schemas", ROOT / "docs" / "schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schemas_are_those_of_the_types(written: ModuleType) -> None:
    files = {file.name: file.read_text() for file in schemas.FOLDER.iterdir()}
    made = {f"{name}.json": written.text_of(name) for name in written.COMMANDS}
    assert files == made, "a schema is out of date: run python3 docs/schemas.py"


def commands_with_json() -> Iterator[str]:
    for name in _BY_NAME:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        each = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        if any("--json" in parameter.opts for one in each for parameter in one.params):
            yield name


def test_each_command_with_json_has_a_schema_that_its_help_leads_to() -> None:
    for name in commands_with_json():
        assert schemas.validator(name)
    assert str(schemas.FOLDER) in invoke("--help", terminal_width=1000).stdout.replace("\n", "").replace("  ", "")
    assert "overlap --help says where its schema is" in invoke("analyze", "--help", terminal_width=200).stdout


def test_help_leads_to_the_pages_that_messages_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = invoke("--help", terminal_width=1000).stdout
    (folder,) = re.findall(r"docs/ in messages: (\S+)", said)
    assert Path(folder) == ROOT / "docs"
    # All pages that any screen names are there, with their headings.
    pages = {DOCS, *re.findall(r"docs/[\w-]+\.md", _READ_NOTES)}
    assert all((Path(folder).parent / page).is_file() for page in pages)
    # Installed, they are beside the package's other data; otherwise help says that they are not.
    installed = tmp_path / "share" / "overlap-callbacks" / "docs"
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site" / "overlap_callbacks" / "cli" / "__init__.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert cli._docs() == ""
    installed.mkdir(parents=True)
    (installed / "troubleshooting.md").touch()
    assert cli._docs() == str(installed)
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert data["share/overlap-callbacks/docs"] == ["docs/*.md"]


def test_no_object_takes_keys_that_its_schema_does_not_name() -> None:
    def objects(part: Any) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict) and "properties" in part:
            yield part
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from objects(inner)

    for file in schemas.FOLDER.iterdir():
        found = list(objects(json.loads(file.read_text())))
        assert found
        assert all(one["additionalProperties"] is False and "title" in one for one in found), file


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    write(folder / "full", full_report(window=0), full_report(window=1))
    write(folder / "arms", window(0), window(2), arms=[arm_window(1)])
    write(folder / "invalid", msgspec.structs.replace(window(), valid=False))
    write_run(folder / "job", Layout(2, 2, 2, ranks_per_host=4))
    for ranks in (2, 4):
        write_sized(folder / f"of{ranks}", ranks)
    kineto.write(folder / "overlapped.json", list(kineto.training(overlapped=True)), **kineto.job())
    kineto.write(folder / "sequential.json", list(kineto.training(overlapped=False)), **kineto.job())
    return folder


LINES = [
    "show full", "show arms", "show invalid", "show job",
    "report full -o page.html", "report of2 of4 -o page.html", "report overlapped.json -o page.html",
    "check full --max-exposed 0.1", "check job --max-exposed 0.1 --min hidden_comm_fraction=0.9",
    "analyze overlapped.json", "compare overlapped.json sequential.json", "traffic job",
    "traffic job --mapping tp-dp-pp", "predict --model gpt2 --dp 2", "predict --model gpt2 --dp 8 --what-if --messages",
    "predict --model gpt2 --pp 2 --tp 2 --dp 2 --check job", "workspace --entity a --project p --dry-run",
    *[f"show {file}" for file in sorted(RECORDS.iterdir())],
    *[f"analyze {file}" for file in sorted(REAL.glob("*.json.*"))],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of W&B's workspaces
@pytest.mark.parametrize("line", LINES)
def test_what_is_printed_fits_its_schema(here: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(here)
    result = invoke(*line.split(), "--json")
    assert result.exit_code in (0, 1, 3), result.output
    name, content = line.split(maxsplit=1)[0], json.loads(result.stdout)
    assert not schemas.faults(name, content)
    assert_strict(name, content)


def results(folder: Path) -> Iterator[tuple[str, Any]]:
    for name in ("large", "factors", "on_cpu", "single"):
        start, rows = getattr(studies, name)()
        yield "study", study_data(Study(folder, start, rows))
    failed = studies.of_rows([studies.row(studies.configuration(), failure="out of memory")])
    yield "study", study_data(Study(folder, *failed))
    for bench in (gemm_results(), transfer_results()):
        yield "bench", bench_data(dataclasses.replace(bench, folder=folder))
    tune = tune_results.results(folder, [[10.0, 10.1], [8.0, 8.1], [12.0]], tune_results.BUCKETS, failed=[2])
    yield "tune", tuning_data(tune, ranked(tune))
    status = Status(state="windows", step=40, running_s=9.5, every_n_steps=500, num_windows=1, next_window=520)
    yield "ask", JobAnswer(id="0" * 32, text="Step 40.", outcome="done", status=status)


def test_results_of_experiments_fit_their_schemas(tmp_path: Path) -> None:
    found = set()
    for name, data in results(tmp_path):
        content = json.loads(msgspec.json.encode(data))
        assert not schemas.faults(name, content)
        assert_strict(name, content)
        found.add(name)
    assert found | {line.split()[0] for line in LINES} | {"demo"} == set(commands_with_json())


def assert_strict(name: str, content: Any) -> None:
    """A key more at the top, or one less, and one more in the first object within, are refused."""
    changed = copy.deepcopy(content)
    if isinstance(changed, list):
        changed = {"rows": changed}
    changed["another"] = 1
    assert schemas.faults(name, changed)
    for key in content if isinstance(content, dict) else ():
        less = {other: value for other, value in content.items() if other != key}
        if key not in ("against", "spec"):
            assert schemas.faults(name, less), key
