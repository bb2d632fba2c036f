"""Runs one step, in a process of its own: ``python -m gpu_steps.child MODULE[:FUNCTION] FILE gpu|cpu RANKS``."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
from pathlib import Path

from gpu_steps.figures import Recorder
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU


def main() -> None:
    module, file, device, ranks = sys.argv[1:]
    _end_with_parent()
    faulthandler.enable()
    name, _, function = module.partition(":")
    run = getattr(importlib.import_module(name), function or "run")
    record = Recorder(Path(file), on_cpu=device == "cpu")
    if record.on_cpu or not ON_SIMULATED_GPU:
        run(record)
        return
    from gpu_steps import simulated

    if os.environ.get("RANK", "0") != "0":
        record = Recorder(Path(os.devnull), on_cpu=False)
    with simulated.device(Path(file).with_name("device"), int(ranks)):
        run(record)


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends: whoever kills the command must not leave a step behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


if __name__ == "__main__":
    main()
