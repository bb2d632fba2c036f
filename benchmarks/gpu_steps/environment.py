"""What a result was measured on: device, versions, and the state of the sources.

``python -m gpu_steps.environment`` prints the part that only torch can tell, as JSON. It runs in a process of its own,
so that the command that starts the steps holds no context on the device.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A result holds for as long as these are the same.
IDENTITY = ("device", "torch", "cuda", "nccl", "driver", "python", "sources")
_SUFFIXES = (".py", ".cu")
_SOURCES = ("overlap_callbacks", "integrations", "benchmarks/gpu_steps", "tests/gpu")


def environment() -> dict[str, Any]:
    """Device, versions, commit and state of the sources; ``device`` is None without a GPU.

    Raises:
        RuntimeError: torch does not load.
    """
    command = [sys.executable, "-m", "gpu_steps.environment"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment(), timeout=120)
    if done.returncode:
        raise RuntimeError(f"torch does not load: {done.stderr.strip()[-500:]}")
    return {
        "date": time.strftime("%Y-%m-%d"),
        **json.loads(done.stdout.splitlines()[-1]),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": _commit(),
        "sources": _digest(),
    }


def child_environment() -> dict[str, str]:
    """Environment variables of a step's process: it finds the steps, the tests and the library."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def _commit() -> str | None:
    """The commit that is checked out; None where the sources travelled without their history."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _digest() -> str:
    """Digest of the sources that results depend on. A commit would not tell of changes that are not committed."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted(file for file in (ROOT / folder).rglob("*") if file.suffix in _SUFFIXES):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _from_torch() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": str(torch.__version__), "device": None, "cuda": torch.version.cuda}
    if torch.version.hip is not None:
        found["hip"] = torch.version.hip
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    print(json.dumps(_from_torch()))
