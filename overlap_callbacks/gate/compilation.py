"""Whether torch.compile has compiled in this process, without loading it where the job does not use it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from overlap_callbacks._log import logger


class CompileWatch:
    """Counts compilations, from the first moment at which torch.compile's own module is loaded.

    Args:
        on_start: called when a compilation starts, on the thread that compiles. If this torch has no callback for
            that, it is not called, and compilations are counted afterwards.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._started = 0
        self._subscribed = False  # whether torch calls us at each start

    def start(self) -> None:
        """Subscribe to torch's compilations, if it has loaded what compiles. Cheap, and safe to call again."""
        callbacks: Any = None if self._subscribed else sys.modules.get("torch._dynamo.callback")
        if callbacks is None:
            return
        try:
            callbacks.on_compile_start(self._note)
            self._subscribed = True
        except Exception:
            logger.debug("this torch has no callback for the start of a compilation", exc_info=True)

    @property
    def count(self) -> int:
        """Compilations so far. Only differences mean something."""
        return self._started if self._subscribed else _compilations_by_torch()

    @property
    def has_compiled(self) -> bool:
        """Whether there may be compiled code in the process.

        That something is wrapped to be compiled says little: DeepSpeed wraps functions that most jobs never call.
        """
        return self._started > 0 or _compilations_by_torch() > 0

    def _note(self, _: Any) -> None:
        # Called by torch.compile: nothing may escape.
        self._started += 1
        try:
            self._on_start()
        except Exception:
            logger.debug("the gate could not switch its key off for a compilation", exc_info=True)


def _compilations_by_torch() -> int:
    """What torch.compile itself counts. None of its counts holds all compilations."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if utils is None:
        return 0
    try:
        # With fullgraph=True the first stays at 0; a frame that is compiled again is not in the last.
        counters, frames_seen = utils.counters, int(getattr(frames, "FRAME_COUNTER", 0))
        return int(counters["frames"]["total"] + counters["stats"]["unique_graphs"]) + frames_seen
    except (AttributeError, KeyError, TypeError):
        return 1  # not known: taken to be in use, which is always safe
