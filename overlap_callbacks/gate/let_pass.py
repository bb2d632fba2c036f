"""Why a sequential step lets a collective, or a message, pass as it is."""

from __future__ import annotations

import enum


class LetPass(enum.Enum):
    """The reason, in words that follow a number of collectives or messages."""

    CAPTURE = "a CUDA graph was being captured"
    OTHER_DEVICE = "they were on another device than the one whose steps are timed"
    COALESCING_BLOCK = "they were in a coalescing block, and start when it ends"
    UNKNOWN_GROUP = "their process group is not registered with torch.distributed, so that its ranks are not known"
    SINGLE_MESSAGE = "they were sent or received singly, and waiting for one could hang a pipeline"


# What has its place in the order that the order check looked at, as if the job waited for it at once.
IN_THE_CHECKED_ORDER = (LetPass.COALESCING_BLOCK, LetPass.SINGLE_MESSAGE)
