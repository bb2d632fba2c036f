"""Copies contend like kernels: what they slow down, and what slows them down. Times are added up by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.traces import analyze, compare, read_trace
from tests import kineto
from tests.traces import nsys_file
from tests.traces.events import MS, all_reduce, figures_of, gemm, overlap
from tests.traces.test_copies import PEER, WITHIN, copy

TO_HOST, FROM_HOST = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
SIZE = {**kineto.METADATA, "In msg nelems": 6_500_000, "Out msg nelems": 6_500_000}
# Start and length in ms of the collectives of a step.
ALONE, BESIDE = (10, 5), (40, 10)


def offload(start: float, end: float, name: str = TO_HOST, size: int | None = 2**26) -> kineto.Event:
    found = copy(start, end, 0, stream=21, name=name)
    found["args"].pop("grid"), found["args"].pop("block")
    return found if size is None else {**found, "args": {**found["args"], "bytes": size}}


def job(*of_step: kineto.Event, steps: int = 3, each: float = 100) -> list[kineto.Event]:
    """The events of a step, in each of some steps, with launches."""
    found = []
    for number in range(steps):
        found.append(kineto.step(number, round(each * number * MS), round(each * (number + 1) * MS) - 1))
        for place, event in enumerate(of_step):
            correlation = 1 + number * len(of_step) + place
            moved = kineto.Nanoseconds(event["ts"] + round(each * number * MS))
            found.append(kineto.launch(moved - kineto.BASE_NS - 5_000, correlation))
            found.append({**event, "ts": moved, "args": {**event["args"], "correlation": correlation}})
    return found


def reduce(start: float, length: float, **args: object) -> kineto.Event:
    return all_reduce(start, start + length, **{**SIZE, **args})


def rows(found: tuple[PairTime, ...]) -> dict[tuple[str, str], tuple[float, ...]]:
    """Calls, covered time, time and time alone by victim and what ran beside it."""
    assert len({(pair.kernel_family, pair.concurrent_with) for pair in found}) == len(found)
    return {
        (pair.kernel_family, pair.concurrent_with): (pair.calls, pair.concurrent_ms, pair.time_ms, pair.alone_ms)
        for pair in found
    }


@pytest.mark.parametrize(
    ("name", "direction"),
    [(TO_HOST, "copies to the host"), (FROM_HOST, "copies from the host"), (WITHIN, "copies within the device"),
     ("CopyDeviceToHost", "copies to the host"), ("Memcpy HtoD (Host -> Device)", "copies from the host")],
)  # fmt: skip
def test_a_collective_that_takes_twice_as_long_beside_copies(tmp_path: Path, name: str, direction: str) -> None:
    found = figures_of(tmp_path, job(gemm(1, 4), reduce(*ALONE), reduce(*BESIDE), offload(40, 50, name)))
    assert rows(found.beside_copies) == {("all_reduce", direction): (3, 30, 30, 15)}
    assert found.beside_copies[0].slowdown == found.beside_copies[0].slowdown_during == 1.0


def test_the_first_sentences_say_what_copies_cost(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "t.json", job(gemm(1, 4), reduce(*ALONE), reduce(*BESIDE), offload(40, 50)))
    told = overlap("analyze", str(path)).output.split("\n\n")[0]
    assert "all_reduce +100.0% during copies to the host (10.000 ms against 5.000 ms alone)" in told
    assert (
        "all_reduce,True,copies to the host,3.0,30.0,30.0,15.0,1.0"
        in overlap("analyze", str(path), "--csv", "copies").output
    )


def test_the_same_turn_of_other_steps_is_compared_where_sizes_are_not_told(tmp_path: Path) -> None:
    events = []
    for number in range(6):
        length = 10 if number % 2 else 5
        base = 50 * number
        events += [kineto.step(number, base * MS, (base + 50) * MS - 1)]
        events += [all_reduce(base + 10, base + 10 + length), gemm(base + 30, base + 34)]
        events += [offload(base + 10, base + 20)] if number % 2 else []
    found = figures_of(tmp_path, events)
    assert rows(found.beside_copies) == {("all_reduce", "copies to the host"): (3, 30, 30, 15)}


def test_several_copies_in_one_collective_are_one_cause(tmp_path: Path) -> None:
    # 3 + 3 + 2 ms of 10, the last two at once for one.
    copies = [offload(40, 43), offload(44, 47), {**offload(46, 48), "tid": 22}]
    found = figures_of(tmp_path, job(gemm(1, 4), reduce(*ALONE), reduce(*BESIDE), *copies))
    assert rows(found.beside_copies) == {("all_reduce", "copies to the host"): (3, 21, 30, 15)}


def test_of_copies_in_both_directions_the_longer_ones_are_the_cause(tmp_path: Path) -> None:
    copies = [offload(40, 47), offload(47, 50, FROM_HOST)]
    found = figures_of(tmp_path, job(gemm(1, 4), reduce(*ALONE), reduce(*BESIDE), *copies))
    assert rows(found.beside_copies) == {("all_reduce", "copies to the host"): (3, 30, 30, 15)}


def test_a_copy_is_slower_beside_a_collective_than_one_of_its_size_alone(tmp_path: Path) -> None:
    # 64 MB take 2 ms alone and 3 ms beside; 256 MB alone take 8 ms, and small ones no time.
    copies = [offload(1, 3), offload(41, 44), offload(60, 68, size=2**28), offload(70, 70.001, size=8)]
    found = figures_of(tmp_path, job(reduce(40, 10), *copies))
    assert rows(found.beside_copies) == {("copies to the host", "communication"): (3, 9, 9, 6)}


def test_copies_between_devices_communicate_and_are_victims_of_others(tmp_path: Path) -> None:
    copies = [offload(10, 14, PEER), offload(40, 46, PEER), offload(40, 46)]
    for number, event in enumerate(copies):
        event["tid"] = 30 + number
    found = figures_of(tmp_path, job(gemm(1, 4), *copies, offload(60, 64)))
    # The copies to the host take 6 ms beside those between devices, and 4 alone.
    assert rows(found.beside_copies) == {
        ("peer_copy", "copies to the host"): (3, 18, 18, 12),
        ("copies to the host", "communication"): (3, 18, 18, 12),
    }


def test_compute_beside_a_copy_is_slower_and_is_not_alone(tmp_path: Path) -> None:
    # A product takes 4 ms alone, 5 beside an all-reduce, 6 beside a copy of the next batch.
    products = [gemm(1, 5), gemm(20, 25), gemm(40, 46)]
    found = figures_of(tmp_path, job(*products, reduce(19, 10), offload(39, 50, FROM_HOST)))
    assert found.estimate is not None
    assert (found.estimate.slowdown, found.estimate.calls_beside, found.estimate.calls_alone) == (0.25, 3, 3)
    assert rows(found.beside_copies) == {("gemm", "copies from the host"): (3, 18, 18, 12)}


def test_beside_both_a_copy_and_a_collective_compute_is_compared_with_neither(tmp_path: Path) -> None:
    products = [gemm(1, 5), gemm(20, 25), gemm(40, 47)]
    events = job(*products, reduce(19, 10), reduce(39, 10), offload(38, 51, FROM_HOST))
    found = figures_of(tmp_path, events)
    assert found.estimate is not None
    assert (found.estimate.slowdown, found.estimate.calls_beside) == (0.25, 3)
    assert not any(pair.kernel_family == "gemm" for pair in found.beside_copies)


def test_an_export_of_nsight_systems_tells_the_sizes_of_copies(tmp_path: Path) -> None:
    copies = [offload(1, 3), offload(41, 44), offload(60, 68, size=2**28)]
    trace = kineto.write(tmp_path / "t.json", job(reduce(40, 10), *copies))
    (found,) = analyze([read_trace(nsys_file.of_kineto(trace, tmp_path / "report.sqlite"))]).traces
    assert rows(found.beside_copies) == {("copies to the host", "communication"): (3, 9, 9, 6)}


# -- no false alarm


def quiet(tmp_path: Path, *of_step: kineto.Event, steps: int = 3) -> bool:
    found = figures_of(tmp_path, job(gemm(1, 4), *of_step, steps=steps))
    return found.beside_copies == ()


def test_a_small_copy_beside_a_long_collective_is_no_cause(tmp_path: Path) -> None:
    assert quiet(tmp_path, reduce(*ALONE), reduce(*BESIDE), offload(42, 42.005))


def test_few_calls_say_nothing(tmp_path: Path) -> None:
    assert quiet(tmp_path, reduce(*ALONE), reduce(*BESIDE), offload(40, 50), steps=2)


def test_collectives_and_copies_of_other_sizes_or_groups_are_not_compared(tmp_path: Path) -> None:
    assert quiet(tmp_path, reduce(10, 5, **{"In msg nelems": 99}), reduce(*BESIDE), offload(40, 50))
    assert quiet(tmp_path, reduce(10, 5, **{"Process Group Name": "1"}), reduce(*BESIDE), offload(40, 50))
    assert quiet(tmp_path, reduce(*BESIDE), offload(41, 44), offload(60, 61, size=2**20))


def test_fills_are_no_copies(tmp_path: Path) -> None:
    assert quiet(tmp_path, reduce(*ALONE), reduce(*BESIDE), offload(40, 50, "Memset (Device)"))


def test_collectives_beside_compute_are_compared_with_others_beside_compute(tmp_path: Path) -> None:
    # 5 ms exposed, 10 ms beside compute, with a copy or without.
    hidden = [gemm(40, 50), gemm(60, 70)]
    exposed = [reduce(start, 5) for start in (5, 10, 15, 20, 25, 80, 85)]
    assert quiet(tmp_path, *exposed, reduce(*BESIDE), offload(40, 50, FROM_HOST), *hidden, reduce(60, 10))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_within_noise_is_not_told(tmp_path: Path, seed: int) -> None:
    # Waiting makes collectives take 4 to 14 ms, beside copies or not.
    draw = random.Random(seed)
    events, now = [], 0.0
    for number in range(40):
        length = 4 + 10 * draw.random()
        events += [reduce(now, length), *([offload(now, now + length)] if number % 3 == 0 else [])]
        now += 20
    found = figures_of(tmp_path, job(*events, gemm(now, now + 4), steps=1, each=now + 10))
    assert found.beside_copies == ()


# -- two files


def compared(folder: Path, overlapped: list[kineto.Event], sequential: list[kineto.Event]) -> dict:
    files = [
        read_trace(kineto.write(folder / f"{name}.json", events))
        for name, events in (("overlapped", overlapped), ("sequential", sequential))
    ]
    return rows(compare(*files).pairs)


def test_compare_gives_the_loss_of_a_collective_to_the_copies_beside_it_and_that_of_the_copies_to_it(
    tmp_path: Path,
) -> None:
    overlapped = job(gemm(1, 4), reduce(*BESIDE), offload(40, 50))
    sequential = job(gemm(1, 4), reduce(40, 5), offload(60, 66))
    assert compared(tmp_path, overlapped, sequential) == {
        ("all_reduce", "copies to the host"): (1, 10, 10, 5),
        ("copies to the host", "communication"): (1, 10, 10, 6),
        ("gemm", "(nothing)"): (1, 0, 3, 3),
    }


def test_a_loss_beside_compute_and_copies_is_shared_by_the_time_of_each(tmp_path: Path) -> None:
    # The all-reduce loses 4 ms beside 8 ms of compute and 4 of a copy, of which 9 in all.
    overlapped = job(gemm(40, 48), reduce(40, 10), offload(45, 49))
    sequential = job(gemm(20, 27), reduce(40, 6), offload(60, 63))
    found = compared(tmp_path, overlapped, sequential)
    assert found["all_reduce", "gemm"] == pytest.approx((1, 9 * 8 / 12, 10 * 8 / 12, 6 * 8 / 12))
    assert found["all_reduce", "copies to the host"] == pytest.approx((1, 9 * 4 / 12, 10 * 4 / 12, 6 * 4 / 12))
    # The product loses 1 ms beside 8 ms of the all-reduce and 3 of the copy.
    assert found["gemm", "all_reduce"] == pytest.approx((1, 8 * 8 / 11, 8 * 8 / 11, 7 * 8 / 11))
    # The copy loses 1 ms beside 4 ms of the all-reduce and 3 of compute.
    assert found["copies to the host", "communication"] == pytest.approx((1, 4 * 4 / 7, 4 * 4 / 7, 3 * 4 / 7))
    assert found["copies to the host", "compute"] == pytest.approx((1, 4 * 3 / 7, 4 * 3 / 7, 3 * 3 / 7))


def test_a_copy_that_runs_beside_a_kernel_in_both_files_explains_no_loss(tmp_path: Path) -> None:
    # The next batch is loaded beside the product in both; the all-reduce beside its first half makes it slower.
    overlapped = job(gemm(40, 46), reduce(40, 3), offload(42.95, 46, FROM_HOST))
    sequential = job(gemm(40, 44), reduce(60, 3), offload(41, 44, FROM_HOST))
    found = compared(tmp_path, overlapped, sequential)
    assert found["gemm", "all_reduce"] == (1, 3, 6, 4)
    assert not any(beside == "copies from the host" for of, beside in found if of == "gemm")


def test_copies_all_through_a_kernel_in_both_files_explain_no_loss_however_long_it_takes(tmp_path: Path) -> None:
    overlapped = job(gemm(40, 50), reduce(39, 12), offload(38, 52, FROM_HOST))
    sequential = job(gemm(40, 45), reduce(60, 5), offload(38, 47, FROM_HOST))
    found = compared(tmp_path, overlapped, sequential)
    assert found["gemm", "all_reduce"] == (1, 10, 10, 5)
    assert ("gemm", "copies from the host") not in found


def test_copies_of_two_sizes_are_not_compared(tmp_path: Path) -> None:
    overlapped = job(gemm(1, 4), reduce(*BESIDE), offload(40, 50))
    sequential = job(gemm(1, 4), reduce(40, 10), offload(60, 61, size=2**20))
    found = compared(tmp_path, overlapped, sequential)
    assert not any(of == "copies to the host" for of, _ in found)
