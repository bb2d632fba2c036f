"""``benchmarks/scale.py`` with few ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.margins import PATIENCE_S

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scale.py"
KEYS = {
    "ranks", "rank0_cpu_s", "rank0_wall_s", "record_line_bytes", "store_bytes", "connections_per_rank", "peak_mb",
}  # fmt: skip


def test_a_few_ranks_are_simulated_with_one_connection_and_no_key_left() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--ranks",
        "20",
        "--collectives",
        "20",
        "--windows",
        "1",
        "--processes",
        "1",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= KEYS
    assert found["ranks"] == 20
    assert found["connections_per_rank"] == 1
    assert found["keys_left"] == 0
    assert found["rank0_cpu_s"] > 0
    assert found["record_line_bytes"] > 0
