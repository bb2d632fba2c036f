"""Environment variables that override what a job measures."""

from __future__ import annotations

from typing import Annotated

import msgspec

# Disables everything.
SWITCH = "OVERLAP_CALLBACKS"
# The record's folder; overrides the script.
RUN_DIR = "OVERLAP_CALLBACKS_RUN_DIR"
# Times steps and measures nothing else: a ``TimingPlan``.
TIME_ONLY = "OVERLAP_CALLBACKS_TIME_ONLY"
# Prefix of the variable that marks a command's processes. Those of a nested command have both.
COMMAND_MARK = "OVERLAP_CALLBACKS_COMMAND"


class TimingPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times consecutive blocks of steps, and measures nothing else.

    The first ``warmup_steps`` do not count. A block has at least the given number of counted steps, and at least the
    given duration.
    """

    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 10
    steps_per_block: Annotated[int, msgspec.Meta(ge=1)] = 10
    min_block_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0

    def as_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, text: str) -> TimingPlan:
        """The plan of a variable's value; ``1`` stands for the defaults.

        Raises:
            ValueError: the value is neither.
        """
        if text.strip() == "1":
            return cls()
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"must be 1 or JSON such as {cls().as_text()}, got {text!r}: {error}") from None
