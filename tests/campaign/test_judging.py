"""The judge of the campaign finds the faults that it should."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.campaign import command
from tests.campaign.case import Case
from tests.campaign.command import MAX_TRIES
from tests.campaign.judging import judge, unfinished_window
from tests.campaign.processes import Ending
from tests.campaign.running import Run, Said, kind_of

NOBODY: Any = None  # reads a record; there is none here
CASE = Case("made-up", "none", "nothing", lambda rank: None, says="gone", bound_s=5.0, record="none")
SENTENCE = Said(0, "WARNING", "overlap-callbacks: it is gone")


def _run(folder: Path, **changes: Any) -> Run:
    run = Run(
        [Ending(0, "", 1.0)],
        {"0.0.1": "a", "0.0.2": "b"},
        [Said(0, "WARNING", "overlap-callbacks: it is gone")],
        folder,
    )
    return replace(run, **changes)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a signal": ("ending", {"endings": [Ending(-signal.SIGABRT, "", 1.0)]}),
    "a hang": ("ending", {"endings": [Ending(None, "", 1.0)]}),
    "other weights": ("weights", {"steps": {"0.0.1": "a", "0.0.2": "c"}}),
    "a step less": ("weights", {"steps": {"0.0.1": "a"}}),
    "too late": ("time", {"endings": [Ending(0, "", 6.5)]}),
    "no sentence": ("sentence", {"said": []}),
    "two sentences": ("sentence", {"said": [SENTENCE] * 2}),
    "other words": ("sentence", {"said": [Said(0, "WARNING", "overlap-callbacks: it is here")]}),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str, tmp_path: Path) -> None:
    check, changes = WRONG[what]
    reference = _run(tmp_path, said=[])
    assert judge(CASE, _run(tmp_path), [reference], NOBODY).faults == {}
    assert set(judge(CASE, _run(tmp_path, **changes), [reference], NOBODY).faults) == {check}


def test_what_may_be_said_besides_does_not_stand_for_what_must_be_said(tmp_path: Path) -> None:
    late = Said(1, "WARNING", "overlap-callbacks: rank 1 is late")
    reference, patient = _run(tmp_path, said=[]), replace(CASE, may_say="is late")
    assert judge(patient, _run(tmp_path, said=[late, SENTENCE, late]), [reference], NOBODY).faults == {}
    assert set(judge(patient, _run(tmp_path, said=[late]), [reference], NOBODY).faults) == {"sentence"}
    assert set(judge(CASE, _run(tmp_path, said=[late, SENTENCE]), [reference], NOBODY).faults) == {"sentence"}


def test_a_fault_without_effect_is_found(tmp_path: Path) -> None:
    reference = _run(tmp_path, said=[])
    assert set(judge(replace(CASE, ends=True), _run(tmp_path), [reference], NOBODY).faults) == {"ending"}


def test_a_reference_that_hangs_is_no_reference(tmp_path: Path) -> None:
    reference = _run(tmp_path, said=[], endings=[Ending(None, "", 1.0)])
    assert "without the library hung" in judge(CASE, _run(tmp_path), [reference], NOBODY).faults["ending"]


def test_a_reference_that_fails_is_no_reference(tmp_path: Path) -> None:
    crash = _run(tmp_path, said=[], endings=[Ending(-signal.SIGABRT, "", 1.0)])
    for references in ([crash], [_run(tmp_path, said=[]), crash]):
        assert "without the library failed" in judge(CASE, _run(tmp_path), references, NOBODY).faults["ending"]


ABORT = Ending(-signal.SIGABRT, "", 1.0)
OF_TORCHRUN = Ending(1, "exitcode: -6 (pid: 7)\ntraceback : Signal 6 (SIGABRT) received by PID 7\n", 1.0)


@pytest.mark.parametrize(
    ("crashes", "runs", "ends", "crash"),
    [
        (0, 1, False, ABORT),
        (2, 3, False, ABORT),
        (1, 2, False, OF_TORCHRUN),
        (99, MAX_TRIES, False, ABORT),
        (1, 1, True, ABORT),
        # Nothing else is passed over.
        (1, 1, False, Ending(None, "", 1.0)),
        (1, 1, False, Ending(1, "RuntimeError: of the job\n", 1.0)),
        (1, 1, False, Ending(-signal.SIGSEGV, "", 1.0)),
    ],
)
def test_a_reference_that_torch_aborts_as_it_ends_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: int, runs: int, ends: bool, crash: Ending
) -> None:
    folders: list[Path] = []

    def run_job(case: Case, zygote: Any, plain: Any, folder: Path, **options: Any) -> Run:
        folders.append(folder)
        return _run(folder, endings=[crash if len(folders) <= crashes else Ending(0, "", 1.0)])

    monkeypatch.setattr(command, "run_job", run_job)
    found = command.reference(replace(CASE, ends=ends), NOBODY, tmp_path, seed=0, quick=True)
    assert len(folders) == len(set(folders)) == runs
    assert found.endings[0].code == (crash.code if crashes >= runs else 0)


def test_the_kind_of_an_error_is_that_of_the_traceback() -> None:
    output = "[rank1]: RuntimeError: Connection closed by peer\nException raised from recvBytes at Utils.hpp:685\n"
    assert kind_of(Ending(1, output, 1.0)) == "1 RuntimeError"
    assert kind_of(Ending(-signal.SIGINT, "KeyboardInterrupt\n", 1.0)) == "-SIGINT KeyboardInterrupt"


@pytest.mark.parametrize(
    ("lines", "window"),
    [
        (("block 0", "window 0", "block 1", "block 1"), 1),
        (("block 0", "window 0"), None),
        (("block 0", "arm 0", "block 1", "window 1"), None),
        (("block 1", "window 2"), None),  # the report of a later window: nothing is open
        ((), None),
    ],
)
def test_the_window_that_a_job_left_open_is_found(lines: tuple[str, ...], window: int | None, tmp_path: Path) -> None:
    path = tmp_path / "overlap.jsonl"
    assert unfinished_window(path) is None
    kinds = [line.split() for line in lines]
    whole = "".join(json.dumps({"record": kind, "window": int(number)}) + "\n" for kind, number in kinds)
    path.write_text(whole + '{"record":"wind')
    assert unfinished_window(path) == window


def test_a_reader_that_does_not_name_the_unfinished_window_is_found(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.record.mkdir(parents=True)
    (run.record / "overlap.jsonl").write_text('{"record":"block","window":3}\n')
    for shown, expected in (("- window 3 is unfinished: 1 timed blocks so far", set()), ("all is well", {"record"})):
        reader = Reader(shown)
        assert set(judge(replace(CASE, record="yes"), run, [_run(tmp_path, said=[])], reader).faults) == expected


class Reader:
    """Stands in for the process that reads the record."""

    def __init__(self, output: str) -> None:
        self._output = output

    def start(self, *_: Any) -> Any:
        return SimpleNamespace(runs=False, ending=lambda: Ending(0, self._output, 1.0))
