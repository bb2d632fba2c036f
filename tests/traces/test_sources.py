"""Folders, patterns, archives, many ranks, and files of other profilers."""

from __future__ import annotations

import gzip
import io
import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.traces import TraceError, analyze, analyze_files, find_traces, read_trace
from overlap_callbacks.traces.analysis import _RULES
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.margins import PATIENCE_S
from tests.traces import reference
from tests.traces.events import all_reduce, error_of, gemm, overlap, said


def rank_file(folder: Path, rank: int, suffix: str = ".json.gz") -> Path:
    folder.mkdir(exist_ok=True)
    events = [gemm(0, 5), all_reduce(1, 2 + rank), kineto.step(1, 0, 1000)]
    return kineto.write(folder / f"rank{rank}{suffix}", events, **kineto.job(rank, 12))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in (10, 2, 1):
        rank_file(tmp_path / "run", rank)
    (tmp_path / "run" / "notes.txt").write_text("not a trace")
    (tmp_path / "run" / ".hidden.json").write_text("not a trace")
    return tmp_path / "run"


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


RANKS = ["rank1.json.gz", "rank2.json.gz", "rank10.json.gz"]


def archive_of(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"inner/{file.name}")
    return path


def test_a_folder_a_pattern_and_an_archive_stand_for_the_traces_in_them(tmp_path: Path, folder: Path) -> None:
    assert names(find_traces([folder])) == RANKS
    assert names(find_traces([folder.parent])) == RANKS
    assert names(find_traces([folder / "rank1*.gz"])) == ["rank1.json.gz", "rank10.json.gz"]
    assert names(find_traces([folder, folder / "rank2.json.gz"])) == RANKS
    archive = archive_of(folder, tmp_path / "all.zip")
    assert find_traces([archive]) == [archive / "inner" / name for name in RANKS]
    plain = [read_trace(path) for path in find_traces([folder])]
    packed = [read_trace(path) for path in find_traces([archive])]
    assert [str(trace.path) for trace in packed] == [str(archive / "inner" / name) for name in RANKS]
    expected, found = (msgspec.to_builtins(analyze(traces)) for traces in (plain, packed))
    for analysis in (expected, found):
        for trace in analysis["traces"]:
            del trace["file"]
    assert found == expected


def test_the_command_takes_them_too_and_shows_the_ranks_in_their_order(tmp_path: Path, folder: Path) -> None:
    archive = archive_of(folder, tmp_path / "all.zip")
    for argument in (folder, folder / "*.gz", archive):
        found = msgspec.json.decode(overlap("analyze", str(argument), "--json").stdout, type=Analysis)
        assert [trace.rank for trace in found.traces] == [1, 2, 10]
        assert [len(row.ranks) for row in found.skew] == [3]


def test_what_stands_for_no_trace_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is a folder without traces" in error_of("analyze", str(tmp_path / "empty"))
    assert "matches no file" in error_of("analyze", str(tmp_path / "*.json"))
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "not a trace")
    assert "is an archive without traces" in error_of("analyze", str(path))
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "cannot be read from its archive" in error_of("analyze", str(path))


def test_one_trace_of_an_archive_can_be_named(tmp_path: Path, folder: Path) -> None:
    archive = archive_of(folder, tmp_path / "all.zip")
    assert read_trace(archive / "inner" / "rank2.json.gz").rank == 2
    with pytest.raises(TraceError, match="archive of 5 files: name one of them"):
        read_trace(archive)
    with pytest.raises(TraceError, match="is not in its archive"):
        read_trace(archive / "none.json")


def test_a_member_of_an_archive_that_is_damaged_gives_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a.json", kineto.text([gemm(i, i + 0.5) for i in range(3_000)]))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (trace,) = find_traces([path])
    assert said(read_trace(trace).problems, "cut off or damaged")


def test_a_bad_file_does_not_lose_the_others_and_is_named(folder: Path) -> None:
    (folder / "rank5.json").write_text("no JSON")
    output = overlap("analyze", str(folder)).output
    assert output.startswith("Attention: left out: ")
    assert "rank5.json is no trace of torch.profiler" in output.replace("\n", " ")
    found = msgspec.json.decode(overlap("analyze", str(folder), "--json").stdout, type=Analysis)
    assert [trace.rank for trace in found.traces] == [1, 2, 10]
    assert said(found.problems, "left out", "rank5.json")
    result = overlap("analyze", str(folder), "--csv", "steps")
    assert "Note: left out: " in result.stderr


def test_if_no_file_can_be_read_there_is_one_line(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path in paths:
        path.write_text("no JSON")
    line = error_of("analyze", *map(str, paths))
    assert "0.json is no trace" in line
    assert "and 2 more files cannot be read" in line


def test_notes_name_their_files(folder: Path) -> None:
    kineto.write(folder / "rank3.json", [{**gemm(5, 6), "cat": "hpu_op"}, all_reduce(0, 1)], **kineto.job(3, 12))
    result = overlap("analyze", str(folder), "--csv", "steps")
    assert "Note: rank3.json: 1 event of other devices (hpu_op)" in result.stderr
    for rank in range(20, 40):
        rank_file(folder, rank)
    kineto.write(folder / "rank50.json", [{**gemm(5, 6), "cat": "hpu_op"}, all_reduce(0, 1)], **kineto.job(50, 60))
    files = [*map(str, find_traces([folder]))]
    output = overlap("analyze", *files).output
    assert "more notes" in output  # several files have to fit on two screens
    assert "1 event of other devices (hpu_op)" not in output
    output = overlap("analyze", "--all", *files).output
    assert "1 event of other devices (hpu_op)" in output[output.index("rank50.json, rank 50 of 60") :]


@pytest.mark.parametrize("processes", [1, 3])
def test_many_files_in_several_processes_give_what_one_process_gives(folder: Path, processes: int) -> None:
    for rank in range(20, 30):
        rank_file(folder, rank)
    (folder / "rank5.json").write_text("no JSON")
    files = find_traces([folder])
    seen: list[tuple[int, int]] = []
    found = analyze_files(files, processes=processes, progress=lambda done, total: seen.append((done, total)))
    expected = analyze([read_trace(file) for file in files if file.name != "rank5.json"])
    assert found.traces == expected.traces
    assert found.skew == expected.skew
    assert found.problems[1:] == expected.problems
    assert seen == [(done, len(files)) for done in range(1, len(files) + 1)]


def test_processes_know_the_rules_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_rules, "communication_patterns", [*name_rules.communication_patterns, "cutlass"])
    found = analyze_files(find_traces([folder]), processes=2)
    assert [trace.total.compute_ms for trace in found.traces] == [0, 0, 0]
    assert {*_RULES} == {name for name, rules in vars(name_rules).items() if isinstance(rules, list)}


def test_a_real_trace_in_an_archive_gives_its_figures(tmp_path: Path) -> None:
    paths = [reference.shared_trace(f"job128_rank{rank}.json.gz") for rank in (0, 1)]
    archive = tmp_path / "job.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        out.write(paths[0], "rank0.json.gz")
        out.writestr("rank1.json", gzip.decompress(paths[1].read_bytes()))
    found, expected = analyze_files(find_traces([archive])), analyze([read_trace(path) for path in paths])
    assert [trace.total for trace in found.traces] == [trace.total for trace in expected.traces]
    assert [trace.steps for trace in found.traces] == [trace.steps for trace in expected.traces]
    assert found.skew == expected.skew


# -- files of other profilers

OTHERS = {
    "report.nsys-rep": "nsys export --type sqlite report.nsys-rep",
    "report.qdrep": "nsys export --type sqlite",
    "results.csv": "of a profiler that is not supported (rocprof): take the trace with torch.profiler",
    "results.rpd.gz": "rocprof",
    "kernels.ncu-rep": "Nsight Compute",
    "rank0.pftrace": "the name given to export_chrome_trace ends in .pftrace: use a name that ends in .json.gz",
    "rank0.pftrace.gz": "a Perfetto trace",
    "host.xplane.pb": "a profile of JAX",
    "rank0.et": "an execution trace (Chakra)",
}
TRACE_EVENTS = {
    "rocprof": {"ph": "X", "name": "gemm", "ts": 1, "dur": 2, "pid": 6, "tid": 1, "args": {"BeginNs": "1"}},
    "JAX": {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0 NVIDIA H100"}},
    "of JAX": {"ph": "X", "pid": 1, "tid": 15, "ts": 1, "dur": 2, "name": "fusion.1", "args": {"hlo_module": "jit_f"}},
}
DOCUMENTS = {
    "execution trace (Chakra)": {"schema": "1.1.1-chakra.0.0.4", "pid": 7, "nodes": [{"id": 1, "name": "[pytorch]"}]},
    "Chakra": {"id": "1", "name": "all_reduce", "ctrlDeps": ["2"], "durationMicros": "3"},
    "(rocprof)": {"rocprofiler-sdk-tool": [{"buffer_records": {"kernel_dispatch": []}}]},
    "Nsight Systems as JSON": {"CudaEvent": {"startNs": "1", "endNs": "2"}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_profiler_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"something")
    assert OTHERS[name] in error_of("analyze", str(path))
    assert OTHERS[name] in error_of("analyze", str(tmp_path))  # and so is a folder that holds nothing else


@pytest.mark.parametrize("kind", [*DOCUMENTS, *TRACE_EVENTS])
def test_a_file_of_json_of_another_profiler_is_refused_as_what_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "results.json.gz"
    of_events = {"displayTimeUnit": "ns", "traceEvents": [TRACE_EVENTS[kind]] * 3} if kind in TRACE_EVENTS else None
    path.write_bytes(gzip.compress(json.dumps(of_events or DOCUMENTS[kind]).encode()))
    assert kind in error_of("analyze", str(path))


def test_what_no_rule_knows_is_refused_with_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "browser.json"
    event = {"ph": "X", "name": "paint", "ts": 1, "dur": 2, "pid": 6, "tid": 1}
    path.write_text("\n" + json.dumps({"traceEvents": [event] * 3}))
    line = error_of("analyze", str(path))
    assert "3 events, but no kernel and no operator of torch" in line
    assert "torch.profiler" in line
    assert "Nsight Systems" in line


def test_a_perfetto_trace_is_known_whatever_its_name_and_a_trace_that_begins_with_a_line_is_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(b"\n\x0b\x50\x01\x4a\x07\x08\x01\x10\x02\x18\x03\x20" * 20)
    assert "a Perfetto trace (protobuf), which is not supported" in error_of("analyze", str(path))
    path.write_bytes(b"\n" + kineto.text([gemm(0, 5), all_reduce(1, 2)]))
    assert analyze([read_trace(path)]).traces[0].total.compute_ms == 5


def test_an_archive_that_inflates_a_thousandfold_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", b'{"traceEvents":[' + b" " * 2**25)
    path.write_bytes(inside.getvalue())
    with pytest.raises(TraceError, match="no event ends within"):
        read_trace(path / "a.json")


@pytest.mark.parametrize("name", ["trace.json", "trace.zip", "trace.sqlite"])
def test_a_pipe_is_refused_at_once_though_nobody_writes_into_it(tmp_path: Path, name: str) -> None:
    os.mkfifo(pipe := tmp_path / name)
    good = str(rank_file(tmp_path / "good", 0))
    why = f"{pipe} cannot be read: it is a pipe or a device, and a trace is read twice"
    for command in (["analyze", str(pipe)], ["analyze", good, str(pipe)], ["compare", good, str(pipe)]):
        started = subprocess.run(
            [sys.executable, "-m", "overlap_callbacks", *command],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        if command[:2] == ["analyze", good]:  # the others are analysed without it
            assert "".join(why.split()) in "".join(started.stdout.split())  # lines are cut
        else:
            assert started.returncode == 2, started
            assert f"Error: {why}" in started.stderr


def test_what_a_shell_redirects_from_a_file_is_read_and_what_it_pipes_is_refused(tmp_path: Path) -> None:
    good = rank_file(tmp_path, 0)

    def analyzed(shell: str) -> subprocess.CompletedProcess[str]:
        command = f"{shlex.quote(sys.executable)} -m overlap_callbacks analyze"
        return subprocess.run(
            ["bash", "-c", shell.format(command, shlex.quote(str(good)))],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    assert "The device computes" in analyzed("{} /dev/stdin < {}").stdout
    for shell in ("cat {1} | {0} /dev/stdin", "{0} <(cat {1})"):
        found = analyzed(shell)
        assert found.returncode == 2, found
        assert "it is a pipe or a device" in found.stderr
