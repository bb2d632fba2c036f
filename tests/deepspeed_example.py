"""Runs a script that uses DeepSpeed, as ``__main__``: ``deepspeed_example.py SCRIPT [ARGUMENTS]``.

DeepSpeed would first compile a shared-memory all-reduce for inference. That takes both cores for a minute and more, and
a process that is ended meanwhile leaves a lock for which every later one waits.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import deepspeed

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.argv.pop(0)
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")
