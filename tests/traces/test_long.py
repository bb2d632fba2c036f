"""Traces that are too long for memory: their figures are those of the same trace in memory, and memory is bounded."""

from __future__ import annotations

import itertools
import random
import resource
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.traces import TraceError, analyze_files, columns, device_events, read_trace
from overlap_callbacks.traces.analysis import Part, part_of
from overlap_callbacks.traces.columns import Column
from tests import kineto
from tests.toggling import at_night
from tests.traces import nsys_file, reference
from tests.traces.short_memory import hold, with_much_memory
from tests.traces.test_copies import PEER, WITHIN, copy, operator

US = 1000
SHARED = ("ddp_a100_x2", "ddp_v100_x2", "job128_rank0", "job128_rank1", "mi250_toy")


def part(path: Path) -> Part:
    return part_of(read_trace(path))


def assert_same(path: Path) -> None:
    found, whole = ((*each.figures, each[1:]) for each in (part(path), with_much_memory(lambda: part(path))))
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == theirs


@pytest.mark.parametrize("name", SHARED)
def test_real_traces_have_the_same_figures_in_pieces(
    monkeypatch: pytest.MonkeyPatch, short_memory: list[int], name: str
) -> None:
    hold(monkeypatch, 5 if name == "mi250_toy" else 500)
    assert_same(reference.shared_trace(f"{name}.json.gz"))
    assert len(short_memory) > (name != "mi250_toy")  # which has kernels of one step


def test_ranks_in_pieces_are_compared_as_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [reference.shared_trace(f"job128_rank{rank}.json.gz") for rank in (0, 1)]
    whole = analyze_files(files, processes=1)
    hold(monkeypatch, 500)
    assert analyze_files(files, processes=1) == whole
    assert whole.skew


@pytest.mark.parametrize("options", [{}, {"metadata": False}, {"overlapped": False}, {"slowdown": 0.3}])
def test_a_job_has_the_same_figures_in_pieces(tmp_path: Path, short_memory: list[int], options: dict[str, Any]) -> None:
    path = kineto.write(tmp_path / "trace.json", kineto.training(12, **options), **kineto.job())
    assert_same(path)
    assert sum(short_memory) == 12 * 32
    assert max(short_memory) <= 3 * 32
    assert len(short_memory) > 3


@pytest.mark.parametrize("seed", at_night(range(30), range(10, 30)))
def test_odd_traces_have_the_same_figures_in_pieces(tmp_path: Path, short_memory: list[int], seed: int) -> None:
    assert_same(kineto.write(tmp_path / "trace.json", odd_job(random.Random(seed)), **kineto.job()))
    assert short_memory


def test_exports_of_nsight_systems_have_the_same_figures_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    trace = kineto.write(tmp_path / "trace.json", kineto.training(12, metadata=False))
    assert_same(nsys_file.of_kineto(trace, tmp_path / "trace.sqlite"))
    assert len(short_memory) > 3


def test_a_file_that_is_cut_off_has_the_same_figures_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    whole = kineto.write(tmp_path / "whole.json", kineto.training(12), **kineto.job()).read_bytes()
    path = tmp_path / "cut.json"
    path.write_bytes(whole[: len(whole) * 4 // 5])
    assert_same(path)
    assert len(short_memory) > 3


def test_a_file_without_steps_has_no_path_and_no_picture_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    events = [event for event in kineto.training(12) if not event["name"].startswith("ProfilerStep")]
    path = kineto.write(tmp_path / "trace.json", events, **kineto.job())
    (found,), (whole,) = part(path).figures, with_much_memory(lambda: part(path)).figures
    assert len(short_memory) > 3
    assert whole.paths
    assert found == msgspec.structs.replace(whole, paths=(), picture=None)


def test_where_something_always_runs_a_piece_grows(tmp_path: Path, short_memory: list[int]) -> None:
    events = [*kineto.training(12), kineto.kernel("long", 0, 10**9, 0, stream=9)]
    assert_same(kineto.write(tmp_path / "trace.json", events, **kineto.job()))
    assert short_memory == [12 * 32 + 1]


def peak_of(path: Path) -> int:
    """The memory that Python's objects and NumPy's arrays take while a file is analysed, in bytes."""
    tracemalloc.start()
    part_of(read_trace(path, with_ranges=False), with_turns=False)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return used


def test_memory_does_not_grow_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(steps: int) -> int:
        events = kineto.training(steps, layers=40, operators=0)
        return peak_of(kineto.write(tmp_path / f"{steps}.json", events, **kineto.job()))

    in_memory = peak(80) / peak(20)
    hold(monkeypatch, 1000)
    in_pieces = peak(80) / peak(20)
    assert in_memory > 2
    assert in_pieces < 1.4


def sized(events: Iterator[kineto.Event]) -> Iterator[kineto.Event]:
    """A job whose collectives all have other sizes, as those of a mixture of experts; torch's ranges tell them."""
    for number, event in enumerate(events):
        args = {"Input Dims": [[number, *[1] * 300]], "Input type": ["float"]}
        yield {**event, "args": args} if event["name"] == "nccl:all_reduce" else event


def test_collectives_of_many_sizes_have_the_same_figures_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    events = sized(kineto.training(12, metadata=False))
    path = kineto.write(tmp_path / "trace.json", events, **kineto.job())
    assert_same(path)
    assert short_memory
    (found,) = part(path).figures
    sizes = [4 * number for number, event in enumerate(kineto.training(12)) if event["name"] == "nccl:all_reduce"]
    assert [row.bytes for row in found.collectives] == [sum(sizes)]


def test_memory_does_not_grow_with_the_text_of_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(steps: int) -> int:
        events = sized(kineto.training(steps, layers=40, metadata=False, operators=0))
        return peak_of(kineto.write(tmp_path / f"{steps}.json", events, **kineto.job()))

    hold(monkeypatch, 1000)
    monkeypatch.setattr(device_events, "_MOST_SIZES", 100)
    assert peak(80) < 1.4 * peak(20)


def test_kernels_outside_of_the_steps_are_looked_at_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    events = list(kineto.training(20))
    for first, last in ((6, 9), (4, 6), (21, 24)):  # in the middle, at the beginning, at the end
        names = {f"ProfilerStep#{number}" for number in range(first, last)}
        kept = [event for event in events if not event["name"].startswith("ProfilerStep") or event["name"] in names]
        short_memory.clear()
        assert_same(kineto.write(tmp_path / "trace.json", kept, **kineto.job()))
        assert len(short_memory) > 8
        assert max(short_memory) <= 3 * 32


@pytest.mark.parametrize("metadata", [True, False])
def test_few_of_many_ranges_are_asked_for(tmp_path: Path, short_memory: list[int], metadata: bool) -> None:
    # One is open to the end.
    events = list(kineto.training(30, metadata=metadata))
    odd = [{**event, "args": {}} if event["name"] == kineto.ALL_REDUCE and number % 97 == 0 else event
           for number, event in enumerate(events)]  # fmt: skip
    end = max(int(event["ts"]) for event in events) - kineto.BASE_NS
    forever = kineto.host_range("nccl:all_gather", 0, end, thread=101)
    assert_same(kineto.write(tmp_path / "trace.json", [forever, *odd, copy(1, 2, 0)], **kineto.job()))
    assert len(short_memory) > 8


def test_nothing_stays_behind(tmp_path: Path, short_memory: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    path = kineto.write(tmp_path / "trace.json", kineto.training(12), **kineto.job())
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    part(path)
    assert short_memory
    assert not list(folder.iterdir())


@pytest.mark.parametrize("most_bytes", [100, 400, 2_000])
def test_where_a_file_finds_no_room_that_is_an_error(
    tmp_path: Path, short_memory: list[int], monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    path = kineto.write(tmp_path / "trace.json", kineto.training(12), **kineto.job())
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        with pytest.raises(
            TraceError, match=r"too long for memory, and a temporary file cannot be written: .*too large"
        ):
            part(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(folder.iterdir())


def test_without_room_for_the_files_the_error_names_the_folder(
    tmp_path: Path, short_memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kineto.write(tmp_path / "trace.json", kineto.training(12), **kineto.job())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TraceError, match=r"too long for memory, and a temporary file cannot be written: .*TMPDIR"):
        part(path)
    assert not short_memory


@pytest.mark.parametrize("seed", at_night(range(30), range(10, 30)))
def test_cpu_jobs_have_the_same_figures_in_pieces(tmp_path: Path, short_memory: list[int], seed: int) -> None:
    chance = random.Random(seed)
    head = {**kineto.job(), **({} if chance.random() < 0.5 else {"deviceProperties": []})}
    assert_same(kineto.write(tmp_path / "trace.json", cpu_job(chance), **head))
    assert short_memory


def test_operators_of_a_cpu_job_are_looked_at_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    events = [
        event
        for step in range(20)
        for event in (
            kineto.step(step, 1000 * step, 1000 * step + 900),
            *[
                kineto.host_range("aten::mm", 1000 * step + at, 1000 * step + at + 40, cat="cpu_op")
                for at in range(0, 800, 50)
            ],
            kineto.host_range("gloo:all_reduce", 1000 * step + 100, 1000 * step + 700, thread=7),
        )
    ]
    assert_same(kineto.write(tmp_path / "trace.json", events, **kineto.job()))
    assert len(short_memory) > 5
    assert sum(short_memory) == 20 * 17


def cpu_job(chance: random.Random) -> Iterator[kineto.Event]:
    """A CPU job with nested operators, some of which cross, on two threads; some wait, and Gloo's ranges run beside."""
    now = 1000
    names = ("aten::mm", "aten::add", "autograd::engine::evaluate_function: X", "c10d::allreduce_", "MyFunction",
             "_c10d_functional::wait_tensor")  # fmt: skip
    for step in range(chance.randrange(3, 9)):
        begin = now
        for _ in range(chance.randrange(5, 25)):
            end = now + chance.randrange(1, 30) * US
            thread = chance.choice((100, 100, 100, 101))
            at = now
            for _ in range(chance.randrange(1, 4)):
                inner = chance.randrange(at, max(end, at) + (2000 if chance.random() < 0.02 else 1))
                yield kineto.host_range(chance.choice(names), at, inner, cat="cpu_op", thread=thread)
                at = chance.randrange(at, max(inner, at) + 1)
            yield kineto.host_range(chance.choice(names), now, end, cat="cpu_op", thread=thread)
            if chance.random() < 0.3:
                name = chance.choice(("gloo:all_reduce", "gloo:all_gather", "nccl:all_reduce", "mine"))
                lasts = chance.randrange(0, 60) * US
                yield kineto.host_range(name, now + 10, now + 10 + lasts, thread=chance.choice((7, 8)))
            now = end + chance.choice((0, 500, 3000))
        if chance.random() < 0.9:
            yield kineto.step(step, begin, now - 1)
        now += chance.choice((0, 100 * US))


def odd_job(chance: random.Random) -> Iterator[kineto.Event]:
    """A job with everything that makes kernels hard to place: on two devices, with what a real trace may lack."""
    number, now = 0, 1000
    lost = chance.choice((0.0, 0.0, 0.02, 0.3))
    metadata = chance.choice((0.0, 0.5, 1.0))
    ends = dict.fromkeys(itertools.product((0, chance.choice((0, 1))), (7, 20, 21)), 0)
    for step in range(chance.randrange(4, 10)):
        begin = now
        for _ in range(chance.randrange(10, 40)):
            number += 1
            device, stream = chance.choice(list(ends))
            launched = now + chance.randrange(2) * US
            start = max(ends[device, stream], launched + chance.randrange(0, 9) * US)
            end = start + chance.choice((0, 500, 3 * US, 40 * US))
            ends[device, stream] = end
            if chance.random() >= lost:
                yield kineto.launch(launched, number, thread=chance.choice((100, 100, 101)))
            yield from odd_kernel(chance, number, launched, (start, end), stream, device, metadata)
            if chance.random() < 0.05:
                now = max(now, *ends.values())
                yield kineto.host_range("cudaDeviceSynchronize", launched, now, cat="cuda_runtime")
            now += chance.randrange(1, 12) * US
        if chance.random() < 0.8:
            yield kineto.step(step, begin, now - 1)
        now = max(now, *ends.values()) + US if chance.random() < 0.7 else now


def odd_kernel(
    chance: random.Random,
    number: int,
    launched: int,
    ran: tuple[int, int],
    stream: int,
    device: int,
    metadata: float,
) -> Iterator[kineto.Event]:
    options: dict[str, Any] = {"stream": stream, "device": device}
    if stream == 7:
        name = chance.choice((kineto.GEMM, kineto.NORM, kineto.ADD))
        shape = {"grid": (chance.choice((1, 2)), 1, 1), "shared memory": chance.choice((0, 1024))}
        yield kineto.kernel(name, *ran, number, **shape, **options)
    elif chance.random() < 0.3:
        name = chance.choice((WITHIN, WITHIN, PEER))
        if chance.random() < 0.7:
            kind = chance.choice(("_allgather_base", "allreduce"))
            yield operator(launched - 200, launched + 200, kind, chance.choice((1, 2, 2, None)))
        yield {**copy(0, 0, number, name=name, **options), **times_of(ran)}
    else:
        name = chance.choice((kineto.ALL_REDUCE, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"))
        args = kineto.METADATA if chance.random() < metadata else {}
        if chance.random() < 0.5:
            yield kineto.host_range(
                "nccl:all_reduce", launched - 300, launched + 300,
                **{"Input Dims": [[chance.choice((8, 64))]], "Input type": ["float"]},
            )  # fmt: skip
        yield kineto.kernel(name, *ran, number, **options, **args, **({"Seq": number} if args and number % 3 else {}))


def times_of(ran: tuple[int, int]) -> dict[str, Any]:
    event = kineto.kernel("", *ran, 0)
    return {"ts": event["ts"], "dur": event["dur"]}


def test_a_column_is_mapped_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_IN_MEMORY", 100)
    values = np.random.default_rng(0).integers(-(2**62), 2**62, 150)
    for number in (0, 1, 100, 101, 150):
        column = Column()
        for part_of_values in np.array_split(values[:number], 7):
            column.append(part_of_values)
        found = column.finished()
        assert (found == values[:number]).all()
        assert found.flags.writeable == (number <= 100)
        columns.release()
        assert (found == values[:number]).all()
