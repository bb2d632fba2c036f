"""No record, whatever stands in it, ends a command in a traceback.

``OVERLAP_MUTATED_RECORDS=5000`` tries so many of them; without it, fifty.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import traceback
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.report import record
from tests.commands import invoke
from tests.report import runs
from tests.report.arm_runs import arm_window
from tests.report.mutations import mutated
from tests.report.traffic_runs import with_communication, with_sizes

NUM_RECORDS = int(os.environ.get("OVERLAP_MUTATED_RECORDS", "50"))
# In a few parts, so that a failure says more, and several processes may share them.
PARTS = 5


# Elements that each list of the seed record keeps: two groups of blocks. Each command takes time with every element,
# and a fault in the ninth is no other than one in the eighth.
LONGEST = 8


def whole_record(folder: Path) -> bytes:
    """Three windows, one with power and all that communication has, one cut short, and blocks of a fourth; an arm's."""
    timed = with_sizes(with_communication(runs.window(1, power=True)))
    windows = [runs.window(0), timed, runs.window(2, complete=False)]
    times = {Mode.OVERLAPPED: 100.0, Mode.SEQUENTIAL: 125.0}
    blocks = [runs.TimedBlock(arm, number, (times[arm],)) for number, arm in enumerate(runs.OSSO)]
    arms = [arm_window(number, equal_results=number == 4, power=True) for number in (4, 5)]
    runs.write(folder, *windows, arms=arms, blocks=tuple(blocks))
    return (folder / FILE_NAME).read_bytes()


def shortened(record: bytes) -> bytes:
    """The record with the first elements of each list."""
    return b"".join(json.dumps(_short(json.loads(line))).encode() + b"\n" for line in record.splitlines())


def _short(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _short(below) for key, below in tree.items()}
    return [_short(below) for below in tree[:LONGEST]] if isinstance(tree, list) else tree


def kinds_of_fields(record: bytes) -> set[tuple[str, ...]]:
    """Where there is a value of which type; the elements of a list are in one place."""
    found: set[tuple[str, ...]] = set()

    def walk(tree: Any, place: tuple[str, ...]) -> None:
        found.add((*place, type(tree).__name__))
        for key, below in tree.items() if isinstance(tree, dict) else ():
            walk(below, (*place, key))
        for below in tree if isinstance(tree, list) else ():
            walk(below, (*place, "[]"))

    for line in record.splitlines():
        walk(json.loads(line), ())
    return found


@pytest.fixture(scope="module")
def seed_record(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return shortened(whole_record(tmp_path_factory.mktemp("whole")))


def test_the_seed_record_has_every_kind_of_field_and_can_be_read(seed_record: bytes, tmp_path: Path) -> None:
    assert kinds_of_fields(seed_record) == kinds_of_fields(whole_record(tmp_path))
    (tmp_path / FILE_NAME).write_bytes(seed_record)
    assert len(record.read(tmp_path).windows) == 3
    for command in commands(tmp_path):
        assert invoke(*command).exit_code == 0


def commands(folder: Path) -> list[list[str]]:
    run, page = str(folder), str(folder / "report.html")
    return [
        ["show", run],
        ["show", run, "--all"],
        ["show", run, "--json"],
        ["trace", run, "--output", str(folder / "trace.json")],
        ["trace", run, "--for", "inductor", "--output", str(folder / "inductor.json")],
        ["check", "--max-exposed", "0.5", "--json", run],
        ["report", run, "--output", page],
        ["report", run, run, "--json", "--output", page],
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_record_ends_a_command_in_a_traceback(seed_record: bytes, part: int, tmp_path: Path) -> None:
    failed: list[str] = []
    for seed in range(part, NUM_RECORDS, PARTS):
        (tmp_path / FILE_NAME).write_bytes(mutated(seed_record, seed))
        # Pages and long tables take long: one record in five gets a page. All commands are tried with some records.
        number = seed // PARTS
        all_of_them = commands(tmp_path)
        quick, page = all_of_them[:6], all_of_them[6]
        chosen = [random.Random(seed).choice(quick), *([page] if number % 5 == 0 else [])]
        for command in all_of_them if number % 20 == 0 else chosen:
            result = invoke(*command)
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                told = "".join(traceback.format_exception(result.exception)[-3:])
                failed.append(f"seed {seed}, {command[0]} {command[2:]}: {told}")
            elif command[0] == "check" and result.stdout:
                assert result.exit_code in (0, 1, 3)  # 1 for a broken limit, 3 for a figure that is not there
                json.loads(result.stdout)
            elif result.exit_code:
                # Without the times or the groups that inductor needs, there is no trace for it.
                assert result.exit_code in ((2, 3) if command[0] == "check" or "inductor" in command else (2,))
                assert result.output.startswith("Error: ")
            elif "--json" in command:
                json.loads(result.stdout)
        with contextlib.suppress(record.RecordError):
            record.read(tmp_path).pooled()
    assert not failed, f"{len(failed)} failed:\n" + "\n".join(failed[:5])
