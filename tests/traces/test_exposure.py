"""Which collectives of trace files are exposed: by size, and by place in the step, over all steps and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.exposure import exposure_sentence
from overlap_callbacks.analysis.results.exposure import FIRST, LAST, MIDDLE, NOWHERE, Exposure
from overlap_callbacks.report.views.trace_verdict import verdict
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.traces import reference
from tests.traces.events import MS, gemm, overlap

LENGTH = 60
MB = 1_000_000
# A collective: start and end in the step in ms, bytes, and its arguments besides.
Message = tuple[float, float, int, dict[str, Any]]


def message(start: float, end: float, size: int, name: str = "allreduce", **args: Any) -> Message:
    return start, end, size, {"Collective name": name, **args}


def events(steps: Sequence[tuple[Sequence[tuple[float, float]], Sequence[Message]]]) -> list[kineto.Event]:
    """Steps of a minute's milliseconds, each with its compute and its collectives."""
    found = []
    for number, (compute, messages) in enumerate(steps):
        at = number * LENGTH
        found.append(kineto.step(number, at * MS, (at + LENGTH) * MS - 1000))
        for correlation, (start, end) in enumerate(compute, 1000 * number + 1):
            found += [kineto.launch(round((at + start) * MS), correlation), gemm(at + start, at + end, correlation)]
        for place, (start, end, size, args) in enumerate(messages, 1000 * number + 500):
            told = {**kineto.METADATA, "In msg nelems": size // 4, "Out msg nelems": size // 4, "Seq": place, **args}
            found.append(kineto.launch(round((at + start) * MS), place))
            kernel = kineto.ALL_GATHER if "gather" in told["Collective name"] else kineto.ALL_REDUCE
            span = round((at + start) * MS), round((at + end) * MS)
            found.append(kineto.kernel(kernel, *span, place, stream=told.pop("stream", 20), **told))
    return found


def analyzed(folder: Path, *ranks: list[kineto.Event]) -> Analysis:
    paths = [
        kineto.write(folder / f"r{i}.json", of_rank, **kineto.job(i, max(2, len(ranks))))
        for i, of_rank in enumerate(ranks)
    ]
    return analyze([read_trace(path) for path in paths])


def exposed(found: Analysis) -> Exposure:
    assert found.exposure is not None
    return found.exposure


def sentence(found: Analysis) -> str:
    """That of the verdict."""
    (words,) = [words for words in verdict(found) if words.startswith("Of ")]
    assert words == exposure_sentence(exposed(found))
    return words


def times(found: Exposure) -> dict[tuple[str, int | None], tuple[float, float, int]]:
    return {(row.place, row.most_bytes): (row.exposed_ms, row.hidden_ms, row.exposed_steps) for row in found.rows}


FOUR = [message(5 + 9 * i, 13 + 9 * i, 26 * MB) for i in range(4)]


def ddp(exposed_in: Callable[[int], bool], optimizer_ms: float = 0.0) -> list[kineto.Event]:
    """Six steps: four all-reduces are hidden, and the last one, which takes 5 ms, is in some steps."""

    def of(number: int) -> Any:
        compute = [(0.0, 41.0 if exposed_in(number) else 46.0)]
        compute += [(47.0, 47.0 + optimizer_ms)] if optimizer_ms else []
        return compute, [*FOUR, message(41, 46, 1_200_000)]

    return events([of(number) for number in range(6)])


@pytest.mark.parametrize("optimizer_ms", [0, 3])
def test_the_last_small_all_reduce_is_named_that_is_exposed_in_every_second_step(
    tmp_path: Path, optimizer_ms: float
) -> None:
    found = analyzed(tmp_path, ddp(lambda number: number % 2 == 1, optimizer_ms))
    assert sentence(found) == "Of 15.0 ms exposed all are the 1.14 MiB all-reduce that ends the step, in 3 of 6 steps."
    assert times(exposed(found)) == {
        (LAST, 1_200_000): (15, 15, 3), (MIDDLE, 26 * MB): (0, 3 * 8 * 6, 0), (FIRST, 26 * MB): (0, 8 * 6, 0)
    }  # fmt: skip
    last = exposed(found).rows[0]
    assert (last.collective, last.calls, last.group_size) == ("all_reduce", 6, 2)


def test_where_much_compute_follows_the_last_one_does_not_end_the_step(tmp_path: Path) -> None:
    found = analyzed(tmp_path, ddp(lambda number: True, optimizer_ms=12))
    assert sentence(found) == (
        "Of 30.0 ms exposed all are the 1.14 MiB all-reduce that comes last in the step, in 6 of 6 steps."
    )


def test_over_ranks_of_which_one_alone_is_exposed(tmp_path: Path) -> None:
    ranks = [ddp(lambda number: False), ddp(lambda number: number % 2 == 1), ddp(lambda number: False)]
    found = analyzed(tmp_path, *ranks)
    assert sentence(found) == (
        "Of 15.0 ms exposed on 3 ranks all are the 1.14 MiB all-reduce that ends the step, in 3 of 6 steps, "
        "on rank 1 alone."
    )
    row = exposed(found).rows[0]
    assert (row.worst_rank, row.worst_ms, row.calls, row.hidden_ms) == (1, 15, 18, 90 - 15)
    # The lowest rank alone has nothing to say.
    assert found.traces[0].exposure is not None
    assert exposure_sentence(found.traces[0].exposure) == ""
    both = analyzed(tmp_path, ddp(lambda number: number % 2 == 1), ddp(lambda number: number == 0))
    assert sentence(both).endswith("Of 20.0 ms exposed on 2 ranks all are the 1.14 MiB all-reduce that ends the step, "
                                   "in 4 of 6 steps.")  # fmt: skip


def test_a_rank_without_a_whole_step_does_not_count(tmp_path: Path) -> None:
    lossy = ddp(lambda number: False)
    for number in range(6):
        lossy.remove(next(event for event in lossy if event["args"].get("correlation") == 1000 * number + 1
                          and event["cat"] == "kernel"))  # fmt: skip
    found = analyzed(tmp_path, ddp(lambda number: number % 2 == 1), lossy)
    assert [step.cut for step in found.traces[1].steps] == [True] * 6
    assert sentence(found) == "Of 15.0 ms exposed all are the 1.14 MiB all-reduce that ends the step, in 3 of 6 steps."


def test_a_parameter_all_gather_that_begins_the_step(tmp_path: Path) -> None:
    gathers = [message(0, 4, 100 * MB, "_allgather_base"), message(6, 12, 100 * MB, "_allgather_base")]
    scatter = message(20, 25, 100 * MB, "_reduce_scatter_base")
    found = analyzed(tmp_path, events([([(4.0, 30.0)], [*gathers, scatter])] * 3))
    assert (
        sentence(found) == "Of 12.0 ms exposed all are the 95.4 MiB all-gather that begins the step, in 3 of 3 steps."
    )
    # One that waits for the loader's compute before it does not begin the step.
    late = analyzed(tmp_path, events([([(0.0, 8.0), (12.0, 30.0)], [message(8, 12, 100 * MB)])] * 3))
    assert sentence(late) == (
        "Of 12.0 ms exposed all are the 95.4 MiB all-reduce that comes first in the step, in 3 of 3 steps."
    )


def test_exposed_ones_in_the_middle_of_several_sizes(tmp_path: Path) -> None:
    compute = [(0.0, 10.0), (14.0, 30.0), (32.0, 50.0)]
    messages = [message(1, 3, MB), message(10, 14, 8 * MB), message(30, 32, 4 * MB), message(40, 45, MB)]
    found = analyzed(tmp_path, events([(compute, messages)] * 2))
    assert sentence(found) == (
        "Of 12.0 ms exposed 8.00 ms are the 7.63 MiB all-reduce in the middle of the step, in 2 of 2 steps; "
        "4.00 ms are the 3.81 MiB all-reduce in the middle of the step, in 2 of 2 steps."
    )
    assert [(row.place, row.exposed_ms) for row in exposed(found).places if row.exposed_ms] == [(MIDDLE, 12)]


def test_several_of_the_same_size_share_a_row_and_no_size_has_most(tmp_path: Path) -> None:
    compute = [(float(10 * i), float(10 * i + 8)) for i in range(6)]
    same = [message(10 * i + 8, 10 * i + 10, 8 * MB) for i in range(5)]
    found = analyzed(tmp_path, events([(compute, same)] * 2))
    assert "12.0 ms are the 7.63 MiB all-reduces in the middle of the step, in 2 of 2 steps" in sentence(found)
    # Tokens of experts: twenty sizes, each exposed for a little.
    uneven = [[message(10 * i + 8, 10 * i + 10, (1 + 5 * i + step) * MB, "all_to_allv") for i in range(5)]
              for step in range(5)]  # fmt: skip
    found = analyzed(tmp_path, events([(compute, messages) for messages in uneven]))
    assert sentence(found).startswith(
        "Of 50.0 ms exposed 30.0 ms are the 5.72 to 19.1 MiB all-to-alls in the middle of the step, in 5 of 5 steps; "
    )
    assert len(exposed(found).rows) <= 3 * 16


def test_too_many_sizes_of_a_place_are_one_row_with_the_least_and_the_greatest(tmp_path: Path) -> None:
    uneven = [(([(0.0, 40.0)]), [message(42, 44, (100 + number) * MB)]) for number in range(20)]
    (row,) = exposed(analyzed(tmp_path, events(uneven))).rows
    assert (row.least_bytes, row.most_bytes, row.calls, row.exposed_ms) == (100 * MB, 119 * MB, 20, 40)
    assert (row.place, row.exposed_steps) == (LAST, 20)


def test_a_queue_behind_all_compute_ends_the_step_as_one(tmp_path: Path) -> None:
    # Compute ends while the second of five is in flight.
    queue = [message(10 + 8 * i, 18 + 8 * i, 26 * MB) for i in range(5)]
    found = analyzed(tmp_path, events([([(0.0, 22.0)], queue)] * 4))
    assert sentence(found) == "Of 112 ms exposed all are the 24.8 MiB all-reduces that end the step, in 4 of 4 steps."


def test_a_norm_after_the_last_bucket_is_no_bucket(tmp_path: Path) -> None:
    norm = message(47, 47.01, 4)
    steps = [([(0.0, 41.0), (46.2, 46.8), (48.0, 50.0)], [*FOUR, message(41, 46, 1_200_000), norm])] * 2
    found = analyzed(tmp_path, events(steps))
    assert sentence(found) == "Of 10.0 ms exposed all are the 1.14 MiB all-reduce that ends the step, in 2 of 2 steps."


def test_time_of_several_in_flight_counts_once_and_rows_add_up_to_the_steps(tmp_path: Path) -> None:
    messages = [message(8, 16, 8 * MB), message(12, 20, 4 * MB, stream=21), message(13, 15, 2 * MB, stream=22)]
    found = analyzed(tmp_path, events([([(0.0, 10.0), (18.0, 30.0)], messages)] * 2))
    rows = {row.most_bytes: (row.exposed_ms, row.hidden_ms) for row in exposed(found).rows}
    assert rows == {8 * MB: (12, 4), 4 * MB: (4, 4), 2 * MB: (0, 0)}
    steps = found.traces[0].steps
    assert sum(step.exposed_comm_ms for step in steps) == exposed(found).exposed_ms == 16


def test_gaps_between_kernels_make_no_step_exposed(tmp_path: Path) -> None:
    def of(number: int) -> Any:
        compute = [(i / 10, i / 10 + 0.0999) for i in range(410 if number % 2 else 460)]
        return compute, [*FOUR, message(41, 46, 1_200_000)]

    found = exposed(analyzed(tmp_path, events([of(number) for number in range(6)])))
    assert (found.rows[0].place, found.rows[0].exposed_steps) == (LAST, 3)


def test_without_sizes_and_without_steps(tmp_path: Path) -> None:
    plain = [event for event in ddp(lambda number: number % 2 == 1)]
    for event in plain:
        for name in ("In msg nelems", "Out msg nelems", "dtype"):
            event.get("args", {}).pop(name, None)
    assert sentence(analyzed(tmp_path, plain)) == (
        "Of 15.0 ms exposed all are the all-reduce that ends the step, in 3 of 6 steps."
    )
    without_steps = [event for event in ddp(lambda number: number % 2 == 1) if "Profiler" not in event["name"]]
    found = analyzed(tmp_path, without_steps)
    assert sentence(found) == "Of 15.0 ms exposed all are the 1.14 MiB all-reduces."
    assert {row.place for row in exposed(found).rows} == {NOWHERE}


def test_steps_that_differ_and_steps_without_communication(tmp_path: Path) -> None:
    # Gradients are reduced in every third step alone.
    steps = [([(0.0, 20.0)], [message(20, 25, 26 * MB)] if number % 3 == 2 else []) for number in range(6)]
    assert sentence(analyzed(tmp_path, events(steps))) == (
        "Of 10.0 ms exposed all are the 24.8 MiB all-reduce that ends the step, in 2 of 6 steps."
    )


def test_groups_of_several_dimensions_are_told_apart(tmp_path: Path) -> None:
    tensor = {"Process Group Description": "mesh_tp", "Process Group Name": "7", "Group size": 8}
    data = {"Process Group Description": "mesh_dp", "Group size": 2}
    messages = [message(5, 9, 16 * MB, **tensor), message(15, 19, 16 * MB, **data), message(30, 35, 16 * MB, **data)]
    found = analyzed(tmp_path, events([([(0.0, 15.0), (19.0, 40.0)], messages)] * 2))
    assert sentence(found) == (
        "Of 8.00 ms exposed all are the 15.3 MiB all-reduce of mesh_dp in the middle of the step, in 2 of 2 steps."
    )


def test_steps_that_lack_kernels_do_not_count(tmp_path: Path) -> None:
    lossy = ddp(lambda number: True)
    lost = [event for event in lossy if event["cat"] == "kernel" and event["ts"] < kineto.BASE_NS + 35 * MS]
    found = exposed(analyzed(tmp_path, [event for event in lossy if event not in lost]))
    assert (found.num_steps, found.rows[0].exposed_ms) == (5, 25)


def test_a_job_that_hides_all_says_nothing(tmp_path: Path) -> None:
    found = analyzed(tmp_path, ddp(lambda number: False))
    assert not [words for words in verdict(found) if words.startswith("Of ")]
    assert exposure_sentence(exposed(found)) == ""
    assert figures_without_communication(tmp_path) is None


def figures_without_communication(folder: Path) -> Exposure | None:
    return analyzed(folder, [kineto.step(1, 0, 9 * MS), kineto.launch(10, 1), gemm(1, 3, 1)]).exposure


def test_a_cpu_job_tells_them_by_gloo_s_ranges(tmp_path: Path) -> None:
    rows = []
    for number in range(4):
        at = number * 20
        rows.append(kineto.step(number, at * MS, (at + 20) * MS - 1000))
        rows.append(kineto.host_range("aten::mm", at * MS + 1000, (at + 10) * MS, cat="cpu_op"))
        rows.append(kineto.host_range("gloo:all_reduce", (at + 8) * MS, (at + 12) * MS, thread=7))
    found = analyzed(tmp_path, rows)
    assert found.traces[0].on_host
    assert sentence(found) == "Of 8.00 ms exposed all are the all-reduce that ends the step, in 4 of 4 steps."


def test_a_long_file_in_pieces_gives_the_same(tmp_path: Path, short_memory: list[int]) -> None:
    of = [([(float(i), i + 1.0) for i in range(40 if n % 2 else 45)], [*FOUR, message(40, 45, MB)]) for n in range(6)]
    found = analyzed(tmp_path, events(of))
    assert len(short_memory) > 1
    assert sentence(found) == "Of 15.0 ms exposed all are the 977 KiB all-reduce that ends the step, in 3 of 6 steps."


def test_terminal_and_json_have_it(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "r0.json", ddp(lambda number: number % 2 == 1), **kineto.job())
    shown = overlap("analyze", str(path)).output
    assert "Of 15.0 ms exposed all are the 1.14 MiB all-reduce that ends the step, in 3 of 6 steps." in shown
    whole = overlap("analyze", str(path), "--all").output
    assert whole.index("Of 15.0 ms") < whole.index("Where the time goes") < whole.index("Collectives by size and place")
    told = json.loads(overlap("analyze", str(path), "--json").stdout)
    (row, *_) = told["exposure"]["rows"]
    assert (row["place"], row["most_bytes"], row["exposed_steps"]) == ("last", 1_200_000, 3)
    assert told["exposure"]["num_steps"] == 6


def test_files_of_several_jobs_each_have_their_own(tmp_path: Path) -> None:
    one = kineto.write(tmp_path / "a.json", ddp(lambda number: True), **kineto.job(0, 2))
    other = kineto.write(tmp_path / "b.json", ddp(lambda number: number == 0), **kineto.job(0, 4))
    found = analyze([read_trace(one), read_trace(other)])
    assert found.exposure is None
    words = " ".join(verdict(found))
    assert "Of 30.0 ms exposed all" in words
    assert "Of 5.00 ms exposed all are the 1.14 MiB all-reduce that ends the step, in 1 of 6 steps." in words


# -- real files, and generated ones


@pytest.mark.parametrize("name", ["ddp_a100_x2", "ddp_v100_x2", "job128_rank0", "job128_rank1"])
def test_rows_of_real_files_add_up_to_their_steps(name: str) -> None:
    found = analyze([read_trace(reference.shared_trace(f"{name}.json.gz"))])
    rows = exposed(found).rows
    steps = [step for step in found.traces[0].steps if not step.cut]
    assert sum(row.exposed_ms for row in rows) == pytest.approx(sum(step.exposed_comm_ms for step in steps), abs=1e-9)
    assert sum(row.hidden_ms for row in rows) == pytest.approx(sum(step.hidden_comm_ms for step in steps), abs=1e-9)
    places = exposed(found).places
    assert sum(row.exposed_ms for row in places) == pytest.approx(sum(row.exposed_ms for row in rows), abs=1e-9)
    assert all(0 <= row.exposed_steps <= exposed(found).num_steps for row in rows)


@pytest.mark.parametrize("overlapped", [True, False])
def test_generated_training_adds_up_too(tmp_path: Path, overlapped: bool) -> None:
    found = analyzed(tmp_path, list(kineto.training(5, 6, overlapped=overlapped)))
    total = sum(step.exposed_comm_ms for step in found.traces[0].steps)
    assert exposed(found).exposed_ms == pytest.approx(total, abs=1e-9)
    assert sum(row.calls for row in exposed(found).rows) == 30


# -- names, by what torch writes beside a graph's kernels


def annotated(folder: Path, kernels: Sequence[tuple[str, float, float, str]], stream: int) -> Path:
    """A file of one graph's replay, to which torch itself has added the annotations of its nodes."""
    found: list[kineto.Event] = [{**kineto.launch(0, 1), "name": "cudaGraphLaunch"}]
    modules: dict[int, list[Any]] = {}
    for node, (name, start, end, module) in enumerate(kernels, start=1):
        communicates = name.startswith("nccl")
        found.append(
            kineto.kernel(name, round(start * MS), round(end * MS), 1, stream=stream if communicates else 7,
                          **{"graph id": 1, "graph node id": node})
        )  # fmt: skip
        of_node: dict[str, Any] = {"stream": stream if communicates else 7}
        modules[node] = [of_node, *([{"module_fqn": module}] if module else [])]
    path = kineto.write(folder / "r0.json", found, **kineto.job(0, 2))
    trace = json.loads(path.read_text())
    annotating = pytest.importorskip("torch.cuda._annotate_cuda_graph_trace")
    assert annotating.annotate_trace(trace, modules) == len(kernels)
    path.write_text(json.dumps(trace))
    return path


def test_collectives_of_a_graph_have_the_modules_that_annotations_name(tmp_path: Path) -> None:
    kernels = [
        ("gemm", 0, 20, "layers.3.mlp"), (kineto.ALL_REDUCE, 15, 30, "layers.3"),
        (kineto.ALL_REDUCE, 30, 32, "layers.2"), (kineto.ALL_GATHER, 40, 44, ""),
    ]  # fmt: skip
    found = exposed(analyze([read_trace(annotated(tmp_path, kernels, stream=20))]))
    assert [(row.name, row.collective, row.exposed_ms) for row in found.names] == [
        ("layers.3", "all_reduce", 10), ("", "all_gather", 4), ("layers.2", "all_reduce", 2),
    ]  # fmt: skip
    assert "First by name is the all-reduce of layers.3" in exposure_sentence(found)
    assert {row.collective for row in found.rows} == {"all_reduce", "all_gather"}
