"""Windows of jobs whose whole steps are replayed from a CUDA graph: replays call no hook of the optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.instruments import device

from .base import wrap

_CAPTURED = "optimizer.step() was captured in a CUDA graph: replayed steps are not measured [OC127]"


class GraphReplays:
    """Ends an open window where its plan does, once the optimizer's step was captured.

    Until a step calls the hook again, each replay counts as one: else the window, with its profiler, would stay open.
    """

    def __init__(self, monitor: OverlapMonitor) -> None:
        self._monitor = monitor
        self._steps_left = self._thread = 0
        self._said = False
        self._undo: Callable[[], None] | None = None

    def watch(self) -> None:
        """The optimizer's step is being captured."""
        if not self._said:
            self._said = True
            self._monitor.say(_CAPTURED)
        if self._undo is None and self._monitor.in_window:
            self._steps_left, self._thread = self._monitor.steps_left, threading.get_ident()
            self._undo = wrap(device.graph_type(), "replay", self._replay)

    def stop(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _replay(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._undo is not None and threading.get_ident() == self._thread:
            self._steps_left -= 1
            if self._steps_left <= 0 and not device.accelerator().is_capturing():
                self.stop()
                self._monitor.cut_short(_CAPTURED)
        return result
