"""Starts the ranks of a job on this host, and ends with the first that fails. Loads no torch.

``python -m overlap_callbacks.experiments.study.job.start FOLDER``
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from overlap_callbacks.experiments.study.job_spec import SPEC_NAME, JobSpec

_POLL_S = 0.1
# After one rank has failed: time for the others to say what they know.
_GRACE_S = 3.0
_WORKER = "overlap_callbacks.experiments.study.job.worker"


def main(folder: str) -> int:
    """Run the job to its end; its exit code."""
    spec = msgspec.json.decode(Path(folder, SPEC_NAME).read_bytes(), type=JobSpec)
    ranks = [
        subprocess.Popen([sys.executable, "-m", _WORKER, folder], env={**os.environ, **variables})
        for variables in _variables(spec)
    ]
    deadline_s: float | None = None
    code = 0
    while any([rank.poll() is None for rank in ranks]):
        failed = next((found for rank in ranks if (found := rank.poll())), 0)
        if failed and deadline_s is None:
            code, deadline_s = failed, time.monotonic() + _GRACE_S
        if deadline_s is not None and time.monotonic() > deadline_s:
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_S)
    code = code or next((found for rank in ranks if (found := rank.poll())), 0)
    # The number of a signal does not pass through an exit code: say it as shells do.
    return code if code >= 0 else 128 - code


def _variables(spec: JobSpec) -> list[dict[str, str]]:
    """What ``torchrun`` would tell each rank."""
    port = str(_free_port())
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(spec.ranks),
        "LOCAL_WORLD_SIZE": str(spec.ranks),
        "OMP_NUM_THREADS": str(spec.threads),
        # What the ranks say is looked through for the reason of a failure: without what is not about it.
        "KINETO_LOG_LEVEL": "99",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::FutureWarning"),
    }
    if spec.link == "gloo":
        common |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(spec.ranks)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
