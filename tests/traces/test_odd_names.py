from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_callbacks.report.views.trace_verdict import names_of, verdict
from overlap_callbacks.traces import Trace, analyze, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.traces.events import MS, all_reduce, error_of, figures_of, gemm, overlap, said, short_trace

# -- names

NAMES = {
    "long": "void kernel<" + "x" * 10_000 + ">",
    "control characters": "gemm\x00\x1b[31m\x07\r\n\tred\x1b[0m",
    "HTML": "<script>alert('x')</script><b>gemm</b>",
    "markup": "[red]gemm[/red]",
    "markup that closes nothing": "[/red]gemm[/]",
    "right to left": "gemm \u202e\u2066 kernel",
    "emoji": ":smile: gemm",
    "empty": "",
    "commas": 'a,b;"c"\td',
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_any_kind_is_shown_as_it_is_or_made_harmless(tmp_path: Path, name: str) -> None:
    odd = NAMES[name]
    events = [kineto.kernel(odd, 0, MS, 0), gemm(2, 9), all_reduce(3, 5)]
    overlapped = str(kineto.write(tmp_path / "a.json", events))
    sequential = str(kineto.write(tmp_path / "b.json", [*events[1:2], all_reduce(10, 12)]))
    output = {}
    for command in (["analyze", overlapped], ["compare", overlapped, sequential], ["compare", sequential, overlapped]):
        forced = ["--force"] if command[0] == "compare" else []
        for options in ([], ["--json"]):
            result = overlap(*command, *options, *forced)
            assert result.exit_code == 0
            assert not set(result.output) & set(map(chr, range(32))) - {"\n"}
            assert "\u202e" not in result.output
            assert len(result.output) < 60_000
            output[*command[:2], *options] = result.output
    if name in ("HTML", "markup", "markup that closes nothing", "emoji"):
        assert odd in output["compare", overlapped]
    unmatched = json.loads(output["compare", overlapped, "--json"])["unmatched"]
    assert [row["overlapped_calls"] for row in unmatched] == [1]
    assert len(unmatched[0]["name"]) <= 1_000


def test_long_names_that_differ_at_their_end_only_are_two_kernels(tmp_path: Path) -> None:
    events = [kineto.kernel("void kernel<" + "x" * 10_000 + end, 0, MS, 0) for end in ("a>", "b>")]
    assert len(read_trace(kineto.write(tmp_path / "trace.json", events)).kernels.names) == 2


@pytest.mark.parametrize("name", ["[red]x.json", "[link=x]y.json", ":smile:.json", "a b,c.json"])
def test_a_file_name_of_any_kind_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    path = str(kineto.write(tmp_path / name, [gemm(0, 2), all_reduce(1, 3)]))
    assert name in overlap("analyze", path).output
    assert name in overlap("compare", path, path, "--force").output


def test_a_file_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = str(kineto.write(tmp_path / "a\x9b31m\u202eb.json", short_trace()))
    missing, output = path + "x", str(tmp_path / "no\x9bfolder" / "out.json")
    commands = [["analyze", path, *options] for options in ([], ["--json"], ["--csv", "steps"])]
    commands += [["compare", path, path, *options, "--force"] for options in ([], ["--json"], ["--csv", "figures"])]
    commands += [["compare", path, path]]
    commands += [["analyze", missing], ["compare", path, missing], ["analyze", path, "--output", output]]
    for command in commands:
        shown = overlap(*command).output
        assert shown
        assert all(char.isprintable() or char == "\n" for char in shown), command


# -- several files, steps and devices


def ranked(folder: Path, name: str, rank: int, world_size: int) -> Trace:
    return read_trace(kineto.write(folder / name, short_trace(), **kineto.job(rank, world_size)))


def test_ranks_of_different_jobs_are_not_compared_and_each_has_its_own_figures(tmp_path: Path) -> None:
    found = analyze([ranked(tmp_path, "a.json", 0, 2), ranked(tmp_path, "b.json", 1, 4)])
    assert said(found.problems, "different jobs")
    assert found.skew == ()
    assert [trace.total.compute_ms for trace in found.traces] == [3, 3]
    assert overlap("analyze", str(tmp_path / "a.json"), str(tmp_path / "b.json")).exit_code == 0


def test_one_rank_given_twice_is_not_compared_with_itself(tmp_path: Path) -> None:
    found = analyze([ranked(tmp_path, "a.json", 1, 2), ranked(tmp_path, "b.json", 1, 2)])
    assert said(found.problems, "rank 1 is given twice")
    assert found.skew == ()
    shown = overlap("analyze", str(tmp_path / "a.json"), str(tmp_path / "b.json")).output
    assert shown.index("Ranks side by side") < shown.index("\na.json ") < shown.index("\nb.json ")
    assert "Top kernels of a.json, which computes most" in shown


def test_a_device_is_called_by_what_tells_it_from_the_others(tmp_path: Path) -> None:
    one, two = ranked(tmp_path, "a.json", 0, 2), ranked(tmp_path, "b.json", 1, 2)
    again, unknown = ranked(tmp_path, "c.json", 1, 2), read_trace(kineto.write(tmp_path / "d.json", short_trace()))
    two_devices = kineto.write(tmp_path / "e.json", [gemm(0, 2), gemm(0, 3, device=1)], **kineto.job(2, 3))
    several = analyze([one, two, again, unknown, read_trace(two_devices)]).traces
    assert names_of(several) == ["rank 0", "b.json", "c.json", "d.json", "rank 2, device 0", "rank 2, device 1"]


def test_a_cpu_job_and_a_job_of_devices_are_different_jobs(tmp_path: Path) -> None:
    on_host = kineto.write(
        tmp_path / "b.json", [kineto.host_range("aten::mm", 0, MS, cat="cpu_op")], **kineto.job(1, 2)
    )
    found = analyze([ranked(tmp_path, "a.json", 0, 2), read_trace(on_host)])
    assert said(found.problems, "different jobs")
    assert found.skew == ()


def test_steps_that_overlap_end_where_the_next_begins(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, 30 * MS), kineto.step(2, 10 * MS, 20 * MS), kineto.step(2, 12 * MS, 40 * MS)]
    for i, time in enumerate((1, 9, 11, 19)):
        events += [kineto.launch(time * MS, i + 1), gemm(50 + 2 * i, 51 + 2 * i, i + 1)]
    found = figures_of(tmp_path, events)
    assert {step.step: step.compute_ms for step in found.steps} == {1: 2, 2: 2}
    assert said(found.problems, "some steps overlap")


def test_each_device_of_a_file_has_figures_of_its_own_kernels_only(tmp_path: Path) -> None:
    events = [
        gemm(0, 4, 1, device=0), all_reduce(2, 6, 2, device=0, **{"Collective name": "allreduce", "Group size": 2}),
        gemm(0, 4, 3, device=1), all_reduce(3, 8, 4, device=1, **{"Collective name": "allreduce", "Group size": 4}),
        gemm(5, 7, 5, device=6),
    ]  # fmt: skip
    devices = [{"id": 0, "name": "A"}, {"id": 1, "name": "[b]B"}]
    path = kineto.write(tmp_path / "trace.json", events, deviceProperties=devices)
    found = analyze([read_trace(path)]).traces
    assert [(trace.device, trace.device_name) for trace in found] == [(0, "A"), (1, "[b]B"), (6, "")]
    assert [trace.total.compute_ms for trace in found] == [4, 4, 2]
    assert [trace.total.hidden_comm_ms for trace in found] == [2, 1, 0]
    assert [[row.group_size for row in trace.collectives] for trace in found] == [[2], [4], []]
    assert all(said(trace.problems, "3 devices") for trace in found)
    assert "[b]B" in overlap("analyze", "--all", str(path)).output
    assert "3 devices" in error_of("compare", str(path), str(path))


def test_a_step_in_which_nothing_was_launched_is_named(tmp_path: Path) -> None:
    events = [kineto.step(1, 0, MS), kineto.step(2, 2 * MS, 3 * MS), kineto.launch(10, 7), gemm(4, 5, 7)]
    found = figures_of(tmp_path, events)
    assert [step.step for step in found.steps] == [1]
    assert said(found.problems, "steps 2")


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [tmp_path / "run" / place / "trace.json" for place in ("first", "second")]
    for path in paths:
        path.parent.mkdir(parents=True)
        kineto.write(path, short_trace(), **kineto.job(0, 2))
    assert names_of(analyze([read_trace(path) for path in paths]).traces) == ["first/trace.json", "second/trace.json"]


# -- files that are not of one job


def _apart(folder: Path, world_sizes: tuple[int, int], ranks: tuple[int, int]) -> Analysis:
    """Two files: in the first, communication is exposed for 80 % of the time, in the second for none."""
    events = {
        "exposed": [kineto.step(1, 0, 20 * MS), gemm(0, 2), all_reduce(2, 10, **MESSAGE)],
        "hidden": [kineto.step(1, 0, 20 * MS), gemm(0, 10), all_reduce(2, 10, **MESSAGE)],
    }
    files = zip(events.items(), ranks, world_sizes, strict=True)
    paths = [kineto.write(folder / f"{name}.json", made, **kineto.job(*job)) for (name, made), *job in files]
    return analyze([read_trace(path) for path in paths])


MESSAGE = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "Float", "Group size": 2, "Seq": 1}


@pytest.mark.parametrize(("world_sizes", "ranks"), [((2, 4), (0, 1)), ((2, 2), (1, 1))])
def test_nothing_is_made_of_files_of_different_jobs_together(
    tmp_path: Path, world_sizes: tuple[int, int], ranks: tuple[int, int]
) -> None:
    found = _apart(tmp_path, world_sizes, ranks)
    assert (found.one_job, found.skew, found.sizes) == (False, (), ())
    said_first, first, second = verdict(found)
    assert said_first == "The files are not of one job, so each is analysed alone."
    names = names_of(found.traces)
    assert first.startswith(f"{names[0]}: The device computes 20.0% of the time; 80.0% is exposed communication")
    assert second.startswith(f"{names[1]}: The device computes 100.0% of the time; 0.0% is exposed communication")


def test_ranks_of_one_job_have_one_verdict(tmp_path: Path) -> None:
    found = _apart(tmp_path, (2, 2), (0, 1))
    assert found.one_job
    assert found.sizes
    assert any(sentence.startswith("The devices compute 60.0% of the time") for sentence in verdict(found))
