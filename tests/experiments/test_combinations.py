"""From options to command lines, and the results on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.experiments.lines_file import BusyError, ResultsError
from overlap_callbacks.experiments.tune.combinations import (
    Kind,
    balanced_order,
    check_command,
    combinations,
    command_of,
    environment_of,
    line_of,
    parsed_axis,
)
from overlap_callbacks.experiments.tune.results import FILE_NAME, open_results, read_results
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
    assert [number for number, _ in balanced_order(3, 3)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Kind.ENV, "A", "the form is VARIABLE=VALUE,VALUE"),
        (Kind.ENV, "a-b=1,2", "the form is VARIABLE=VALUE,VALUE"),
        (Kind.ARG, "=1,2", "the form is NAME=VALUE,VALUE"),
        (Kind.ARG, "a=1,1", "1 stands there twice"),
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
    writer = open_results(tmp_path)
    for line in (made.tuning, *made.runs):
        writer.write(line)
    with pytest.raises(BusyError, match="another overlap tune is at work"):
        open_results(tmp_path)
    writer.close()
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:-20])
    found = read_results(tmp_path)
    assert found.tuning == made.tuning
    assert (len(found.runs), found.broken_lines) == (4, 1)
    writer = open_results(tmp_path)
    writer.write(made.runs[-1])
    writer.close()
    assert read_results(tmp_path).runs == made.runs


def test_a_folder_without_results_gives_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="cannot be read"):
        read_results(tmp_path)
    (tmp_path / FILE_NAME).write_text("{}\n")
    with pytest.raises(ResultsError, match="holds no tuning"):
        read_results(tmp_path)
    assert len(tuning(BUCKETS, CTAS).combinations) == 9
