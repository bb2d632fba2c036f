"""No record, whatever stands in it, ends a command in a traceback.

``OVERLAP_MUTATED_RECORDS=5000`` tries so many of them; without it, a few hundred.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import traceback
from pathlib import Path

import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.cli.main import main
from overlap_callbacks.report import record
from tests.report import runs
from tests.report.mutations import mutated

NUM_RECORDS = int(os.environ.get("OVERLAP_MUTATED_RECORDS", "200"))
# In a few parts, so that a failure says more, and several processes may share them.
PARTS = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Three windows, one cut short, and blocks of a fourth."""
    folder = tmp_path_factory.mktemp("whole")
    windows = [runs.window(0), runs.window(1, power=True), runs.window(2, complete=False)]
    times = {Mode.OVERLAPPED: 100.0, Mode.SEQUENTIAL: 125.0}
    blocks = [runs.TimedBlock(arm, number, (times[arm],)) for number, arm in enumerate(runs.OSSO)]
    runs.write(folder, *windows, blocks=tuple(blocks))
    return (folder / FILE_NAME).read_bytes()


def commands(folder: Path) -> list[list[str]]:
    run, page = str(folder), str(folder / "report.html")
    return [
        ["show", run],
        ["show", run, "--all"],
        ["show", run, "--json"],
        ["report", run, "--output", page],
        ["report", run, run, "--json", "--output", page],
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_record_ends_a_command_in_a_traceback(whole: bytes, part: int, tmp_path: Path) -> None:
    failed: list[str] = []
    for seed in range(part, NUM_RECORDS, PARTS):
        (tmp_path / FILE_NAME).write_bytes(mutated(whole, seed))
        # Pages take long: one record in five gets one. All commands are tried with some records.
        *tables, page, pages = commands(tmp_path)
        chosen = random.Random(seed).sample(tables, 2) + ([page] if seed // PARTS % 5 == 0 else [])
        for command in [*tables, page, pages] if seed // PARTS % 20 == 0 else chosen:
            result = CliRunner().invoke(main, command)
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                told = "".join(traceback.format_exception(result.exception)[-3:])
                failed.append(f"seed {seed}, {command[0]} {command[2:]}: {told}")
            elif result.exit_code:
                assert result.exit_code == 1
                assert result.output.startswith("Error: ")
            elif "--json" in command:
                json.loads(result.stdout)
        with contextlib.suppress(record.RecordError):
            record.read(tmp_path).pooled()
    assert not failed, f"{len(failed)} failed:\n" + "\n".join(failed[:5])
