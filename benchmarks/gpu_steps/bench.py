"""Both forms of ``overlap bench`` on the loopback link, as a user would run them; on the simulated GPU on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from gpu_steps import figures
from gpu_steps.environment import child_environment
from gpu_steps.figures import Recorder
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

_LIMIT_S = 200


def run(record: Recorder) -> None:
    simulated = ON_SIMULATED_GPU and not record.on_cpu
    device = ["--link", "nccl" if simulated else "loopback", "--device", "cpu" if record.on_cpu else "cuda"]
    small = ["--n", "256", "--message", "1MiB", "--rounds", "3"] if record.on_cpu else []
    small = ["--n", "2048", "--message", "16MiB", "--rounds", "3", "--dtype", "fp32"] if simulated else small
    _bench(record, "gemm-allreduce", [*device, *small])
    is_small = record.on_cpu or simulated
    small = ["--size", "64KiB,1MiB", "--kind", "all_reduce", "--rounds", "3"] if is_small else []
    _bench(record, "collectives", [*device, *small])


def _bench(record: Recorder, name: str, options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "overlap_callbacks", "bench", name, *options, "--json", "--output", folder],
            capture_output=True, text=True, check=False, env=child_environment(), timeout=_LIMIT_S,
        )  # fmt: skip
    record.figure(f"bench {name}: exit code", done.returncode, expect=figures.equal(0))
    if done.returncode:
        record.raw(f"bench {name}: said", done.stderr[-2000:])
        return
    found = json.loads(done.stdout)
    record.raw(f"bench {name}", found)
