"""Traces that are too long for memory are compared as those in memory are."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.traces import TraceError, compare_files
from tests import kineto
from tests.toggling import at_night
from tests.traces import nsys_file, reference
from tests.traces.events import overlap
from tests.traces.short_memory import hold, with_much_memory
from tests.traces.test_long import cpu_job, odd_job

MAIN, BACKWARD = 100, 200


def numbers(found: Any) -> Iterator[tuple[str, Any]]:
    """The values of nested objects and lists, each with the way to it."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from ((f".{key}{way}", number) for way, number in numbers(value))
    elif isinstance(found, (list, tuple)):
        for place, value in enumerate(found):
            # What loses the most comes first; of what loses the same, either.
            row = value if isinstance(value, dict) else {}
            named = [str(row[key]) for key in ("name", "victim", "beside") if isinstance(row.get(key), str)]
            named += [str(row["communication"])] if named and "communication" in row else []
            yield from ((f"[{' '.join(named) or place}]{way}", number) for way, number in numbers(value))
    else:
        yield "", found


def assert_same(files: Iterable[Path]) -> None:
    """Compare two files in pieces and in memory. Sums of sums may differ in their last digit."""
    overlapped, sequential = files
    whole = with_much_memory(lambda: compare_files(overlapped, sequential))
    found = compare_files(overlapped, sequential)
    mine, theirs = (dict(numbers(msgspec.to_builtins(side))) for side in (found, whole))
    for way, value in theirs.items():
        if isinstance(value, float):
            assert mine[way] == pytest.approx(value, rel=1e-12, abs=1e-12), way
        else:
            assert mine[way] == value, way
    assert mine.keys() == theirs.keys()


def job(folder: Path, **options: Any) -> tuple[Path, Path]:
    overlapped = kineto.training(12, slowdown=0.3, **options)
    sequential = kineto.training(9, overlapped=False, **options)
    return (
        kineto.write(folder / "overlapped.json", overlapped, **kineto.job()),
        kineto.write(folder / "sequential.json", sequential, **kineto.job()),
    )


@pytest.mark.parametrize("options", [{}, {"metadata": False}, {"layers": 3}])
def test_a_job_is_compared_in_pieces(tmp_path: Path, short_memory: list[int], options: dict[str, Any]) -> None:
    assert_same(job(tmp_path, **options))
    assert len(short_memory) > 8
    assert max(short_memory) <= 100


def test_one_file_in_pieces_and_one_in_memory(tmp_path: Path, short_memory: list[int]) -> None:
    overlapped, _ = job(tmp_path)
    short = kineto.write(tmp_path / "short.json", kineto.training(1, layers=1, overlapped=False), **kineto.job())
    assert_same((overlapped, short))
    assert short_memory


def test_exports_of_nsight_systems_are_compared_in_pieces(tmp_path: Path, short_memory: list[int]) -> None:
    overlapped, sequential = job(tmp_path, metadata=False)
    assert_same(nsys_file.of_kineto(file, tmp_path / f"{file.stem}.sqlite") for file in (overlapped, sequential))
    assert short_memory


@pytest.mark.parametrize("name", ["ddp_a100_x2", "ddp_v100_x2"])
def test_real_traces_are_compared_in_pieces(
    monkeypatch: pytest.MonkeyPatch, short_memory: list[int], name: str
) -> None:
    hold(monkeypatch, 500)
    file = reference.shared_trace(f"{name}.json.gz")
    assert_same((file, file))
    assert short_memory


@pytest.mark.parametrize("seed", at_night(range(20), range(5, 20)))
def test_odd_traces_are_compared_in_pieces(tmp_path: Path, short_memory: list[int], seed: int) -> None:
    files = []
    for number in range(2):
        events = [
            event for event in odd_job(random.Random(seed + 100 * number)) if event.get("args", {}).get("device") != 1
        ]
        files.append(kineto.write(tmp_path / f"{number}.json", events, **kineto.job()))
    assert_same(files)
    assert short_memory


@pytest.mark.parametrize("seed", range(5))
def test_cpu_jobs_are_compared_in_pieces(tmp_path: Path, short_memory: list[int], seed: int) -> None:
    files = [
        kineto.write(tmp_path / f"{number}.json", cpu_job(random.Random(seed + 100 * number)), **kineto.job())
        for number in range(2)
    ]
    assert_same(files)
    assert short_memory


def test_without_steps_a_file_is_one_piece(tmp_path: Path, short_memory: list[int]) -> None:
    files = [
        kineto.write(
            tmp_path / f"{number}.json",
            [event for event in kineto.training(8, slowdown=0.2 * number) if "ProfilerStep" not in event["name"]],
            **kineto.job(),
        )
        for number in range(2)
    ]
    assert_same(files)
    assert set(short_memory) == {8 * 32}


@pytest.mark.parametrize("steps", [12, 1])
def test_a_file_that_is_cut_off_is_compared_as_in_memory(tmp_path: Path, short_memory: list[int], steps: int) -> None:
    _, sequential = job(tmp_path)
    events = [
        event
        for event in kineto.training(12, slowdown=0.3)
        if "ProfilerStep" not in event["name"] or event["name"] in {f"ProfilerStep#{4 + i}" for i in range(steps)}
    ]
    whole = kineto.write(tmp_path / "whole.json", events, **kineto.job())
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 4 // 5])
    assert_same((cut, sequential))
    found = compare_files(cut, sequential)
    assert not found.valid
    assert any("cut off" in problem for problem in found.problems)
    assert short_memory


# -- ranges of the host


def nested_ranges(chance: random.Random, begin: int, end: int, thread: int, depth: int = 0) -> Iterator[kineto.Event]:
    now = begin
    while end - now > 2_000 and depth < 4:
        start = now + chance.randrange(0, 3_000)
        stop = min(end, start + chance.randrange(1_000, 30_000))
        if stop > start:
            category = chance.choice(("python_function", "user_annotation"))
            name = f"part {chance.randrange(12)}"
            yield kineto.host_range(
                f"nn.Module: {name}" if category == "python_function" else name, start, stop, cat=category,
                thread=thread,
            )  # fmt: skip
            yield from nested_ranges(chance, start, stop, thread, depth + 1)
        now = stop + chance.randrange(0, 2_000)


def with_ranges(events: Iterable[kineto.Event], seed: int) -> list[kineto.Event]:
    """A job with nested ranges on the training thread; some launches come from another thread."""
    chance, found = random.Random(seed), []
    for event in events:
        found.append({**event, "tid": BACKWARD} if event["cat"] == "cuda_runtime" and chance.random() < 0.3 else event)
    end = max(int(event["ts"]) for event in found) - kineto.BASE_NS
    return [*found, *nested_ranges(chance, 0, end, MAIN)]


@pytest.mark.parametrize("seed", at_night(range(10), range(3, 10)))
def test_ranges_of_the_host_are_compared_in_pieces(tmp_path: Path, short_memory: list[int], seed: int) -> None:
    jobs = kineto.training(12, slowdown=0.3), kineto.training(9, overlapped=False)
    files = [
        kineto.write(tmp_path / f"{number}.json", with_ranges(events, seed), **kineto.job())
        for number, events in enumerate(jobs)
    ]
    assert_same(files)
    assert len(compare_files(*files).ranges) > 5
    assert short_memory


@pytest.mark.parametrize("seed", at_night(range(10), range(3, 10)))
def test_ranges_that_cross_are_compared_in_pieces(tmp_path: Path, short_memory: list[int], seed: int) -> None:
    chance, files = random.Random(seed), []
    for number, events in enumerate((kineto.training(12, slowdown=0.3), kineto.training(9, overlapped=False))):
        found = list(events)
        end = max(int(event["ts"]) for event in found) - kineto.BASE_NS
        for _ in range(300):
            start = chance.randrange(end)
            found.append(
                kineto.host_range(f"part {chance.randrange(12)}", start, start + chance.randrange(1, end // 9))
            )
        files.append(kineto.write(tmp_path / f"{number}.json", found, **kineto.job()))
    assert_same(files)
    assert short_memory


# -- memory, and the command


def test_memory_does_not_grow_with_the_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(steps: int) -> int:
        files = [
            kineto.write(tmp_path / f"{steps}-{number}.json", kineto.training(steps, layers=40, operators=0))
            for number in range(2)
        ]
        tracemalloc.start()
        compare_files(*files)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    in_memory = peak(80) / peak(20)
    hold(monkeypatch, 1000)
    in_pieces = peak(80) / peak(20)
    assert in_memory > 2
    assert in_pieces < 1.4


def test_a_second_file_that_cannot_be_read_is_refused_before_the_first_is_read(tmp_path: Path) -> None:
    overlapped, _ = job(tmp_path)
    read: list[int] = []
    for missing, why in ((tmp_path / "missing.json", "No such file"), (tmp_path, "is a folder")):
        with pytest.raises(TraceError, match=why):
            compare_files(overlapped, missing, lambda done, total: read.append(done))
    assert not read


def test_the_command_compares_long_files_and_leaves_nothing_behind(
    tmp_path: Path, short_memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = job(tmp_path)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    output = overlap("compare", *map(str, files), "--csv", "figures").stdout
    assert output.startswith("figure,value\ncompute_slowdown,")
    assert short_memory
    assert not list(folder.iterdir())
