"""The environment variables by which a job is told from outside what to measure."""

from __future__ import annotations

from typing import Annotated

import msgspec

# Switches everything off.
SWITCH = "OVERLAP_CALLBACKS"
# The folder of the record, whatever the script says.
RUN_DIR = "OVERLAP_CALLBACKS_RUN_DIR"
# Times steps as they are, and measures nothing else: a ``TimingPlan``.
TIME_ONLY = "OVERLAP_CALLBACKS_TIME_ONLY"


class TimingPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps are timed in blocks, one after the other, and nothing else is measured.

    The first ``warmup_steps`` do not count. A block has as many counted steps, and lasts as long, as told at least.
    """

    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 10
    steps_per_block: Annotated[int, msgspec.Meta(ge=1)] = 10
    min_block_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0

    def as_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, text: str) -> TimingPlan:
        """The plan of such a value; ``1`` stands for the defaults.

        Raises:
            ValueError: the value is neither.
        """
        if text.strip() == "1":
            return cls()
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"must be 1 or JSON such as {cls().as_text()}, got {text!r}: {error}") from None
