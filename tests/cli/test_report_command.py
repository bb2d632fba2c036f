from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.report.runs import window, write


def test_the_command_makes_the_page_and_says_where_it_is(tmp_path: Path) -> None:
    write(tmp_path / "run", window())
    target = tmp_path / "page.html"
    result = invoke("report", str(tmp_path / "run"), "-o", str(target), env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert f"The page is {target} (0." in result.output
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_record_s_file_serves_as_well_as_its_folder_and_several_are_compared(tmp_path: Path) -> None:
    runs = [str(write(tmp_path / name, window()) / "overlap.jsonl") for name in ("one", "two")]
    target = tmp_path / "page.html"
    result = invoke("report", *runs, "-o", str(target))
    assert result.exit_code == 0, result.output
    assert "2 runs compared" in target.read_text(encoding="utf-8")


def test_json_prints_the_results_alone_on_stdout(tmp_path: Path) -> None:
    write(tmp_path / "run", window())
    target = tmp_path / "page.html"
    result = invoke("report", str(tmp_path / "run"), "-o", str(target), "--json")
    found = json.loads(result.stdout)
    assert found["page"] == str(target)
    assert found["bytes"] == target.stat().st_size
    assert found["runs"][0]["figures"]["speedup_vs_sequential"]["value"] > 0.1


@pytest.mark.parametrize("runs", [["nowhere"], ["run", "nowhere"]])
def test_a_record_that_is_not_there_gives_one_line_and_no_page(tmp_path: Path, runs: list[str]) -> None:
    write(tmp_path / "run", window())
    target = tmp_path / "page.html"
    result = invoke("report", *(str(tmp_path / run) for run in runs), "-o", str(target))
    assert result.exit_code == 2
    assert result.output.startswith("Error: no record at")
    assert result.output.count("\n") == 1
    assert not target.exists()


def test_a_page_that_cannot_be_written_gives_one_line(tmp_path: Path) -> None:
    write(tmp_path / "run", window())
    result = invoke("report", str(tmp_path / "run"), "-o", str(tmp_path / "no" / "page.html"))
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.output


def test_a_run_must_be_given() -> None:
    assert invoke("report").exit_code == 2


@pytest.mark.parametrize("run", ["run", "run/overlap.jsonl", "."])
def test_the_page_of_one_run_goes_into_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    write(tmp_path / "run", window())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = invoke("report", str(tmp_path / run), env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert f"The page is {tmp_path / 'run' / 'report.html'} (0." in result.output
    assert (tmp_path / "run" / "report.html").exists()
    assert not list(elsewhere.iterdir())


def test_the_page_of_several_runs_goes_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write(tmp_path / name, window())) for name in ("one", "two")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = invoke("report", *runs)
    assert result.exit_code == 0, result.output
    assert [file.name for file in elsewhere.iterdir()] == ["report.html"]


def test_a_folder_whose_name_is_no_text_has_json_too(tmp_path: Path) -> None:
    run = write(tmp_path / "run\udcff", window())
    for command in ("show", "report"):
        result = invoke(command, str(run), "--json")
        assert result.exit_code == 0, result.output
        assert "run?" in result.stdout
