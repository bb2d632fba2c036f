"""Exports of Nsight Systems: the figures of the Kineto files that they are made from, exactly."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.traces import TraceError, analyze, analyze_files, find_traces, nsys, nsys_tables, read_trace
from overlap_callbacks.traces.figures import TraceFigures
from tests import kineto
from tests.traces import nsys_file, reference, short_memory
from tests.traces.events import MS, all_reduce, error_of, gemm, overlap, said


def comparable(found: TraceFigures) -> object:
    """All figures but what Kineto's metadata give of the job and its collectives: Nsight Systems does not have it."""
    collectives: dict[str, list[float]] = {}
    for row in found.collectives:
        total = collectives.setdefault(row.collective, [0, 0, 0])
        for place, value in enumerate((row.count, round(row.time_ms * 1e6), round(row.hidden_ms * 1e6))):
            total[place] += value
    whole = msgspec.to_builtins(found)
    for key in ("file", "rank", "world_size", "problems", "warnings", "recorded"):
        del whole[key]
    # Sizes and groups of exposed collectives are of the metadata; their times and steps are not.
    exposure = whole["exposure"] or {"rows": ()}
    times = [round(sum(row[name] for row in exposure["rows"]) * 1e6) for name in ("exposed_ms", "hidden_ms", "calls")]
    return {**whole, "collectives": collectives, "exposure": (exposure.get("num_steps"), times)}


@pytest.mark.parametrize("name", ["ddp_a100_x2", "ddp_v100_x2", "job128_rank0", "job128_rank1", "mi250_toy"])
def test_figures_of_an_export_equal_those_of_the_kineto_file_that_it_is_made_from(tmp_path: Path, name: str) -> None:
    trace = reference.shared_trace(f"{name}.json.gz")
    export = nsys_file.of_kineto(trace, tmp_path / "report.sqlite")
    (of_kineto,), (of_nsys,) = (analyze([read_trace(path)]).traces for path in (trace, export))
    assert of_nsys.total.compute_ms > 0
    assert comparable(of_nsys) == comparable(of_kineto)


def exported(path: Path, *events: kineto.Event) -> nsys_file.NsysFile:
    report = nsys_file.NsysFile(path)
    report.add([{**event, **{key: event[key] / 1000 for key in ("ts", "dur")}} for event in events])
    return report


def two_steps(first: str, second: str) -> list[kineto.Event]:
    ranges = [kineto.host_range(name, i * MS, (i + 1) * MS) for i, name in enumerate((first, second))]
    calls = [kineto.launch(i * MS + 100, i + 1) for i in range(2)]
    return [*ranges, *calls, gemm(0.5, 0.7, 1), gemm(1.5, 1.8, 2), all_reduce(0.6, 0.65)]


@pytest.mark.parametrize(("first", "second"), [("iteration 3", "iteration 4"), ("train_step_3", "train_step_4")])
def test_without_steps_of_torch_ranges_that_are_named_like_steps_are_them(
    tmp_path: Path, first: str, second: str
) -> None:
    (found,) = analyze([read_trace(exported(tmp_path / "a.sqlite", *two_steps(first, second)).close())]).traces
    assert [(step.step, step.compute_ms) for step in found.steps] == [(3, 0.2), (4, 0.3)]
    assert said(found.problems, f"names like {first}")


@pytest.mark.parametrize(("pattern", "numbers"), [("^batch of", [0, 1]), (r"of (\d+)", [8, 9])])
def test_an_option_names_the_steps_of_either_kind_of_file(tmp_path: Path, pattern: str, numbers: list[int]) -> None:
    events = two_steps("batch of 8", "batch of 9")
    paths = [exported(tmp_path / "a.sqlite", *events).close(), kineto.write(tmp_path / "a.json", events)]
    for path in paths:
        output = overlap("analyze", str(path), "--step", pattern, "--json").stdout
        steps = msgspec.json.decode(output)["traces"][0]["steps"]
        assert [(step["step"], step["compute_ms"]) for step in steps] == list(zip(numbers, (0.2, 0.3), strict=True))


def test_without_any_steps_the_file_counts_as_a_whole_and_says_so(tmp_path: Path) -> None:
    path = exported(tmp_path / "a.sqlite", *two_steps("forward", "backward")).close()
    (found,) = analyze([read_trace(path)]).traces
    assert (found.steps, found.total.compute_ms) == ((), 0.5)
    assert said(found.problems, "no NVTX range names a step", "--step REGEX")


def test_a_report_of_several_processes_is_one_trace_of_each(tmp_path: Path) -> None:
    report = nsys_file.NsysFile(tmp_path / "a.sqlite")
    for process in (11, 12):
        events = [gemm(0, process, 5), all_reduce(1, 2, 6), kineto.launch(0, 5), kineto.launch(10, 6)]
        report.add([{**event, "ts": event["ts"] / 1000, "dur": event["dur"] / 1000} for event in events], process)
    path = report.close()
    found = find_traces([path])
    assert found == [path / "11", path / "12"]
    analysis = analyze([read_trace(trace) for trace in found])
    assert [trace.total.compute_ms for trace in analysis.traces] == [11, 12]
    assert [trace.file for trace in analysis.traces] == list(map(str, found))
    assert analyze([read_trace(path)]) == analysis  # their launches have the same numbers
    assert "holds no CUDA kernels of process 13" in error_of("analyze", str(path / "13"))


def of_hosts(path: Path, hosts: tuple[int, ...], processes: tuple[int, ...]) -> Path:
    """Of a process on each host: its launches have the same numbers, and its kernels tell the host by their length."""
    report = nsys_file.NsysFile(path)
    for host, process in zip(hosts, processes, strict=True):
        report.host = host
        events = [
            kineto.step(1, 0, 300 * MS), kineto.launch(0, 5), gemm(1, 1 + host, 5), kineto.launch(10, 6),
            all_reduce(250, 251, 6),
        ]  # fmt: skip
        report.add([{**event, "ts": event["ts"] / 1000, "dur": event["dur"] / 1000} for event in events], process)
        report.row("TARGET_INFO_GPU", vmId=nsys_file.number_of(0, host=host), id=0, name=f"GPU of {host}")
    return report.close()


@pytest.mark.parametrize("hosts", [(1, 2), (3, 200)])  # in SQLite the number of the last one is negative
def test_processes_of_one_number_on_two_hosts_are_two(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    path = of_hosts(tmp_path / "a.sqlite", hosts, (77, 77))
    names = [f"{host << 8}-77" for host in hosts]
    files = find_traces([path])
    assert files == [path / name for name in names]
    found = analyze_files(files)
    assert [(trace.total.compute_ms, trace.device_name) for trace in found.traces] == [
        (host, f"GPU of {host}") for host in hosts
    ]
    assert not any(trace.warnings for trace in found.traces)
    assert analyze([read_trace(path)]).traces == found.traces
    assert f"holds {names[0]}, {names[1]}, but no 77" in error_of("analyze", str(path / "77"))
    assert f"holds 2 ranks: give one of them, as in {path}/{names[0]}" in error_of("compare", str(path), str(path))


def test_of_several_hosts_only_processes_of_one_number_are_named_by_it(tmp_path: Path) -> None:
    path = of_hosts(tmp_path / "a.sqlite", (1, 2, 3), (77, 78, 78))
    assert find_traces([path]) == [path / name for name in ("77", "512-78", "768-78")]
    assert [trace.total.compute_ms for trace in analyze_files(find_traces([path])).traces] == [1, 2, 3]
    alone = of_hosts(tmp_path / "b.sqlite", (4,), (77,))
    assert find_traces([alone]) == [alone]


def test_ncclss_own_ranges_tell_the_collective(tmp_path: Path) -> None:
    events = [
        kineto.host_range("ncclAllGather", 0, 1_000),
        kineto.launch(500, 1),
        kineto.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 5_000, 9_000, 1),
        gemm(0, 1),
    ]
    (found,) = analyze([read_trace(exported(tmp_path / "a.sqlite", *events).close())]).traces
    assert [row.collective for row in found.collectives] == ["all_gather"]


def test_graphs_without_their_kernels_are_said(tmp_path: Path) -> None:
    report = exported(tmp_path / "a.sqlite", gemm(0, 1))
    report.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER)")
    report.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2)
    assert said(read_trace(report.close()).problems, "1 CUDA graphs", "--cuda-graph-trace=node")


def test_columns_that_a_version_lacks_cost_what_they_tell_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    tables = sqlite3.connect(path)
    tables.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    tables.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, demangledName)")
    tables.execute(f"INSERT INTO StringIds VALUES (1, '{kineto.GEMM}'), (2, '{kineto.ALL_REDUCE}')")
    tables.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 2000, 0, 7, 1), (1000, 3000, 0, 8, 2)")
    tables.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('soon', 2000, 0, 7, 1), (1, NULL, 0, 7, 1)")
    tables.commit()
    tables.close()
    (found,) = analyze([read_trace(path)]).traces
    assert (found.total.compute_ms, found.total.hidden_comm_ms) == (0.002, 0.001)
    assert said(found.problems, "2 events have no time")


def test_rows_without_times_leave_the_others_as_they_are_wherever_memory_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sqlite"
    tables = sqlite3.connect(path)
    tables.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    tables.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, demangledName)")
    tables.execute(f"INSERT INTO StringIds VALUES (0, '{kineto.GEMM}'), (1, '{kineto.ALL_REDUCE}')")
    for number in range(40):
        start = 10_000 * number
        # Some have no end, and some last longer than any clock counts.
        end = None if number % 5 == 1 else start + (2**61 if number % 7 == 2 else 1_000 * (1 + number % 3))
        tables.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, ?, ?)", (start, end, number, number % 2)
        )
    tables.commit()
    tables.close()
    timed = [number for number in range(40) if number % 5 != 1 and number % 7 != 2]
    (expected,) = analyze([read_trace(path)]).traces
    assert expected.total.compute_ms == pytest.approx(sum(1 + number % 3 for number in timed if not number % 2) / 1000)
    for at_once in (1, 3, 4, 64):
        short_memory.hold(monkeypatch, at_once)
        monkeypatch.setattr(nsys, "ROWS_AT_ONCE", 4)
        monkeypatch.setattr(nsys_tables, "ROWS_AT_ONCE", 4)
        trace = read_trace(path)
        assert said(trace.problems, f"{40 - len(timed)} events have no time")
        assert short_memory.with_much_memory(lambda trace=trace: analyze([trace]).traces) == (expected,)


def test_a_database_of_something_else_and_a_damaged_one_give_one_line(tmp_path: Path) -> None:
    other = tmp_path / "rocpd.db"
    tables = sqlite3.connect(other)
    tables.execute("CREATE TABLE rocpd_api (id INTEGER)")
    tables.commit()
    tables.close()
    assert "is a database, but not an export of Nsight Systems" in error_of("analyze", str(other))
    whole = exported(tmp_path / "a.sqlite", *(gemm(i, i + 1) for i in range(2_000))).close()
    content = bytearray(whole.read_bytes())
    content[len(content) // 4 :] = b"\xff" * (len(content) - len(content) // 4)
    damaged = tmp_path / "b.sqlite"
    damaged.write_bytes(content)
    with pytest.raises(TraceError, match=r"b\.sqlite"):
        read_trace(damaged)


# -- Parquet


def test_an_export_in_parquet_gives_what_that_in_sqlite_gives(tmp_path: Path) -> None:
    database = nsys_file.of_kineto(reference.shared_trace("ddp_a100_x2.json.gz"), tmp_path / "report.sqlite")
    folder = nsys_file.in_parquet(database, tmp_path / "report_pqtdir")
    (of_sqlite,), (of_parquet,), (of_folder,) = (
        analyze([read_trace(path) for path in paths]).traces for paths in ([database], find_traces([folder]), [folder])
    )
    assert comparable(of_parquet) == comparable(of_folder) == comparable(of_sqlite)
    assert (of_parquet.file, of_parquet.problems) == (str(folder), of_sqlite.problems)


def test_each_process_of_an_export_in_parquet_is_a_trace(tmp_path: Path) -> None:
    report = exported(tmp_path / "a.sqlite", *two_steps("iteration 1", "iteration 2"))
    report.add([{**event, **{key: event[key] / 1000 for key in ("ts", "dur")}} for event in (gemm(2, 5),)], process=5)
    nsys_file.in_parquet(report.close(), tmp_path / "pqtdir")
    files = find_traces([tmp_path / "pqtdir"])
    found = analyze([read_trace(path) for path in files]).traces
    assert [(Path(trace.file).name, trace.total.compute_ms) for trace in found] == [("5", 3), ("77", 0.5)]


def test_without_pyarrow_an_export_in_parquet_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = exported(tmp_path / "a.sqlite", *two_steps("iteration 1", "iteration 2")).close()
    folder = nsys_file.in_parquet(database, tmp_path / "report_pqtdir")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    line = error_of("analyze", str(folder))
    assert "pip install 'overlap-callbacks[tables]'" in line
    assert "nsys export --type sqlite" in line


def test_damaged_and_foreign_tables_of_parquet_are_refused(tmp_path: Path) -> None:
    database = exported(tmp_path / "a.sqlite", *two_steps("iteration 1", "iteration 2")).close()
    folder = nsys_file.in_parquet(database, tmp_path / "report_pqtdir")
    table = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    content = bytearray(table.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    table.write_bytes(content)
    assert "cannot be read as Parquet" in error_of("analyze", str(folder))
    assert "a Parquet table, but not CUPTI_ACTIVITY_KIND_KERNEL" in error_of(
        "analyze", str(folder / "StringIds.parquet")
    )
    table.unlink()
    assert "is an export of Nsight Systems, but holds no CUDA kernels" in error_of("analyze", str(folder))
