"""Files that do not fit each other: ``overlap compare`` says why, and shows tables only where it is forced."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.traces import compare, read_trace
from tests import kineto
from tests.traces.events import MS, all_reduce, gemm, overlap, said

OF_OVERLAP = ("eq. 4", "eq. 5", "speed-up", "gap to ideal")


def sequential(**options: Any) -> list[kineto.Event]:
    return list(kineto.training(overlapped=False, **options))


def silent(events: list[kineto.Event]) -> list[kineto.Event]:
    """The same without communication."""
    lost = {event["args"]["correlation"] for event in events if event["name"] == kineto.ALL_REDUCE}
    return [event for event in events if event.get("args", {}).get("correlation") not in lost]


def steps_of(*steps: list[kineto.Event]) -> list[kineto.Event]:
    """Steps of 20 ms, of kernels at times within the step."""
    events = []
    for number, kernels in enumerate(steps):
        events.append(kineto.step(number, 20 * number * MS, 20 * (number + 1) * MS - 1))
        events += [{**event, "ts": kineto.Nanoseconds(event["ts"] + 20 * number * MS)} for event in kernels]
    return events


def on_cpu() -> list[kineto.Event]:
    return [
        kineto.step(0, 0, 9 * MS),
        kineto.host_range("aten::mm", 0, 3 * MS, cat="cpu_op"),
        kineto.host_range("gloo:all_reduce", 4 * MS, 5 * MS, thread=9),
    ]


def on(name: str) -> dict[str, Any]:
    return {"deviceProperties": [{"id": 0, "name": name}], **kineto.job()}


def sized(group_size: int) -> list[kineto.Event]:
    return steps_of([gemm(0, 5), all_reduce(6, 8, **{**kineto.METADATA, "Group size": group_size})])


def longer(events: list[kineto.Event], factor: float) -> list[kineto.Event]:
    """The same with all times multiplied."""

    def times(event: kineto.Event) -> kineto.Event:
        start, length = (event["ts"] - kineto.BASE_NS) * factor, event.get("dur", 0) * factor
        ts, dur = kineto.Nanoseconds(kineto.BASE_NS + round(start)), kineto.Nanoseconds(round(length))
        return {**event, "ts": ts, **({"dur": dur} if "dur" in event else {})}

    return list(map(times, events))


def elements(*numbers: int, overlaps: bool = False) -> list[kineto.Event]:
    """Steps that compute the same, and communicate as many floats."""

    def step(number: int) -> list[kineto.Event]:
        args = {**kineto.METADATA, "In msg nelems": number, "Out msg nelems": number}
        start = 3 if overlaps else 6
        return [gemm(0, 1), gemm(1, 5), *([all_reduce(start, start + 4, **args)] if number else [])]

    return steps_of(*map(step, numbers))


def halved(events: list[kineto.Event]) -> list[kineto.Event]:
    return [
        {**event, "args": {**event["args"], "dtype": "BFloat16"}} if event["name"] == kineto.ALL_REDUCE else event
        for event in events
    ]


def gathered(number: int, **args: Any) -> list[kineto.Event]:
    return steps_of([gemm(0, 5), *[all_reduce(6 + i, 6.5 + i, **args) for i in range(number)]])


# What is compared, and why that means nothing.
MISFITS: dict[str, tuple[tuple[list[kineto.Event], dict[str, Any]], tuple[list[kineto.Event], dict[str, Any]], str]] = {
    "another model": (
        (list(kineto.training()), {}),
        ([e if e["name"] != kineto.GEMM else {**e, "name": "other"} for e in sequential()], {}),
        "of the compute time of one file has a partner in the other",
    ),
    "micro-batches": (
        (steps_of([gemm(i, i + 1) for i in range(4)] + [all_reduce(4, 5)]), {}),
        (steps_of([gemm(i, i + 1) for i in range(2)] + [all_reduce(4, 5)]), {}),
        "different numbers of steps or micro-batches",
    ),
    "world sizes": (
        (list(kineto.training()), kineto.job(0, 2)), (sequential(), kineto.job(0, 4)), "world sizes 2 and 4",
    ),
    "groups": ((sized(2), {}), (sized(8), {}), "their collectives are of groups of 2 and of 8 ranks"),
    "devices": (
        (list(kineto.training()), on("NVIDIA A100")), (sequential(), on("NVIDIA H100")),
        "different devices: NVIDIA A100 and NVIDIA H100",
    ),
    "a CPU job": (
        (list(kineto.training()), {}), (on_cpu(), {}),
        "the sequential file is of a CPU job, and the overlapped one of a device",
    ),
    "bytes": (
        (gathered(8, **kineto.METADATA), {}), (gathered(4, **kineto.METADATA), {}),
        "communicate different amounts in a step: 30.5 MiB and 15.3 MiB",
    ),
    "one type of elements more": (
        (halved(list(kineto.training())), {}), (sequential(), {}),
        "communicate different amounts in a step: 15.3 MiB and 30.5 MiB",
    ),
    "one layer more": (
        (list(kineto.training(layers=8)), {}), (sequential(layers=7), {}),
        "communicate different amounts in a step: 30.5 MiB and 26.7 MiB",
    ),
    "as many bytes in few steps": (
        (elements(1, 1, 1, 8_000_000, overlaps=True), {}), (elements(1, 1, 1, 16_000_000), {}),
        "communicate different amounts in a step: 7.63 MiB and 15.3 MiB",
    ),
    "accumulates alone": (
        (elements(0, overlaps=True), {}), (elements(0, 8_000), {}), "only the sequential file communicates",
    ),
    "a larger batch": (
        (longer(list(kineto.training()), 2), {}), (sequential(), {}),
        "compute takes 2.00 times as long in the overlapped file, which overlap does not explain",
    ),
    "a smaller batch": (
        (list(kineto.training()), {}), (longer(sequential(), 2), {}),
        "compute takes 2.00 times as long in the sequential file, which overlap does not explain",
    ),
    "a smaller batch that all overlaps": (
        (steps_of([gemm(0, 2), all_reduce(0, 3)]), {}), (steps_of([gemm(0, 4), all_reduce(4, 7)]), {}),
        "compute takes 2.00 times as long in the sequential file",
    ),
    "one communicates": (
        (list(kineto.training()), {}), (silent(sequential()), {}),
        "only the overlapped file communicates",
    ),
    "the other communicates": (
        (silent(list(kineto.training())), {}), (sequential(), {}),
        "only the sequential file communicates",
    ),
    "swapped": (
        (sequential(), {}), (list(kineto.training()), {}), "that of the overlapped file is 0.000: they may be swapped",
    ),
    "one without steps": (
        (list(kineto.training()), {}), ([e for e in sequential() if "ProfilerStep" not in e["name"]], {}),
        "only one of the files has ProfilerStep ranges",
    ),
}  # fmt: skip


def written(folder: Path, sides: Any) -> list[str]:
    return [str(kineto.write(folder / f"{i}.json", events, **head)) for i, (events, head) in enumerate(sides)]


def refused(files: list[str], why: str) -> None:
    result = overlap("compare", *files)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.output.startswith("Error: the files do not fit each other: ")
    assert why in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("name", MISFITS)
def test_files_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    *sides, why = MISFITS[name]
    files = written(tmp_path, sides)
    refused(files, why)
    for option in ("--json", "--csv=figures", f"--output={tmp_path / 'found.json'}"):
        assert overlap("compare", *files, option).exit_code == 2
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("name", MISFITS)
def test_tables_of_files_that_do_not_fit_are_shown_where_they_are_forced(tmp_path: Path, name: str) -> None:
    *sides, why = MISFITS[name]
    files = written(tmp_path, sides)
    result = overlap("compare", *files, "--force")
    assert result.exit_code == 0
    assert result.output.startswith("Attention: The files do not fit each other: ")
    assert why in " ".join(result.output[: result.output.index("(eq. 1)")].split())
    found = json.loads(overlap("compare", *files, "--json", "--force").stdout)
    assert not found["valid"]
    assert why in "; ".join(found["misfits"])
    assert found["problems"][: len(found["misfits"])] == found["misfits"]


def test_one_file_is_not_compared_with_itself(tmp_path: Path) -> None:
    (file,) = written(tmp_path, [(sequential(), {})])
    (tmp_path / "link.json").symlink_to(file)
    (tmp_path / "copy.json.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
    for other in (file, str(tmp_path / "link.json"), str(tmp_path / "copy.json.gz")):
        refused([file, other], "the same file was given twice")


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, place: int) -> None:
    files = written(tmp_path, [(list(kineto.training()), {}), (sequential(), {})])
    content = Path(files[place]).read_bytes()
    Path(files[place]).write_bytes(gzip.compress(content[: len(content) * 2 // 3]))
    refused(files, f"the {('overlapped', 'sequential')[place]} file is cut off, and no step of it is known to be whole")


def test_what_is_no_file_of_one_device_is_refused_too(tmp_path: Path) -> None:
    (file,) = written(tmp_path, [(sequential(), {})])
    for number in (10, 20):
        folder = tmp_path / "run" / f"iteration_{number}"
        folder.mkdir(parents=True)
        written(folder, [(sequential(), {})])
    several = [gemm(0, 1), gemm(0, 1, device=1)]
    bad = str(kineto.write(tmp_path / "several.json", several))
    for other, why in (
        (str(tmp_path / "run"), "is a folder"), (bad, "holds kernels of 2 devices"), ("none.json", "none.json"),
    ):  # fmt: skip
        for files in ([file, other], [other, file]):
            result = overlap("compare", *files, "--force")
            assert (result.exit_code, result.stdout) == (2, "")
            assert why in result.output


# -- what fits


def test_without_communication_there_is_no_speed_up_of_overlap(tmp_path: Path) -> None:
    files = written(tmp_path, [(steps_of(*[[gemm(0, end)]] * 3), {}) for end in (4, 5)])
    result = overlap("compare", *files)
    assert result.exit_code == 3
    assert "neither file communicates; they differ by something else" in result.output.splitlines()[0]
    assert not any(words in result.output for words in OF_OVERLAP)
    assert "-20.0%" in result.output  # they still differ
    found = json.loads(overlap("compare", *files, "--json").stdout)
    assert (found["valid"], found["misfits"]) == (True, [])
    assert {"speedup_vs_sequential", "gap_to_ideal", "e2e_ideal_ms"}.isdisjoint(found["figures"])
    assert found["figures"]["compute_ms"] == pytest.approx(4)
    assert found["problems"][0] == "neither file communicates; they differ by something else [OC771]"


def test_communication_on_the_host_of_a_device_is_communication(tmp_path: Path) -> None:
    def job(end: float) -> list[kineto.Event]:
        events = [kineto.launch(0, 1), gemm(0, 1, 1), kineto.launch(round(end * MS), 2), gemm(end, end + 1, 2)]
        return steps_of([*events, kineto.host_range("gloo:all_reduce", MS, 3 * MS, thread=9)])

    files = written(tmp_path, [(job(2), {}), (job(4), {})])
    found = compare(*map(read_trace, files))
    assert found.valid
    assert "speedup_vs_sequential" in found.figures
    assert not said(found.problems, "neither file communicates")
    silent_files = written(tmp_path, [(job(2), {}), ([e for e in job(4) if "gloo" not in e["name"]], {})])
    refused(silent_files, "only the overlapped file communicates")


def test_without_communication_files_that_do_not_fit_are_refused_and_have_no_answer_by_force(tmp_path: Path) -> None:
    files = written(tmp_path, [(steps_of([kineto.kernel(name, 0, MS, 0)]), {}) for name in ("one", "other")])
    refused(files, "0% of the compute time")
    assert overlap("compare", *files, "--force").exit_code == 3


FITS = {
    "one job": ({}, {}),
    "other steps": ({"steps": 5}, {}),
    "no metadata": ({"metadata": False}, {"metadata": False}),
    "metadata in one": ({"metadata": False}, {}),
    "more for the host": ({"operators": 9}, {"operators": 0}),
    "slowdown": ({"slowdown": 0.9}, {}),
}


@pytest.mark.parametrize("name", FITS)
def test_files_of_one_job_fit(tmp_path: Path, name: str) -> None:
    ov, seq = FITS[name]
    head = on("NVIDIA A100")
    files = written(tmp_path, [(list(kineto.training(**ov)), head), (sequential(**seq), head)])
    result = overlap("compare", *files)
    assert result.exit_code == 0
    assert "(eq. 1)" in result.output
    assert "do not fit" not in result.output


def test_what_only_one_file_tells_is_no_misfit(tmp_path: Path) -> None:
    sides = [(list(kineto.training()), on("NVIDIA A100")), (sequential(metadata=False), {})]
    found = compare(*map(read_trace, written(tmp_path, sides)))
    assert found.valid
    assert found.problems == ()


def test_other_buckets_of_as_many_bytes_are_the_same_job(tmp_path: Path) -> None:
    half = {**kineto.METADATA, "In msg nelems": 500_000, "Out msg nelems": 500_000}
    ov, seq = gathered(4, **half), gathered(2, **kineto.METADATA)
    found = compare(*map(read_trace, written(tmp_path, [(ov, {}), (seq, {})])))
    assert found.valid
    assert not said(found.problems, "in a step")


def test_other_numbers_of_collectives_of_unknown_size_are_a_doubt(tmp_path: Path) -> None:
    files = written(tmp_path, [(gathered(4), {}), (gathered(2), {})])
    found = compare(*map(read_trace, files))
    assert found.valid
    assert said(found.problems, "different numbers of collectives in a step: 4.0 and 2.0")
    assert overlap("compare", *files).exit_code == 0


def test_files_of_other_ranks_are_a_doubt(tmp_path: Path) -> None:
    files = written(tmp_path, [(list(kineto.training()), kineto.job(0)), (sequential(), kineto.job(1))])
    result = overlap("compare", *files)
    assert result.exit_code == 0
    assert "the files are of different ranks: 0 and 1" in " ".join(result.output.split())


LEFT_OUT = {
    # The second of two micro-batches reduces; the files begin at different ones, and have other numbers of steps.
    "accumulation": ([0, 0, 0, 8_000, 0, 0, 0, 8_000], [0, 0, 8_000, 0, 0, 0], (2, 0)),
    "a short file": ([0, 0, 0, 8_000, 0, 0, 0, 8_000], [0, 0, 8_000], (5, 0)),
    "warm-up": ([30_000, 8_000, 8_000], [8_000] * 3, (1, 1)),
    "warm-up in both": ([30_000, 8_000, 8_000], [60_000, 8_000, 8_000], (1, 1)),
    "averages of a loss": ([1, 8_000, 1, 8_000], [1, 1, 8_000, 1], (1, 1)),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_steps_that_the_other_file_lacks_are_left_out_and_not_the_files(tmp_path: Path, name: str) -> None:
    overlapped, alone, (more, fewer) = LEFT_OUT[name]
    files = written(tmp_path, [(elements(*overlapped, overlaps=True), {}), (elements(*alone), {})])
    found = compare(*map(read_trace, files))
    assert found.valid
    assert said(found.problems, f"{more} of {len(overlapped)} steps of the overlapped file and {fewer} of {len(alone)}")
    assert found.steps == (len(overlapped) - more, len(alone) - fewer)
    assert found.figures["compute_ms"] == pytest.approx(found.figures["compute_isolated_ms"])
    assert found.figures["comm_ms"] == pytest.approx(found.figures["comm_isolated_ms"])
    assert overlap("compare", *files).exit_code == 0


def test_as_many_bytes_in_the_mean_leave_no_step_out(tmp_path: Path) -> None:
    files = written(tmp_path, [(elements(0, 8_000, overlaps=True), {}), (elements(8_000, 0, 0, 8_000), {})])
    found = compare(*map(read_trace, files))
    assert (found.valid, found.steps) == (True, (2, 4))
    assert not said(found.problems, "left out")


def test_a_few_bytes_more_are_a_doubt(tmp_path: Path) -> None:
    files = written(tmp_path, [(elements(8_000, overlaps=True), {}), (elements(8_400), {})])
    found = compare(*map(read_trace, files))
    assert found.valid
    assert said(found.problems, "they communicate different amounts in a step: 31.2 KiB and 32.8 KiB")


def test_slower_clocks_and_kernels_that_overlap_are_the_same_job(tmp_path: Path) -> None:
    for number, (events, factor) in enumerate(((list(kineto.training()), 1.3), (list(kineto.training()), 0.8))):
        (tmp_path / str(number)).mkdir()
        found = compare(
            *map(read_trace, written(tmp_path / str(number), [(longer(events, factor), {}), (sequential(), {})]))
        )
        assert found.valid


def test_a_file_that_lost_kernels_is_not_the_same_file(tmp_path: Path) -> None:
    events = [event for event in sequential() if event["name"] not in ("nccl:all_reduce", "aten::addmm", "ac2g")]
    kernels = [event for event in events if event["cat"] == "kernel"]
    lost = {id(event) for event in kernels[len(kernels) // 2 - 3 : len(kernels) // 2]}  # of the second of three steps
    files = written(tmp_path, [(events, {}), ([event for event in events if id(event) not in lost], {})])
    found = compare(*map(read_trace, files))
    assert not said(found.problems, "the same file")
    assert said(found.problems, "3 of 96 launches have no kernel")
    assert (found.valid, found.steps, found.figures["compute_slowdown"]) == (True, (2, 2), 0)
