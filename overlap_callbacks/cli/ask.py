"""``overlap ask``: asks a running job to measure, or not to, through a file in the folder of its run."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

import click
import msgspec

from overlap_callbacks.analysis.results.request import ANSWERS_FILE, REQUEST_FILE, JobAnswer, Request
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.cli import ExitCode, InconclusiveError
from overlap_callbacks.cli._options import Amount, json_option
from overlap_callbacks.cli._output import newest_run, one_line, print_json, refusing, writing
from overlap_callbacks.sinks.jsonl import Writer, last_writer

_LOOK_S, _BUSY_S = 0.1, 1.0
# More than any file of answers.
_MOST_BYTES = 2**20
# The last line of the record of a job that has ended.
_END = b'{"record":"end"}\n'
_CODES = {"done": ExitCode.DONE, "busy": ExitCode.INCONCLUSIVE}


@click.command("ask")
@click.option("--now", is_flag=True, help="Of window: measure at once, outside the budget.")
@click.option("--timeout", type=Amount(min=0.1), default=60.0, show_default=True, help="Seconds to wait.")
@json_option
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("request", metavar="REQUEST")
def command(run: Path, request: str, now: bool, timeout: float, as_json: bool) -> None:
    """Ask the running job of RUN, a run folder, and print its answer.

    REQUEST: status; window (measure one soon); quick (windows back to back, until there is an answer); stop (measure
    nothing); resume; every=STEPS (from one window to the next). All ranks follow from the same step on, or none does.

    Exit codes: 0 done, 2 refused, 3 rank 0 was killed, or no answer within --timeout.
    """
    with refusing(ValueError, refusal=click.UsageError):
        asked = Request.of(request, now=now)
    found = newest_run(run)
    folder = found.parent if found.name == FILE_NAME else found
    if not (folder / FILE_NAME).exists():
        raise click.ClickException(one_line(f"no record at {folder / FILE_NAME}: give the folder of a running job"))
    answer = _answer(folder, asked, time.monotonic() + timeout)
    if answer is None:
        raise InconclusiveError(
            one_line(
                f"no answer within {timeout:g} s: the job was killed or hangs, ask='off' is set, a request of another "
                f"user's is in the way, or {folder} is not the folder that rank 0 writes to [OC148]"
            )
        )
    if as_json:
        print_json(answer)
    else:
        click.echo(one_line(answer.text))
    raise SystemExit(_CODES.get(answer.outcome, ExitCode.CANNOT))


def _answer(folder: Path, request: Request, deadline: float) -> JobAnswer | None:
    """Ask, again where the job is busy, until there is an answer; the latest one, if any."""
    is_left, answer, writer = False, None, last_writer(folder / FILE_NAME)
    try:
        while time.monotonic() < deadline:
            if not is_left:
                with writing(f"a request in {folder}"):
                    is_left = _leave(folder, request)
            answer = _answer_to(folder, request.id) or answer
            if answer is not None and answer.outcome != "busy":
                return answer
            if answer is not None and answer.id == request.id:
                request, is_left = msgspec.structs.replace(request, id=secrets.token_hex(16)), False
            else:
                writer = _listening(folder, writer)
            time.sleep(max(0.0, min(_LOOK_S if is_left else _BUSY_S, deadline - time.monotonic())))
    finally:
        with contextlib.suppress(OSError):
            if request.id.encode() in _read(folder / REQUEST_FILE):
                (folder / REQUEST_FILE).unlink()
    return answer


def _leave(folder: Path, request: Request) -> bool:
    """Put the request into the folder; False if another one waits there."""
    new = folder / f"{REQUEST_FILE}.{request.id}"
    # The group may read it: the job takes it only if it is told to.
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    try:
        with open(file, "wb") as target:
            target.write(msgspec.json.encode(request))
        try:
            os.link(new, folder / REQUEST_FILE)  # as a whole, and only if there is none
        except PermissionError:  # a file system without hard links
            os.rename(new, folder / REQUEST_FILE)
    except FileExistsError:
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def _answer_to(folder: Path, name: str) -> JobAnswer | None:
    with contextlib.suppress(OSError, ValueError):
        answers = msgspec.json.decode(_read(folder / ANSWERS_FILE), type=list[JobAnswer])
        return next((answer for answer in answers if answer.id == name), None)
    return None


def _listening(folder: Path, known: Writer | None) -> Writer | None:
    """The process that will answer, read again if the known one is gone. Raises where nobody will."""
    is_gone = known is not None and known.is_gone()
    writer = last_writer(folder / FILE_NAME) if is_gone else known
    if _has_ended(folder):
        raise click.ClickException("the job has ended")
    if is_gone and writer == known:
        raise InconclusiveError("nobody will answer: rank 0's process was killed, and its job has not started again")
    return writer


def _has_ended(folder: Path) -> bool:
    """Whether the last line of the record says so."""
    with contextlib.suppress(OSError), (folder / FILE_NAME).open("rb") as source:
        source.seek(max(0, source.seek(0, os.SEEK_END) - len(_END)))
        return source.read() == _END
    return False


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as source:
        return source.read(_MOST_BYTES)
