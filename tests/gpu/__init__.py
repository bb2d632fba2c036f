"""Tests on the GPUs of this machine."""

from __future__ import annotations

import os

# Ranks are forked from a process that has imported these tests, which ask whether there is a GPU. By the CUDA runtime,
# torch would refuse CUDA in every process forked later; NVML may be asked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
