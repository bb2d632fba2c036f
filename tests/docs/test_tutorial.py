"""The tutorial: its screens are what the product prints of its runs' records, and its job does what it says.

The records in ``tutorial/`` are those of the runs that the text tells of, without what no screen shows.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from overlap_callbacks.report import record
from tests.commands import invoke
from tests.distributed import run_script
from tests.docs.conftest import DOCS, ROOT
from tests.margins import PATIENCE_S

TEXT = (DOCS / "tutorial.md").read_text()
RECORDS = Path(__file__).parent / "tutorial"
_BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?")
# What stands for lines that are left out.
_CUT = "..."


def screens() -> list[tuple[str, list[str]]]:
    """Each command of the text, and the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for block in _BLOCK.findall(TEXT):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


SCREENS = screens()
JOBS = [(command, lines) for command, lines in SCREENS if command.startswith("torchrun ")]


def test_the_tutorial_has_at_most_1400_words() -> None:
    assert len(TEXT.split()) <= 1400


def test_screens_are_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RECORDS, tmp_path / "tutorial")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    seen, last = [], None
    for command, lines in SCREENS:
        if command == "echo $?":
            assert last is not None
            assert lines == [str(last.exit_code)]
        elif command.startswith("overlap "):
            last = invoke(*shlex.split(command)[1:])
            check_shown(lines, last.stdout)
            seen.append(command.split()[1])
    assert seen.count("show") >= 3
    assert seen.count("check") >= 2


def check_shown(lines: list[str], printed: str) -> None:
    """Without cuts all of it is shown; each piece between cuts must be there whole, in this order."""
    everything = [line.rstrip() for line in printed.splitlines()]
    if _CUT not in lines:
        assert lines == everything
    rest = "\n".join(["", *everything, ""])
    for piece in filter(str.strip, "\n".join(["", *lines, ""]).split(f"\n{_CUT}\n")):
        wanted = "\n" + piece.strip("\n") + "\n"
        assert wanted in rest, f"{wanted} is not in {rest}"
        rest = "\n" + rest.split(wanted, 1)[1]


# Runs the example of its first argument with the others, and notes each loss.
NOTING = """
import runpy
import sys

import torch

backward = torch.Tensor.backward


def noted(loss):
    with open(f"losses-{torch.distributed.get_rank()}", "a") as file:
        file.write(f"{loss.item().hex()}\\n")
    backward(loss)


torch.Tensor.backward = noted
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def run_job(command: str, *more: str, library: bool = True) -> tuple[list[str], list[list[str]]]:
    """What the job of a command says, and the losses of each rank. ``test_examples.py`` starts one by ``torchrun``."""
    torchrun, option, ranks, script, *arguments = shlex.split(command)
    assert (torchrun, option, script) == ("torchrun", "--nproc-per-node", "examples/micro_batches.py")
    Path("noting.py").write_text(NOTING)
    variables = {"CUDA_VISIBLE_DEVICES": ""} | ({} if library else {"OVERLAP_CALLBACKS": "off"})
    told = [str(ROOT / script), *arguments, *more]
    found = run_script(Path("noting.py").absolute(), told, int(ranks), variables, 3 * PATIENCE_S)
    files = [Path(f"losses-{rank}") for rank in range(int(ranks))]
    losses = [file.read_text().split() for file in files]
    for file in files:
        file.unlink()
    return "".join([rank.output for rank in found]).splitlines(), losses


def form_of(line: str) -> str:
    """A line without its numbers."""
    return _NUMBER.sub("#", re.sub(r"pytorch [^,]+", "pytorch #", line))


# The first window of the arm ends by step 154.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("before", 30),
        pytest.param("compared", 160, marks=pytest.mark.nightly),
        pytest.param("after", 30, marks=pytest.mark.nightly),
        ("decided", 30),
    ],
)
def test_the_job_says_what_the_text_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ((command, lines),) = [job for job in JOBS if job[0].endswith(f" tutorial/{name}")]
    said, _ = run_job(command, "--steps", str(steps))
    forms = [form_of(line) for line in said]
    for line in lines:
        # Deciding takes six windows and more.
        assert line == _CUT or "[OC142]" in line or form_of(line) in forms, f"{line} is not in\n" + "\n".join(said)
    found = record.read(tmp_path / "tutorial" / name)
    assert [report.arm.name for report in found.arms] == ["defer"] * (name == "compared")
    assert found.summary.measured or name != "compared"


@pytest.mark.slow
def test_activations_that_are_computed_again_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = "torchrun --nproc-per-node 2 examples/micro_batches.py --defer --steps 25"
    _, losses = run_job(job, library=False)
    assert [len(set(of_rank)) for of_rank in losses] == [4 * 25, 4 * 25]
    assert run_job(job, "--recompute", "--decide")[1] == losses


@pytest.mark.nightly
def test_the_whole_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way figures go; how large they are depends on the machine."""
    monkeypatch.chdir(tmp_path)
    for command, _ in JOBS[:-1]:
        run_job(command)
    shutil.copytree(RECORDS / "decided", tmp_path / "tutorial" / "decided")
    found = {name: record.read(tmp_path / "tutorial" / name) for name in ("before", "compared", "after")}
    messages = [
        sum([row.messages for row in found[name].valid_windows[-1].collectives]) for name in ("before", "after")
    ]
    assert messages[0] == 4 * messages[1]
    assert found["after"].figures["comm_ms"].value < found["before"].figures["comm_ms"].value
    assert "defer-reductions" in [advice.topic for advice in found["before"].bottleneck().advice]
    assert found["compared"].arms
    for command, lines in SCREENS:
        if command.startswith("overlap "):
            result = invoke(*shlex.split(command)[1:])
            assert result.exit_code in (0, 1, 3), result.output
            assert result.stdout or not lines


@pytest.mark.nightly
@pytest.mark.timeout(6 * PATIENCE_S)
def test_the_job_tunes_itself_and_its_losses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arm turned on they are, bit by bit, those of the job without the library."""
    monkeypatch.chdir(tmp_path)
    command, _ = JOBS[-1]
    _, losses = run_job(command)
    decision = record.read(tmp_path / "tutorial" / "decided").decision
    assert decision is not None
    assert decision.kept == "keep_activations"
    assert run_job(command, library=False)[1] == losses
