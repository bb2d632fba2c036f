"""Runs one step, in a process of its own: ``python -m gpu_steps.child MODULE[:FUNCTION] FILE gpu|cpu``."""

from __future__ import annotations

import faulthandler
import importlib
import sys
from pathlib import Path

from gpu_steps.figures import Recorder


def main() -> None:
    module, file, device = sys.argv[1:]
    faulthandler.enable()
    name, _, function = module.partition(":")
    getattr(importlib.import_module(name), function or "run")(Recorder(Path(file), on_cpu=device == "cpu"))


if __name__ == "__main__":
    main()
