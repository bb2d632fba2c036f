"""``overlap ask`` without a job that answers, and ``overlap watch`` of a record that is being written."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from overlap_callbacks.analysis.results.frontier import HeldUp, StepFrontier
from overlap_callbacks.analysis.results.request import ANSWERS_FILE, REQUEST_FILE, JobAnswer, Status
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.monitor.background.mailbox import Mailbox
from overlap_callbacks.sinks import JsonlSink
from overlap_callbacks.sinks.jsonl import Writer
from tests import schemas
from tests.commands import invoke
from tests.margins import PATIENCE_S
from tests.monitor.jobs import wait_until
from tests.report.runs import run_info, window

# Ten steps of 10 ms; rank 1 holds the others up by 2 ms in each.
FRONTIER = StepFrontier(
    0, 9, 10, 2, {"forward": 60_000_000, "optimizer": 40_000_000}, {"forward": 60_000_000, "optimizer": 40_000_000},
    (HeldUp("forward", 1, 20_000_000),),
)  # fmt: skip
STATUS = Status(state="windows", step=7, running_s=0.1, every_n_steps=500, num_windows=0)


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[JsonlSink]:
    """A record that is being written."""
    sink = JsonlSink(tmp_path / "run")
    sink.open(run_info())
    sink.log(window(0))
    yield sink
    sink.close()


def test_nobody_answers(tmp_path: Path, sink: JsonlSink) -> None:
    result = invoke("ask", str(tmp_path / "run"), "window", "--timeout", "0.3")
    assert result.exit_code == 3
    assert "no answer within 0.3 s" in result.stderr
    assert os.listdir(tmp_path / "run") == [FILE_NAME]


def test_the_job_has_ended(tmp_path: Path, sink: JsonlSink) -> None:
    sink.close()
    result = invoke("ask", str(tmp_path), "window", "--timeout", "60")
    assert result.exit_code == 2
    assert "the job has ended" in result.stderr
    assert os.listdir(tmp_path / "run") == [FILE_NAME]


@pytest.fixture(scope="module")
def of_killed_job(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The record of a job whose process was killed."""
    run = tmp_path_factory.mktemp("run")
    program = f"""
from overlap_callbacks.sinks import JsonlSink
from overlap_callbacks.sinks.jsonl import Writer
from tests.report.runs import run_info
JsonlSink({str(run)!r}).open(run_info())
print("open", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"open\n"
        assert "no answer within" in invoke("ask", str(run), "status", "--timeout", "0.3").stderr
        job.kill()
    return (run / FILE_NAME).read_bytes()


def test_a_killed_job_is_not_waited_for(of_killed_job: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(of_killed_job)
    result = invoke("ask", str(tmp_path), "status")
    assert result.exit_code == 3
    assert "nobody will answer: rank 0's process was killed" in result.stderr
    assert os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize(
    ("what", "change", "told"),
    [
        ("another process has its id", lambda process: [process[0], str(os.getpid()), process[2]], True),
        ("another host", lambda process: ["0123456789ab", *process[1:]], False),
        ("not known", lambda _: [], False),
        ("made up", lambda process: [process[0], "9" * 99, "x"], False),
        ("made up", lambda process: [process[0], "init", "0"], False),
    ],
)
def test_whether_a_process_is_gone_is_told_without_doubt_only(
    what: str, change: Callable[[list[str]], list[str]], told: bool, of_killed_job: bytes, tmp_path: Path
) -> None:
    process = json.loads(of_killed_job)["process"]
    changed = " ".join(change(process.split()))
    (tmp_path / FILE_NAME).write_bytes(of_killed_job.replace(process.encode(), changed.encode()))
    said = invoke("ask", str(tmp_path), "status", "--timeout", "0.3").stderr
    assert ("nobody will answer" if told else "no answer within") in said


def test_a_job_that_has_started_again_is_asked(of_killed_job: bytes, tmp_path: Path) -> None:
    sink, is_gone, asked = JsonlSink(tmp_path), Writer.is_gone, list[Writer]()

    def begins_meanwhile(writer: Writer) -> bool:
        asked.append(writer)
        if len(asked) == 1:
            sink.open(run_info())
        return len(asked) > 2 or is_gone(writer)

    (tmp_path / FILE_NAME).write_bytes(of_killed_job)
    with mock.patch.object(Writer, "is_gone", begins_meanwhile):
        said = invoke("ask", str(tmp_path), "status", "--timeout", str(PATIENCE_S)).stderr
    sink.close()
    # The first look finds the killed job, the second the one that has started, which then ends too.
    assert "nobody will answer" in said
    assert len(asked) == 3


@pytest.mark.parametrize(
    "words", [["nowhere", "status"], ["run", "windw"], ["run", "every=0"], ["run", "stop", "--now"]]
)
def test_what_cannot_be_asked(
    words: list[str], tmp_path: Path, sink: JsonlSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("ask", *words)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert os.listdir(tmp_path / "run") == [FILE_NAME]


@pytest.mark.parametrize(
    "outcomes", [["done"], ["busy", "done"], ["refused"], pytest.param(["busy"], marks=pytest.mark.nightly)]
)
def test_the_answer_is_printed_and_asked_again_while_the_job_is_busy(
    outcomes: list[str], tmp_path: Path, sink: JsonlSink
) -> None:
    mailbox = Mailbox(tmp_path / "run", group=False, refused=pytest.fail)

    def answer() -> None:
        for outcome in outcomes:
            while (request := mailbox.take()) is None:
                time.sleep(0.01)
            mailbox.answer(JobAnswer(id=request.id, text=f"\x1b[31m{outcome}", outcome=outcome, status=STATUS))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    timeout_s = "10" if outcomes[-1] == "busy" else "60"
    result = invoke("ask", str(tmp_path / "run"), "every=40", "--json", "--timeout", timeout_s)
    thread.join()
    schemas.validator("ask").validate(json.loads(result.stdout))
    assert json.loads(result.stdout)["outcome"] == outcomes[-1]
    assert "\x1b" not in result.stdout
    assert result.exit_code == {"done": 0, "refused": 2, "busy": 3}[outcomes[-1]]


def test_a_request_of_another_is_left_alone(tmp_path: Path, sink: JsonlSink) -> None:
    (tmp_path / "run" / REQUEST_FILE).write_text("of another")
    assert invoke("ask", str(tmp_path / "run"), "stop", "--timeout", "0.3").exit_code == 3
    assert (tmp_path / "run" / REQUEST_FILE).read_text() == "of another"
    assert not (tmp_path / "run" / ANSWERS_FILE).exists()


def watching(run: Path, lines: int = 40, **streams: int) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "overlap_callbacks", "watch", str(run), "--every", "0.1"]
    return subprocess.Popen(line, text=True, env={**os.environ, "COLUMNS": "100", "LINES": str(lines)}, **streams)


def test_a_run_is_watched_to_its_end_without_a_terminal(tmp_path: Path, sink: JsonlSink) -> None:
    with (tmp_path / "shown").open("w") as shown:
        process = watching(tmp_path / "run", stdout=shown.fileno(), stderr=subprocess.PIPE)
        wait_until(lambda: "The job is running" in (tmp_path / "shown").read_text())
        sink.log(window(1))
        sink.frontier(FRONTIER)
        wait_until(lambda: "rank 1, 2.00 ms a step" in (tmp_path / "shown").read_text())
        sink.close()
        _, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (0, "")
    text = (tmp_path / "shown").read_text()
    assert "\x1b" not in text
    assert text.rstrip().endswith("The job has ended.")


@pytest.mark.parametrize("ends", ["Ctrl-C", "the job"])
def test_a_run_is_redrawn_in_a_terminal(ends: str, tmp_path: Path, sink: JsonlSink) -> None:
    sink.frontier(FRONTIER)
    is_high = ends == "the job"
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                shown.append(piece)
        except OSError:  # the other end is closed
            pass

    process = watching(tmp_path / "run", 40 if is_high else 24, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_until(lambda: b"The job is running" in b"".join(shown))
    if ends == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        sink.close()
    code = process.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    text = b"".join(shown).decode()
    assert code == (130 if ends == "Ctrl-C" else 0)
    assert "Traceback" not in text
    assert "rank 1 holds the others up in forward, by 2.00 ms a step" in " ".join(text.split())
    assert ("Parts of a step" in text) == is_high  # a low terminal has no room for the table
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
    assert ("The job has ended." in text) == (ends == "the job")
    assert "\x1b[1A" in text or ends == "the job"  # drawn in place


def test_what_cannot_be_watched(tmp_path: Path) -> None:
    assert invoke("watch", str(tmp_path / "nowhere")).exit_code == 2
