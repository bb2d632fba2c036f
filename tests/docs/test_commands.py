"""Every ``overlap`` command of the README and the docs: parsed as printed, and run on small stored records and traces.

Those that start jobs run at night, on two ranks.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from overlap_callbacks.cli import _BY_NAME, main
from tests import kineto
from tests.analysis.bench_results import gemm_results, transfer_results
from tests.commands import invoke
from tests.docs.conftest import DOCS, ROOT, SKILL
from tests.docs.test_messages import HOLE, every_text
from tests.docs.test_tutorial import RECORDS
from tests.margins import PATIENCE_S
from tests.report.runs import window, write
from tests.report.scaling_runs import write_sized
from tests.report.test_causal import job as delayed_job
from tests.report.traffic_runs import Layout, with_sizes, write_run
from tests.traces import nsys_file

FILES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", SKILL]
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?overlap ((?:" + "|".join(_BY_NAME) + r")\b.*)$", re.MULTILINE)
_INLINE = re.compile(r"`overlap ((?:" + "|".join(_BY_NAME) + r") [^`]*)`")
_SHELL = ("|", "||", ";", "&&", ">")
# Commands that start jobs, and what makes them short. Options may follow.
_SHORT = {
    "tune": ["--steps", "4", "--warmup", "1", "--repeats", "1", "--minutes", "2"],
    "bench": ["--quick", "--ranks", "2", "--rounds", "2", "--block-s", "0.001"],
    "study": ["--quick", "--minutes", "4", "--scale", "0.01", "--steps", "1"],
    "demo": ["--steps", "100"],
    "check": ["--windows", "1"],
}


def words_of(line: str) -> list[str]:
    """The arguments up to what only the shell reads."""
    words = shlex.split(line, comments=True)
    return words[: next((at for at, word in enumerate(words) if word in _SHELL), len(words))]


def printed() -> Iterator[Any]:
    seen = set()
    for file in FILES:
        for block in _FENCED.findall(file.read_text()):
            for line in _LINE.findall(block):
                words = words_of(line)
                if tuple(words) not in seen:
                    seen.add(tuple(words))
                    yield pytest.param(words, id=f"{file.stem}: {' '.join(words)}")


def starts_a_job(words: list[str]) -> bool:
    return words[0] in ("tune", "bench", "study", "demo") or "--" in words


PRINTED = list(printed())
JOBS = [one for one in PRINTED if starts_a_job(one.values[0])]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("here")
    for number in (1, 2, 3):
        write_sized(folder / f"RUN{number}", 2, settings={"bucket_mb": number})
    write(folder / "checked", window(0), window(1))
    write(folder / "overlap_runs" / "20260101-120000", *[with_sizes(window(i)) for i in range(13)])
    delayed_job(folder / "delays")
    write_run(folder / "RUN", Layout(2, 2, 2, ranks_per_host=4))
    for name in ("baselines/RUN", "overlap_runs/<time>", "newer/overlap_runs"):
        newest = write_run(folder / name, Layout(1, 1, 8, ranks_per_host=4))
    shutil.move(newest, folder / "overlap_runs" / "newest")
    for name in ("trace", "rank0", "rank1", "overlapped", "run/rank0", "traces/rank0"):
        kineto.write(folder_of(folder / f"{name}.json.gz"), kineto.training(), **kineto.job(int(name.endswith("1"))))
    kineto.write(folder / "sequential.json.gz", kineto.training(overlapped=False), **kineto.job())
    kineto.write(folder / "merged.json", kineto.training(), **kineto.job())
    nsys_file.of_kineto(folder / "trace.json.gz", folder / "report.sqlite")
    for name, results in (("collectives", transfer_results(0.0, 2.0)), ("gemm-allreduce", gemm_results())):
        bench = dataclasses.replace(results, folder=folder_of(folder / f"overlap_bench/TIME-{name}/x").parent)
        lines = bench.open()
        for line in bench.lines:
            lines.write(line)
        lines.close()
    (folder / "overlap_study" / "FOLDER").mkdir(parents=True)
    job = (ROOT / "tests/experiments/job.py").read_text().replace("parse_args()", "parse_known_args()[0]")
    (folder / "train.py").write_text(job)
    shutil.copytree(RECORDS, folder / "tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def folder_of(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def expanded(words: list[str]) -> list[str]:
    """What the shell makes of patterns that are not quoted."""
    return [name for word in words for name in (sorted(glob.glob(word)) if word.startswith("rank*") else [word])]


def parsed(words: list[str]) -> None:
    context = main.make_context("overlap", list(words))
    command: click.Command | None = main
    rest = list(words)
    while isinstance(command, click.Group):
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context, resilient_parsing=False)
        held = context._protected_args if hasattr(context, "_protected_args") else context.protected_args  # Click 8.1
        rest = [*held, *context.args] if isinstance(command, click.Group) else []


@pytest.mark.parametrize("words", PRINTED)
def test_a_printed_command_is_parsed_as_it_is(here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(here)
    parsed(expanded(words))


@pytest.mark.parametrize("words", [one for one in PRINTED if one not in JOBS])
def test_a_printed_command_runs(here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(here)
    # Saving a view takes an account.
    result = invoke(*expanded(words), *(["--dry-run"] if words[0] == "workspace" else []))
    # The record is not of the job that the page predicts, and nothing has been tried.
    judges = words[0] == "check" or {"--check", "--ledger"} & set(words)
    assert result.exit_code in ((0, 1, 3) if judges else (0,)), result.output
    assert result.stdout or words[0] in ("report", "trace")


@pytest.mark.nightly
@pytest.mark.parametrize("words", JOBS)
def test_a_printed_command_that_starts_jobs_runs_on_two_ranks(here: Path, words: list[str]) -> None:
    if "deepspeed" in words:
        pytest.skip("its launcher takes GPUs")
    if any(option.endswith("-cap") for option in words):
        pytest.skip("caps take a GPU and root")
    if "--resume" in words and words[0] == "study":
        pytest.skip("there is nothing to go on with")
    at = words.index("--") if "--" in words else len(words)
    short = [] if "--resume" in words else _SHORT[words[0]]
    if "--groups" in words:  # of four ranks that are two apart
        short = [*short, "--ranks", "8", "--max-size", "64"]
    if "--against" in words:  # the stored runs are of another job
        short = [*short, "--force"]
    # One process, which forks the second rank.
    job = ["1" if word == "8" else word.replace("…", "train.py") for word in words[at:]]
    own = ["another" if word == "checked" else word for word in words[:at]]
    line = [sys.executable, "-m", "overlap_callbacks", *own, *short, *job]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        line, cwd=here, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    assert job or "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line", sorted({line for file in FILES for line in _INLINE.findall(file.read_text())}), ids=lambda line: line
)
def test_options_named_in_the_text_exist(line: str) -> None:
    check_options(words_of(line))


def test_options_that_messages_name_exist() -> None:
    named = re.compile(r"\boverlap ((?:" + "|".join(_BY_NAME) + r")\b[^.;:\n]*)")
    found = [line for text in every_text() if "``" not in text for line in named.findall(text)]
    assert len(found) > 20
    for line in found:
        own = re.split(", | -- ", line)[0].replace(HOLE, "x").replace("`", "")
        check_options([*own.split()[:2], *re.findall(r"(?<!\S)--[a-z][a-z-]*", own)])


def check_options(words: list[str]) -> None:
    """Refuse options that the command does not have."""
    context, command = click.Context(main), main.get_command(click.Context(main), words[0])
    if isinstance(command, click.Group) and len(words) > 1 and words[1] in command.commands:
        command = command.get_command(context, words[1])
    assert command is not None, words
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("-") and word != "--"} <= known
