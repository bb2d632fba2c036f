from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.cli import main
from tests.analysis.communication.layouts import ACTIVATION, Layout, by_hand
from tests.report.mutations import mutated
from tests.report.runs import window, write
from tests.report.traffic_runs import write_run
from tests.toggling import at_night

LAYOUT = Layout(2, 2, 2, ranks_per_host=4)


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["traffic", *map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), LAYOUT, windows=3)


def test_the_tables_say_what_is_sent_and_that_steps_agree(folder: Path) -> None:
    found = run(folder)
    assert found.exit_code == 0, found.output
    for words in (
        "A step of all ranks, 2 hosts, window 0",
        "reduce_scatter",
        "Every counted step sent the same messages as the recorded step",
        "Bytes sent between ranks, KiB (rows send, columns receive)",
    ):
        assert words in " ".join(found.output.split())


def test_json_has_the_matrix_of_the_job_and_of_another_mapping(folder: Path) -> None:
    found = run(folder, "--mapping", "tp-pp-dp", "--json")
    assert found.exit_code == 0, found.output
    content = json.loads(found.output)
    as_run, other = content["mappings"]
    assert (as_run["mapping"], as_run["as_run"], other["mapping"]) == ("tp-dp-pp", True, "tp-pp-dp")
    np.testing.assert_allclose(as_run["sent_bytes"], by_hand(LAYOUT), rtol=1e-12)
    crossing = {row["dimension"]: row["between_hosts_bytes"] for row in as_run["dimensions"]}
    assert crossing["pipeline"] == 24 * ACTIVATION
    assert {row["dimension"]: row["between_hosts_bytes"] for row in other["dimensions"]}["pipeline"] == 0
    assert (content["num_steps"], content["num_alike"]) == (3 * 8 * 16, 3 * 8 * 16)


def test_hosts_have_names_or_if_asked_for_numbers(folder: Path) -> None:
    assert json.loads(run(folder, "--by", "host", "--json").output)["mappings"][0]["labels"] == ["node-0", "node-1"]
    shown = run(folder, "--by", "host", "--no-hosts", "--json").output
    assert json.loads(shown)["mappings"][0]["labels"] == ["host 0", "host 1"]
    assert "node-" not in shown


def test_pictures_are_written(folder: Path, tmp_path: Path) -> None:
    found = run(folder, "--order", "physical", "--svg", tmp_path / "a.svg")
    assert found.exit_code == 0, found.output
    assert "The matrix is drawn in" in found.output
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert sum(node.get("class") == "cell" for node in root.iter()) == np.count_nonzero(by_hand(LAYOUT))
    if importlib.util.find_spec("matplotlib") is None:
        refused = run(folder, "--png", tmp_path / "a.png")
        assert "matplotlib is not installed: pip install 'overlap-callbacks[plots]'" in refused.output
    else:
        assert run(folder, "--png", tmp_path / "a.png").exit_code == 0
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_of_many_ranks_is_shown_by_host(tmp_path: Path) -> None:
    write_run(tmp_path, Layout(8, 2, 8, ranks_per_host=8))
    content = json.loads(run(tmp_path, "--json").output)
    assert content["mappings"][0]["by"] == "host"
    assert content["mappings"][0]["labels"] == [f"host {number}" for number in range(16)]
    assert "The matrix is too large for a terminal: overlap traffic --svg or --png draw it." in run(tmp_path).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mapping", "tp-pp"], "mapping must name each dimension of the job once"),
        (["--ranks-per-host", "0"], "0 is not in the range x>=1"),
        (["--svg", "/nowhere/a.svg"], "--svg /nowhere/a.svg cannot be written"),
        (["--algorithm", "nvls"], "'nvls' is not one of 'auto', 'ring', 'tree'"),
    ],
)
def test_wrong_use_is_named(folder: Path, arguments: list[str], message: str) -> None:
    found = run(folder, *arguments)
    assert found.exit_code != 0
    assert message in found.output
    assert "Traceback" not in found.output


def test_a_record_without_messages_says_so(tmp_path: Path) -> None:
    write(tmp_path, window())
    found = run(tmp_path)
    assert found.exit_code == 3
    assert "has no messages: it is of an earlier version, or no window was measured" in found.output.replace("\n", " ")


@pytest.mark.parametrize("part", at_night(range(4), (1, 2, 3)))
def test_no_record_ends_the_command_in_a_traceback(folder: Path, part: int, tmp_path: Path) -> None:
    whole = (folder / FILE_NAME).read_bytes().splitlines()
    # Faults are to be in what this command reads, and not in the tables of kernels.
    line = {name: value for name, value in json.loads(whole[1]).items() if name not in ("samples", "kernels", "pairs")}
    record = b"\n".join([whole[0], json.dumps({**line, "samples": []}).encode()])
    for seed in range(40 * part, 40 * part + 40):
        (tmp_path / FILE_NAME).write_bytes(mutated(record, seed))
        found = run(tmp_path, *(["--json"], ["--mapping", "tp-pp-dp", "--svg", tmp_path / "a.svg"], [])[seed % 3])
        assert isinstance(found.exception, (SystemExit, type(None))), (seed, found.exc_info)
