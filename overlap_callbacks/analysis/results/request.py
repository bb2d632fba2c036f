"""Requests to a running job from outside, and its answers: plain data in two small files of the run's folder."""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

REQUEST_FILE, ANSWERS_FILE = "overlap.ask", "overlap.answers"
# A longer file is no request.
MAX_REQUEST_BYTES = 1024
WINDOW, QUICK, STOP, RESUME, EVERY, STATUS = "window", "quick", "stop", "resume", "every", "status"
ALLOWED = f"{WINDOW}, {QUICK}, {STOP}, {RESUME}, {EVERY}=STEPS or {STATUS}"
_MOST_STEPS = 10**9


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of the job.

    Attributes:
        id: names it in the answers.
        what: one of ``window``, ``quick``, ``stop``, ``resume``, ``every`` and ``status``.
        every_n_steps: of ``every``; 0 with anything else.
        now: of ``window``: measure whatever the budget says, and outside it.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    what: str
    every_n_steps: int = 0
    now: bool = False

    @classmethod
    def of(cls, text: str, *, now: bool = False) -> Request:
        """The request that a user has written, such as ``every=200``. Raises ValueError."""
        what, sign, steps = text.partition("=")
        number = int(steps) if steps.isascii() and steps.isdecimal() and len(steps) < 12 else 0
        request = cls(id=secrets.token_hex(16), what=what, every_n_steps=number, now=now)
        if bool(sign) != (what == EVERY):
            raise ValueError(f"REQUEST must be {ALLOWED}, got {text[:100]!r}")
        request.check(text[:100])
        return request

    def check(self, given: str = "") -> None:
        """Raises ValueError unless it is one that a job can be asked."""
        given = given or self.what[:100]
        if self.what not in (WINDOW, QUICK, STOP, RESUME, EVERY, STATUS):
            raise ValueError(f"REQUEST must be {ALLOWED}, got {given!r}")
        if self.what == EVERY and not 1 <= self.every_n_steps <= _MOST_STEPS:
            raise ValueError(f"every= must be a whole number of steps from 1 to {_MOST_STEPS:,}, got {given!r}")
        if self.what != EVERY and self.every_n_steps:
            raise ValueError(f"only every= takes a number, got {given!r}")
        if self.now and self.what != WINDOW:
            raise ValueError(f"--now goes with {WINDOW}, got {given!r}")


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the job is.

    Attributes:
        state: ``windows``, ``quick`` (windows back to back), ``stopped`` (by request), ``pinned`` (a mode, by the
            script), ``alone`` (one rank) or ``off``.
        step: the latest one; -1 before the first.
        running_s: time since it began; None if not known.
        step_ms: median of the latest ordinary steps; None if not known.
        parts_ms: mean time in each part of these steps on rank 0.
        every_n_steps: steps from one window to the next.
        num_windows: opened so far.
        window: number of the open one; None if none is open.
        steps_left: of the open window, as far as it is planned.
        next_window: first step of the next one; None if none comes.
        unpaid_s: training time until the budget allows another window; None if the cost of the last is not known yet.
    """

    state: str
    step: int
    running_s: float | None
    every_n_steps: int
    num_windows: int
    step_ms: float | None = None
    parts_ms: dict[str, float] = {}
    window: int | None = None
    steps_left: int = 0
    next_window: int | None = None
    unpaid_s: float | None = 0.0


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the job says to a request.

    Attributes:
        id: of the request.
        text: in a sentence.
        outcome: ``done``; ``refused``; or ``busy``: ask again.
        from_step: the step from which it holds on all ranks; None for ``status``, and where nothing changes.
        status: where the job is.
    """

    id: str
    text: str
    outcome: str
    status: Status
    from_step: int | None = None


_decode = msgspec.json.Decoder(Request, strict=True).decode


def decode_request(content: bytes) -> Request:
    """The request in a file. Raises ValueError for anything that is none."""
    if len(content) > MAX_REQUEST_BYTES:
        raise ValueError(f"a request has at most {MAX_REQUEST_BYTES} bytes")
    try:
        request = _decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no request: {error}") from None
    request.check()
    return request
