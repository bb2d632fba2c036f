"""From options to command lines, and the results on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.experiments.sweep import BusyError, ResultsError
from overlap_callbacks.experiments.tune.combinations import (
    Kind,
    check_command,
    combinations,
    command_of,
    environment_of,
    line_of,
    parsed_axis,
)
from overlap_callbacks.experiments.tune.sweep import Tune
from tests.experiments.tune_results import BUCKETS, CTAS, results, tuning


def test_each_combination_has_its_command_and_environment() -> None:
    axes = [parsed_axis(Kind.ENV, "A=1,2"), parsed_axis(Kind.ARG, "b=x y,z"), parsed_axis(Kind.ARG, "-c=3,")]
    found = combinations(axes)
    assert len(found) == 8
    command = ["sh", "--b={b}", "{run_dir}/{other}"]
    assert command_of(command, found[0], "/r") == ["sh", "--b=x y", "/r/{other}", "-c", "3"]
    assert command_of(command, found[1], "/r") == ["sh", "--b=x y", "/r/{other}"]
    assert environment_of(found[-1]) == {"A": "2"}
    assert line_of(["sh"], found[0]) == "A=1 sh --b 'x y' -c 3"


def test_runs_go_forth_and_back() -> None:
    tune = results(Path("here"), [])
    tune.num_runs = 3
    assert [point.setting for point in tune.left] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [point.repeat for point in tune.left] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Kind.ENV, "A", "the form is VARIABLE=VALUE,VALUE"),
        (Kind.ENV, "a-b=1,2", "the form is VARIABLE=VALUE,VALUE"),
        (Kind.ARG, "=1,2", "the form is NAME=VALUE,VALUE"),
        (Kind.ARG, "a=1,1", "1 is given twice"),
    ],
)
def test_a_wrong_axis_is_refused(kind: Kind, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parsed_axis(kind, text)


def test_axes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        combinations([parsed_axis(Kind.ARG, "a=1")])
    with pytest.raises(ValueError, match="a is given twice"):
        combinations([parsed_axis(Kind.ARG, "a=1,2"), parsed_axis(Kind.ENV, "a=3")])
    with pytest.raises(ValueError, match="at most 500"):
        combinations([parsed_axis(Kind.ARG, f"a{i}={','.join(map(str, range(10)))}") for i in range(3)])
    with pytest.raises(ValueError, match="a has an empty value"):
        check_command(["x", "{a}"], [parsed_axis(Kind.ARG, "a=,2")])


def test_results_survive_a_crash_in_mid_line(tmp_path: Path) -> None:
    made = results(tmp_path, [(100, 101), (50, 51), ()], failed=(2,))
    writer = made.open()
    for line in made.lines:
        writer.write(line)
    with pytest.raises(BusyError, match="another overlap tune is at work"):
        made.open()
    writer.close()
    file = tmp_path / Tune.FILE_NAME
    file.write_bytes(file.read_bytes()[:-20])
    found = Tune.read(tmp_path)
    assert found.start == made.start
    assert (len(found.lines), found.broken_lines) == (4, 1)
    writer = found.open()
    writer.write(made.lines[-1])
    writer.close()
    assert Tune.read(file).lines == made.lines


def test_a_folder_without_results_gives_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"cannot be read: .*; give the folder of an earlier overlap tune"):
        Tune.read(tmp_path)
    (tmp_path / Tune.FILE_NAME).write_text("{}\n")
    with pytest.raises(ResultsError, match="holds no results of overlap tune: its first line is missing"):
        Tune.read(tmp_path)
    (tmp_path / Tune.FILE_NAME).write_text('{"record":"tune","schema":99}\n')
    with pytest.raises(ResultsError, match="has schema version 99, this version reads up to 1: upgrade"):
        Tune.read(tmp_path)
    assert len(Tune(tmp_path, tuning(BUCKETS, CTAS)).combinations) == 9


def test_lines_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    (tmp_path / Tune.FILE_NAME).write_text(
        '{"record":"tune","schema":1,"library_version":"0.1.0","started_at":"2026-11-23T08:00:00+00:00",'
        '"command":["torchrun","train.py"],"axes":[{"kind":"arg","name":"bucket-mb","values":["25","5"]}],'
        '"timing":{"warmup_steps":10,"steps_per_block":10,"min_block_seconds":0.5},"blocks":4}\n'
        '{"record":"run","combination":0,"repeat":0,"seconds":9.0,"block_ms":[5.0,5.1],"num_steps":20}\n'
        '{"record":"run","combination":1,"repeat":0,"seconds":1.0,"failure":"exit code 1","exit_code":1}\n'
    )
    tune = Tune.read(tmp_path, num_runs=2)
    assert [(run.combination, run.failure) for run in tune.lines] == [(0, ""), (1, "exit code 1")]
    assert [tuple(point) for point in tune.left] == [(0, 1)]
