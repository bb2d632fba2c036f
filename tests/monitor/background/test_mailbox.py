"""Files in the folder of a run are read only if they are a request of the job's own user, and change nothing else."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from unittest import mock

import pytest

from overlap_callbacks.analysis.results.request import (
    ANSWERS_FILE,
    MAX_REQUEST_BYTES,
    REQUEST_FILE,
    JobAnswer,
    Request,
    Status,
    decode_request,
)
from overlap_callbacks.monitor.background.mailbox import Mailbox

STATUS = Status(state="windows", step=7, running_s=0.1, every_n_steps=500, num_windows=0)
VALID = json.dumps({"id": "0123456789abcdef" * 2, "what": "every", "every_n_steps": 200}).encode()


class Refusals(list):
    def __call__(self, why: str) -> None:
        self.append(why)


@pytest.fixture
def refused() -> Refusals:
    return Refusals()


@pytest.fixture
def mailbox(tmp_path: Path, refused: Refusals) -> Mailbox:
    return Mailbox(tmp_path, group=False, refused=refused)


def put(folder: Path, content: bytes = VALID, mode: int = 0o600) -> Path:
    path = folder / REQUEST_FILE
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_request_is_taken_once(tmp_path: Path, mailbox: Mailbox, refused: Refusals) -> None:
    put(tmp_path)
    request = mailbox.take()
    assert request is not None
    assert (request.what, request.every_n_steps, request.now) == ("every", 200, False)
    assert mailbox.take() is None
    assert refused == []


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "huge", "open to all", "open to the group"])
def test_what_may_be_somebody_elses_is_not_read_and_stays(
    kind: str, tmp_path: Path, mailbox: Mailbox, refused: Refusals
) -> None:
    path = tmp_path / REQUEST_FILE
    other = tmp_path / "other"
    other.write_bytes(VALID)
    match kind:
        case "link":
            path.symlink_to(other)
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "huge":
            with put(tmp_path).open("r+b") as file:
                file.truncate(2**40)
        case "open to all":
            put(tmp_path, mode=0o602)
        case "open to the group":
            put(tmp_path, mode=0o620)
    began = time.monotonic()
    assert mailbox.take() is None
    assert time.monotonic() - began < 5.0
    assert len(refused) == 1
    assert path.is_symlink() or path.exists()
    assert other.read_bytes() == VALID
    mailbox.clear()
    assert path.is_symlink() or path.exists()


def test_another_users_request_is_read_only_with_the_group_option(tmp_path: Path, refused: Refusals) -> None:
    put(tmp_path, mode=0o660)
    with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
        assert Mailbox(tmp_path, group=False, refused=refused).take() is None
        with mock.patch("os.getegid", return_value=os.getegid() + 1):
            assert Mailbox(tmp_path, group=True, refused=refused).take() is None
        assert len(refused) == 2
        assert Mailbox(tmp_path, group=True, refused=refused).take() is not None


def test_a_file_that_grows_while_it_is_read_is_no_request(tmp_path: Path, mailbox: Mailbox, refused: Refusals) -> None:
    put(tmp_path)
    with mock.patch("os.read", side_effect=lambda file, size: VALID.ljust(size)):
        assert mailbox.take() is None
    assert refused == [f"a request has at most {MAX_REQUEST_BYTES} bytes"]


def test_answers_replace_their_file_and_no_link_is_followed(tmp_path: Path, mailbox: Mailbox) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / ANSWERS_FILE).symlink_to(kept)
    (tmp_path / "overlap.new").symlink_to(kept)
    for number in range(20):
        mailbox.answer(JobAnswer(id=str(number), text="step 7", outcome="done", status=STATUS))
    assert kept.read_text() == "mine"
    found = json.loads((tmp_path / ANSWERS_FILE).read_text())
    assert [answer["id"] for answer in found] == [str(number) for number in range(4, 20)]
    mailbox.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


def _fuzzed(chance: random.Random) -> bytes:
    """A request that was damaged, or bytes by chance."""
    content = bytearray(VALID)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(content))
        match chance.randrange(5):
            case 0:
                content[place] = chance.randrange(256)
            case 1:
                del content[place : place + chance.randint(1, 20)]
            case 2:
                content[place:place] = chance.randbytes(chance.randint(1, 20))
            case 3:
                content[place:place] = chance.choice(
                    [b"[" * 500, b'"now":true,', b"1e999", b"\xff", b"-1", b"null", b"\\u"]
                )
            case 4:
                content = bytearray(chance.randbytes(chance.randrange(2 * MAX_REQUEST_BYTES)))
        content = content or bytearray(b" ")
    return bytes(content)


def test_ten_thousand_fuzzed_files_are_no_requests(tmp_path: Path, mailbox: Mailbox, refused: Refusals) -> None:
    chance = random.Random(38)
    taken = 0
    for _ in range(10_000):
        content = _fuzzed(chance)
        try:
            expected: Request | None = decode_request(content)
        except ValueError:
            expected = None
        put(tmp_path, content)
        found = mailbox.take()
        assert found == expected
        if found is not None:  # damaged where it does not matter: still one that a user may make
            taken += 1
            assert found.what == "every"
            assert 1 <= found.every_n_steps <= 10**9
            assert not found.now
        if (tmp_path / REQUEST_FILE).exists():  # too long
            (tmp_path / REQUEST_FILE).unlink()
    assert taken < 1000
    assert len(refused) == 10_000 - taken
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "now", "said"),
    [
        ("windw", False, "REQUEST must be window, quick"),
        ("every", False, "REQUEST must be window, quick"),
        ("every=", False, "every= must be a whole number of steps"),
        ("every=0", False, "every= must be a whole number of steps"),
        ("every=1.5", False, "every= must be a whole number of steps"),
        ("every=99999999999999999999", False, "every= must be a whole number of steps"),
        ("stop=3", False, "REQUEST must be window, quick"),
        ("stop", True, "--now goes with window"),
        ("", False, "REQUEST must be window, quick"),
    ],
)
def test_a_wrong_request_is_named(text: str, now: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Request.of(text, now=now)
