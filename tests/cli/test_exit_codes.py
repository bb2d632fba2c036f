"""One table of exit codes for all commands, and what a newcomer types wrong."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import pytest

from overlap_callbacks.cli import _BY_NAME, main, run
from tests import kineto
from tests.analysis.communication.layouts import Layout
from tests.commands import invoke
from tests.margins import PATIENCE_S
from tests.report.runs import window, write
from tests.report.traffic_runs import write_run
from tests.traces.events import MS, all_reduce, gemm, short_trace


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, traces, and what is neither."""
    folder = tmp_path_factory.mktemp("here")
    write(folder / "run", window(0), window(1), window(2))
    write(folder / "bare", msgspec.structs.replace(window(), pictures=(), collectives=(), samples=()))
    write(folder / "invalid", msgspec.structs.replace(window(), valid=False))
    write_run(folder / "job", Layout(2, 2, 2, ranks_per_host=4))
    kineto.write(folder / "overlapped.json", list(kineto.training(overlapped=True)))
    kineto.write(folder / "sequential.json", list(kineto.training(overlapped=False)))
    kineto.write(folder / "silent.json", [kineto.step(0, 0, 9 * MS), gemm(0, 1), gemm(2, 3)])
    kineto.write(folder / "quiet.json", [kineto.step(0, 0, 9 * MS), gemm(0, 1), gemm(2, 4)])
    kineto.write(folder / "communicates.json", [kineto.step(0, 0, 9 * MS), gemm(0, 1), all_reduce(2, 3)])
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("no record\n")
    return folder


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("show run", 0), ("show run --all", 0), ("show --json run", 0), ("show invalid", 0),
        ("show nowhere", 2), ("show notes.txt", 2), ("show empty", 2), ("show run --al", 2), ("show", 2),
        ("report run -o page.html", 0), ("report overlapped.json -o page.html", 0), ("report nowhere", 2),
        ("report notes.txt", 2), ("report run --axis nothing", 2), ("report run -o none/page.html", 2),
        ("check run --max-exposed 0.1", 0), ("check run --max-exposed 0.01", 1), ("check run --max-slowdown 0.14", 3),
        ("check invalid --max-exposed 0.1", 3), ("check nowhere --max-exposed 0.1", 2), ("check run", 2),
        ("check empty --max-exposed 0.1", 2), ("check --max-exposed 0.1 -- false", 2), ("check run --max-exposed x", 2),
        ("analyze overlapped.json", 0), ("analyze overlapped.json --csv steps", 0), ("analyze nowhere", 2),
        ("analyze notes.txt", 2), ("analyze empty", 2), ("analyze overlapped.json --rule x", 2),
        ("analyze overlapped.json --step nothing", 2), ("analyze overlapped.json --step Profiler", 0),
        ("compare overlapped.json sequential.json", 0), ("compare silent.json quiet.json", 3),
        ("compare silent.json communicates.json", 2), ("compare nowhere silent.json", 2), ("compare silent.json", 2),
        ("traffic job", 0), ("traffic bare", 3), ("traffic nowhere", 2), ("traffic job --mapping tp", 2),
        ("traffic job --link-peak fast", 2),
        ("trace run -o t.json", 0), ("trace bare -o t.json", 3), ("trace run -o none/t.json", 2),
        ("trace run --window 7", 2), ("trace nowhere", 2), ("trace run --for nobody", 2),
        ("trace run --for inductor -o t.json", 3), ("trace invalid --for inductor", 3),
        ("predict --model gpt2 --dp 2", 0), ("predict", 0), ("predict --model gpt9", 2), ("predict --dp x", 2),
        ("predict --model gpt2 --dp 2 --check nowhere", 2), ("predict --model gpt2 --dp 2 --check bare", 3),
        ("predict --ledger", 2), ("predict --ledger run", 3), ("predict --ledger nowhere", 2), ("predict run", 2),
        ("predict --ledger run --dp 2", 2), ("predict --ledger empty", 2),
        ("workspace --entity a --project p --dry-run", 0), ("workspace --entity a", 2), ("workspace", 2),
        ("tune", 2), ("tune --arg a=1 -- true", 2), ("tune --arg a=1,2 --resume nowhere", 2),
        ("bench gemm-allreduce --n x", 2), ("bench gemm-allreduce --resume empty", 2), ("bench products", 2),
        ("study --model gpt9", 2), ("study --resume empty", 2), ("demo --steps 0", 2), ("demo --hidden 30", 2),
        ("shwo run", 2), ("--version", 0), ("--help", 0), ("--nothing", 2),
        *[(f"{name} --help", 0) for name in _BY_NAME],
    ],
)  # fmt: skip
def test_each_command_ends_with_the_code_of_the_table(
    here: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    monkeypatch.chdir(here)
    result = invoke(*line.split())
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    if code == 2:
        assert result.stdout == ""
        assert "Error: " in result.stderr


@pytest.mark.parametrize("name", _BY_NAME)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130), (click.ClickException("unreadable"), 2),
        (click.UsageError("wrong"), 2), (BrokenPipeError(), 0), (SystemExit(3), 3),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_however_a_command_ends_the_code_is_of_the_table(
    name: str, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: Any) -> NoReturn:
        raise error

    command = main.get_command(click.Context(main), name)
    assert command is not None
    monkeypatch.setattr(command, "invoke", ends)
    monkeypatch.setattr(command, "parse_args", lambda ctx, args: [])
    monkeypatch.setattr("overlap_callbacks.cli.leave_pipe", lambda: None)
    assert invoke(name).exit_code == code


def test_an_error_of_ours_is_no_broken_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("an error of ours")

    monkeypatch.setattr("overlap_callbacks.cli.main", fails)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    assert "RuntimeError: an error of ours" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [("1", 0), ("0.01", 1)])
def test_a_reader_that_leaves_early_does_not_change_the_answer(here: Path, number: str, code: int) -> None:
    overlap = f"{sys.executable} -m overlap_callbacks"
    for command, expected in (
        (f"check run --json --max-exposed {number}", code), ("show run --all", 0), ("analyze overlapped.json", 0),
    ):  # fmt: skip
        line = f"{overlap} {command} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", line], cwd=here, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, done.stderr) == (expected, ""), command


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("--help | true", 0, ""), ("show --help | true", 0, ""), ("show nowhere 2>&1 | true", 2, ""),
        ("nothing 2>&1 | true", 2, ""), ("show run 2>&-", 0, ""), ("show nowhere 2>&-", 2, ""),
        ("check run --max-exposed 0.01 >&-", 1, ""), ("report run -o page.html 2>&-", 0, ""),
        *[
            (f"{command} > /dev/full", 2, "Error: the output cannot be written: No space left on device\n")
            for command in ("--help", "show run", "show run --json", "check run --max-exposed 0.1")
        ],
    ],
)  # fmt: skip
def test_output_that_nobody_takes_is_no_broken_limit(here: Path, line: str, code: int, says: str) -> None:
    whole = f"{sys.executable} -m overlap_callbacks {line}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", whole], cwd=here, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_ctrl_c_ends_the_processes_that_read_traces_in_silence(tmp_path: Path) -> None:
    first = kineto.write(tmp_path / "rank0.json", kineto.training(steps=100), **kineto.job())
    for number in (1, 2, 3):
        (tmp_path / f"rank{number}.json").symlink_to(first)
    command = [sys.executable, "-m", "overlap_callbacks", "analyze", str(tmp_path), "--processes", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + PATIENCE_S
    while len(children.read_text().split()) < 2:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output, errors) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("shwo run", "there is no command shwo: did you mean show?"),
        ("SHOW run", "there is no command SHOW: did you mean show?"),
        ("check --max-exposed 0.1 -- true", "the command left no record: attach the library in it"),
        ("check run --max_exposed 0.1", "Put -- before a command that is run.\n"),
        ("check run --max exposed_coms_ms=5", "did you mean exposed_comm_ms"),
        ("check run --max exposed=5", "there is no such figure; did you mean "),
        ("predict --model gpt2 --dp 8 --mapping tp", "such as tp-dp-pp; the job has data (8); got 'tp'"),
        ("check run --max =5", "there is no such figure; there are "),
        ("check --max-exposed 0.1 --timeout nan -- true", "nan is no amount"),
        ("tune --arg a=1,2 --minutes inf -- true", "inf is no amount"),
        ("anlyze overlapped.json", "did you mean analyze?"),
        ("bench gemm", "there is no command gemm: did you mean gemm-allreduce?"),
        ("predict --model gpt2 --utilisation 40", "got 40.0; did you mean 0.4?"),
        ("run", "there is no command run: did you mean show run?"),
        ("overlapped.json", "did you mean analyze overlapped.json?"),
        ("nothing-like-it", "there is no command nothing-like-it\n"),
        ("show overlapped.json", "For a trace: overlap analyze overlapped.json"),
        ("show .", "For a trace: overlap analyze ."),
        ("check overlapped.json --max-exposed 0.1", "For a trace: overlap analyze overlapped.json"),
        ("traffic overlapped.json", "For a trace: overlap analyze overlapped.json"),
        ("trace overlapped.json", "For a trace: overlap analyze overlapped.json"),
        ("predict --model gpt2 --dp 2 --check overlapped.json", "For a trace: overlap analyze overlapped.json"),
        ("analyze run", "For a run: overlap show run"),
        ("analyze run/overlap.jsonl", "For a run: overlap show run/overlap.jsonl"),
        ("compare run bare", "For a run: overlap show run"),
    ],
)
def test_what_was_meant_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str) -> None:
    monkeypatch.chdir(here)
    if line == "show .":
        monkeypatch.chdir(here / "empty")
        kineto.write(here / "empty" / "rank0.json", short_trace())
    result = invoke(*line.split())
    assert result.exit_code == 2
    assert says in result.stderr
    (here / "empty" / "rank0.json").unlink(missing_ok=True)


def test_the_help_has_the_first_four_first_and_no_line_is_cut() -> None:
    lines = invoke("--help", env={"COLUMNS": "80"}).stdout.splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in _BY_NAME]
    assert named[:4] == ["show", "report", "check", "analyze"]
    assert sorted(named) == sorted(_BY_NAME)
    assert not [line for line in lines if (line.endswith("...") and "]..." not in line) or len(line) > 80]


def test_options_may_follow_arguments_in_every_command() -> None:
    def of(command: click.Command) -> list[click.Command]:
        return (
            [one for sub in command.commands.values() for one in of(sub)]
            if isinstance(command, click.Group)
            else [command]
        )

    for name in _BY_NAME:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for one in of(command):
            assert one.allow_interspersed_args, name


def test_the_demo_ends_with_its_page_and_commands_that_work_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train(config: Any) -> None:
        trained.append(config)
        write(Path(config.run_dir), window(0), window(1))

    monkeypatch.setattr("overlap_callbacks.cli.demo.command.train", train)
    monkeypatch.chdir(tmp_path)
    for found, called in ((None, "overlap"), (None, "python"), ("/bin/overlap", "overlap")):
        program = tmp_path / ".venv" / "bin" / "overlap"
        monkeypatch.setattr("shutil.which", lambda name, found=found: found)
        monkeypatch.setattr(sys, "argv", [str(program if called == "overlap" else "/x/__main__.py")])
        folder = f"a run {called} {found}".replace("/", "-")
        result = invoke("demo", "--steps", "120", "--control", "--run-dir", folder)
        assert result.exit_code == 0, result.output
        assert "buckets of 25 MiB: two to four minutes" in " ".join(result.stderr.split())
        *_, head, smaller, both, check = lines = result.stderr.splitlines()
        assert f"The page is {folder}/report.html" in lines
        assert (tmp_path / folder / "report.html").stat().st_size > 100_000
        assert head.endswith("docs/tutorial.md does:")
        expected = ["overlap" if found else ".venv/bin/overlap"]
        if called == "python":
            expected = [sys.executable, "-m", "overlap_callbacks"]
        for line, name in ((smaller, "demo"), (both, "report"), (check, "check")):
            words = shlex.split(line, comments=True)
            assert words[: len(expected) + 1] == [*expected, name]
            assert invoke(*words[len(expected) :]).exit_code == 0
        # The other demo is the same job but for its buckets.
        first, second = trained[-2:]
        assert second == dataclasses.replace(first, bucket_mb=5.0, run_dir=f"{folder}-5mb")
        assert ("In this shell, overlap is " in result.stderr) == (found is None)
    assert (tmp_path / "report.html").stat().st_size > 100_000
