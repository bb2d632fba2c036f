"""Runs one step, in a process of its own: ``python -m gpu_steps.child MODULE FILE gpu|cpu``."""

from __future__ import annotations

import faulthandler
import importlib
import sys
from pathlib import Path

from gpu_steps.figures import Recorder


def main() -> None:
    module, file, device = sys.argv[1:]
    faulthandler.enable()
    importlib.import_module(module).run(Recorder(Path(file), on_cpu=device == "cpu"))


if __name__ == "__main__":
    main()
