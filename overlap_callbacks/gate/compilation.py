"""Whether torch.compile has compiled in this process, without loading it where the job does not use it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("overlap_callbacks")


class CompileWatch:
    """Counts compilations, from the first moment at which torch.compile's own module is loaded.

    Args:
        on_start: called when a compilation starts, on the thread that compiles. Where this torch does not tell of
            that moment, it is not called, and compilations are counted afterwards.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._started = 0
        self._told = False  # whether torch tells us of each start

    def start(self) -> None:
        """Ask torch to tell of compilations, if it has loaded what compiles. Cheap, and safe to call again."""
        callbacks: Any = None if self._told else sys.modules.get("torch._dynamo.callback")
        if callbacks is None:
            return
        try:
            callbacks.on_compile_start(self._note)
            self._told = True
        except Exception:
            logger.debug("this torch does not tell when torch.compile compiles", exc_info=True)

    @property
    def count(self) -> int:
        """Compilations so far. Only differences mean something."""
        return self._started if self._told else _frames_compiled()

    @property
    def has_compiled(self) -> bool:
        """Whether there may be compiled code in the process."""
        return self._started > 0 or _frames_compiled() > 0

    def _note(self, _: Any) -> None:
        # Called by torch.compile: nothing may escape.
        self._started += 1
        try:
            self._on_start()
        except Exception:
            logger.debug("the start of a compilation could not be heeded", exc_info=True)


def _frames_compiled() -> int:
    """Frames that torch.compile has taken up; its own count, which starts again where a user resets it."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    try:
        return int(utils.counters["frames"]["total"])
    except (AttributeError, KeyError, TypeError):
        return 1  # not known: taken to be in use, which is always safe
