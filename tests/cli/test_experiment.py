"""How commands that run experiments end, whenever Ctrl-C comes."""

from __future__ import annotations

import signal
from pathlib import Path

import click
import pytest

from overlap_callbacks.cli._output import program
from overlap_callbacks.cli.experiment import Ending, finish, new_folder, reporting_interrupts, run_to_end


def interrupted(folder: Path | None) -> None:
    with reporting_interrupts("overlap tune") as folder_is:
        if folder is not None:
            folder_is(folder)
        raise KeyboardInterrupt


def test_ctrl_c_while_nothing_runs_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(SystemExit) as ended:
            interrupted(folder)
        assert ended.value.code == 130
        assert capsys.readouterr().err == "Interrupted before anything was measured.\n"
    (tmp_path / "tune.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit):
        interrupted(tmp_path)
    kept = f"Interrupted: what was measured is kept. Go on with: {program()} tune --resume {tmp_path}\n"
    assert capsys.readouterr().err == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_ends_what_runs_and_how_to_go_on_is_said(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tests that run under nohup inherit a signal that is ignored, and what is ignored stays so.
    handler = signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    before = signal.getsignal(signal.SIGTERM)

    def run() -> bool:
        signal.raise_signal(number)
        return True

    try:
        ending = run_to_end(run)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(number, handler)
    assert ending is Ending.INTERRUPTED
    with pytest.raises(SystemExit) as ended:
        finish(ending, tmp_path, "overlap study", measured=True)
    assert ended.value.code == 130
    assert f"Go on with: {program()} study --resume {tmp_path}" in capsys.readouterr().err


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run() -> bool:
        signal.raise_signal(signal.SIGHUP)
        return True

    try:
        assert run_to_end(run) is not Ending.INTERRUPTED
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_ends_that_are_no_interrupts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(run_to_end(lambda: True), tmp_path, "overlap study", measured=True)
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as ended:
        finish(run_to_end(lambda: False), tmp_path, "overlap study", measured=False)
    assert ended.value.code == 2
    assert "The time was over before all runs were done (--minutes)." in capsys.readouterr().err

    def fails() -> bool:
        raise OSError(28, "No space left on device")

    with pytest.raises(click.ClickException, match=r"the results cannot be written: .*No space left"):
        run_to_end(fails)


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tune.jsonl").touch()
    assert new_folder(tmp_path, "x", "other.jsonl") == tmp_path
    with pytest.raises(ValueError, match="has results already: go on with --resume"):
        new_folder(tmp_path, "x", "tune.jsonl")
    assert new_folder(None, "overlap_bench", "x", suffix="gemm").name.endswith("-gemm")
