"""Runs one step, in a process of its own: ``python -m gpu_steps.child MODULE[:FUNCTION] FILE gpu|cpu``."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import signal
import sys
from pathlib import Path

from gpu_steps.figures import Recorder


def main() -> None:
    module, file, device = sys.argv[1:]
    _end_with_parent()
    faulthandler.enable()
    name, _, function = module.partition(":")
    getattr(importlib.import_module(name), function or "run")(Recorder(Path(file), on_cpu=device == "cpu"))


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends: whoever kills the command must not leave a step behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


if __name__ == "__main__":
    main()
