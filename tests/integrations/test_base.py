from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import JsonlSink, OverlapReport, Sink
from overlap_callbacks.integrations.base import build_monitor
from overlap_callbacks.monitor.run_info import default_run_folder
from tests.distributed import captured_log


class Keep(Sink):
    def log(self, report: OverlapReport) -> None:
        pass


def fail(given: list[Sink] | None, folder: Path) -> list[Sink]:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("options", "sinks", "said"),
    [
        ({"run_dir": 5}, None, "run_dir must be the path of a folder, got 5 (a int)"),
        ({"sinks": 5}, lambda given, folder: [*given], "sinks must be a list of Sink objects, got 5 (a int)"),
        ({"sinks": [5]}, lambda given, folder: [*given], "sinks must be a list of Sink objects, got 5 (a int) in it"),
        ({}, fail, "no network"),
    ],
)
def test_a_wrong_value_costs_the_measuring_and_one_line_and_raises_if_strict(
    options: dict[str, Any], sinks: Any, said: str
) -> None:
    with captured_log() as lines:
        assert not build_monitor("pytorch", options, sinks=sinks).active
    (line,) = lines
    assert line.endswith(f"training goes on: {said}")
    with pytest.raises((TypeError, OSError)) as raised:
        build_monitor("pytorch", {**options, "strict": True}, sinks=sinks)
    assert str(raised.value) == said


@pytest.mark.parametrize(("given", "seen"), [(None, None), ([], 0), ((Keep(),), 1), (Keep(), 1)])
def test_an_adapter_adds_its_sinks_to_those_given_in_whatever_form(
    tmp_path: Path, given: Any, seen: int | None
) -> None:
    found: list[Any] = []

    def add(sinks: list[Sink] | None, folder: Path) -> list[Sink]:
        found.append((None if sinks is None else len(sinks), folder))
        return [*(sinks or []), JsonlSink(folder)]

    monitor = build_monitor("pytorch", {"sinks": given, "run_dir": str(tmp_path), "strict": True}, sinks=add)
    assert monitor.active
    assert found == [(seen, tmp_path)]
    assert monitor.run_dir == tmp_path
    monitor.close()


def test_the_default_folder_lies_below_the_adapters_root_and_is_not_made_yet(tmp_path: Path) -> None:
    monitor = build_monitor("pytorch", {"strict": True}, root=tmp_path)
    assert monitor.run_dir.parent == tmp_path / "overlap_runs"
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_runs_that_begin_in_one_second_have_a_folder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.localtime()
    monkeypatch.setattr(time, "strftime", lambda form, now=now, strftime=time.strftime: strftime(form, now))
    random.seed(0)
    state = random.getstate()
    folders = [default_run_folder() for _ in range(50)]
    assert len(set(folders)) == 50
    assert random.getstate() == state
    stamp = time.strftime("%Y%m%d-%H%M%S")
    assert all(folder.name.startswith(f"{stamp}-") for folder in folders)
    assert default_run_folder("demo-").name.startswith(f"demo-{stamp}-")
