"""``overlap trace --for inductor``: what torch's own reader of profiles finds in the file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.analysis.results.arrivals import SizedTransfer
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.analysis.communication.layouts import Layout
from tests.commands import invoke
from tests.distributed import run_ranks
from tests.report.runs import write
from tests.report.traffic_runs import report_with

estimation = pytest.importorskip("torch._inductor.fx_passes.profile_guided_estimation")

LATE_RANK, LATE_S = 1, 0.2  # far longer than a busy machine takes for a transfer
OPTIONS: dict[str, Any] = {
    "spread": False, "every_n_steps": 20, "first_step": 2, "repeats": 2, "steps_per_block": 2, "warmup_steps": 0,
    "profiled_steps": 0,
}  # fmt: skip
# By inductor's name: torch's name of the element type, and the elements of the result.
SENT = {
    "all_reduce": ("BFloat16", 3000),
    "all_gather_into_tensor": ("Float", 2 * 2000),
    "reduce_scatter_tensor": ("Double", 1000),
    "all_to_all_single": ("Int", 500),
}


def _train(rank: int, folder: str) -> None:
    from overlap_callbacks.monitor.schedule import Schedule

    reduced, gathered, scattered, exchanged = (
        torch.ones(3000, dtype=torch.bfloat16), torch.ones(2000), torch.ones(2000, dtype=torch.float64),
        torch.ones(500, dtype=torch.int32),
    )  # fmt: skip
    whole, part, received = torch.empty(4000), torch.empty(1000, dtype=torch.float64), torch.empty_like(exchanged)
    with OverlapMonitor(schedule=Schedule(**OPTIONS), run_dir=folder, max_overhead=None, strict=True) as monitor:
        for step in range(44):
            with monitor.step(step):
                for issue in (
                    lambda: dist.all_reduce(reduced),
                    lambda: dist.all_gather_into_tensor(whole, gathered),
                    lambda: dist.reduce_scatter_tensor(part, scattered),
                    lambda: dist.all_to_all_single(received, exchanged),
                ):
                    if rank == LATE_RANK:
                        time.sleep(LATE_S / 4)
                    issue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(_train, 2, str(folder), timeout_s=120)
    return folder


def loaded(file: Path) -> Any:
    found = estimation.ProfileData()
    found.load(str(file))
    return found


def test_torch_finds_every_collective_of_a_job_with_its_time_alone(run: Path) -> None:
    result = invoke("trace", str(run), "--for", "inductor")
    assert result.exit_code == 0, result.output
    assert "profile_guided_estimations_profile_path" in result.stderr
    found = loaded(run / "inductor.json")
    rows = [row for window in record.read(run).valid_windows for row in record.read(run).whole(window).sized_transfers]
    assert len(found.collectives) == len(SENT)
    for name, (dtype, elements) in SENT.items():
        time_ms, source = found.lookup_collective(name, (0, 1), elements, dtype)
        assert source == "profile"
        # The late rank's time: the other waited.
        assert 0 < time_ms < LATE_S / 4 * 1e3
        kind = name.partition("_tensor")[0].partition("_into")[0].partition("_single")[0]
        of_kind = [row for row in rows if row.dtype == {"Float": "float32"}.get(dtype, row.dtype)]
        of_kind = [row for row in of_kind if kind.replace("_", "")[:9] in row.operator.replace("_", "")]
        assert len(of_kind) == 2  # two windows
        assert time_ms == pytest.approx(
            sum([row.transfer_ms for row in of_kind]) / sum([row.calls for row in of_kind]), rel=1e-6
        )


def test_one_window_alone(run: Path) -> None:
    result = invoke("trace", str(run), "--for", "inductor", "--window", "0", "-o", str(run / "first.json"))
    assert result.exit_code == 0, result.output
    found = record.read(run)
    rows = {row.operator: row for row in found.whole(found.windows[0]).sized_transfers}
    time_ms, _ = loaded(run / "first.json").lookup_collective("all_reduce", (0, 1), 3000, "BFloat16")
    assert time_ms == pytest.approx(rows["allreduce_"].transfer_ms / rows["allreduce_"].calls, rel=1e-6)


def with_times(*rows: SizedTransfer, layout: Layout = Layout(2, 2, 2)) -> OverlapReport:  # noqa: B008
    return msgspec.structs.replace(report_with(layout), sized_transfers=rows)


def trace_of(folder: Path, windows: Sequence[OverlapReport]) -> Any:
    write(folder, *windows)
    result = invoke("trace", str(folder), "--for", "inductor")
    assert result.exit_code == 0, result.output
    return loaded(folder / "inductor.json")


def groups_of(report: OverlapReport) -> list[tuple[str, str, int]]:
    assert report.messages is not None
    return [(row.operator, row.dimension, row.group_size) for row in report.messages.groups]


def test_other_groups_of_one_form_have_the_times_of_the_first(tmp_path: Path) -> None:
    """On 8 ranks, tensor-parallel groups are neighbours."""
    operator, dimension, size = next(row for row in groups_of(report_with(Layout(2, 2, 2))) if row[1] == "tensor")
    found = trace_of(tmp_path / "run", [with_times(SizedTransfer(operator, dimension, size, "float32", 4096, 3, 6.0))])
    (one,) = found.collectives
    assert (one.pg_ranks, one.group_size, one.dtype) == ((0, 1), 2, "Float")
    for ranks in ((0, 1), (2, 3), (6, 7)):
        assert found.lookup_collective(one.collective_name, ranks, one.out_nelems, "Float") == (2.0, "profile")
    assert found.lookup_collective(one.collective_name, (0, 4), one.out_nelems, "Float") is None


def test_windows_are_averaged_by_their_calls(tmp_path: Path) -> None:
    operator, dimension, size = next(row for row in groups_of(report_with(Layout(2, 2, 2))) if row[1] == "tensor")
    first, second = (
        SizedTransfer(operator, dimension, size, "bfloat16", 4096, n, ms) for n, ms in ((1, 1.0), (3, 9.0))
    )
    later = msgspec.structs.replace(with_times(second), window=1, messages=None)
    found = trace_of(tmp_path / "run", [with_times(first), later])
    assert [one.duration_us for one in found.collectives] == [2500.0]
    assert found.collectives[0].out_nelems in (2048, 2048 // size)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (with_times(), "no times of single collectives"),
        (with_times(SizedTransfer("allreduce_", "data", 2, "", 64, 1, 1.0)), "no times of single collectives"),
        (with_times(SizedTransfer("allreduce_", "data", 2, "float32", -1, 1, 1.0)), "no times of single collectives"),
        (with_times(SizedTransfer("allreduce_", "nobody", 2, "float32", 64, 1, 1.0)), "which ranks are in a group"),
        (msgspec.structs.replace(with_times(), valid=False), "no window counts"),
    ],
)
def test_what_was_not_measured_is_said(tmp_path: Path, report: OverlapReport, said: str) -> None:
    result = invoke("trace", str(write(tmp_path / "run", report)), "--for", "inductor")
    assert result.exit_code == 3
    assert said in result.stderr
    assert not (tmp_path / "run" / "inductor.json").exists()


def test_the_file_names_groups_as_a_profile_does(run: Path) -> None:
    invoke("trace", str(run), "--for", "inductor", "-o", str(run / "again.json"))
    content = json.loads((run / "again.json").read_text())
    assert content["distributedInfo"]["pg_config"] == [{"pg_name": "0", "ranks": [0, 1]}]
    assert {event["cat"] for event in content["traceEvents"]} == {"kernel"}
    assert [event["args"]["Process Group Ranks"] for event in content["traceEvents"]] == ["[0, 1]"] * len(SENT)
