"""``benchmarks/predict.py``: its arithmetic, on windows whose times the model itself has made."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import msgspec
import pytest

from overlap_callbacks.analysis.communication.bandwidths import Link
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.step_time import Hardware, exact_step, per_stage_flop, step_flop
from overlap_callbacks.analysis.communication.volumes import rank_rows
from overlap_callbacks.analysis.equations import ring_steps
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SizeTransfer
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport, Throughput
from overlap_callbacks.analysis.results.window import CollectiveTime
from tests.report.runs import window

HARDWARE = Hardware(
    links={"tensor": Link(4e8, 3e-4), "data": Link(5e8, 2e-4), "pipeline": Link(5e8)},
    peak_flop_per_s=2e10,
    utilisation=1.0,
)


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-core is not installed")
    return importlib.import_module("benchmarks.predict")


def as_predicted(job: JobShape, late: float = 1.0) -> OverlapReport:
    """The window of a job that takes ``late`` times what the model says of this hardware."""
    transfers, collectives = [], []
    for row in rank_rows(job, 0):
        if row.group_size == 1:
            continue
        link = HARDWARE.links["tensor" if row.dimension == "tensor" else "data"]
        seconds = row.messages * ring_steps(collective_of(row.operator), row.group_size) * link.latency_s
        seconds += row.wire_bytes / link.bytes_per_s
        size = row.bytes_each.bit_length() - 1
        timed = (row.operator, row.dimension, row.group_size, ONE_HOST, size, row.messages, row.bytes)
        transfers.append(SizeTransfer(*timed, seconds * late * 1e3))
        collectives.append(
            CollectiveTime(
                row.operator, f"{row.dimension} {row.bytes_each}", row.group_size, "gloo", row.messages, row.bytes,
                row.bytes, seconds * late * 1e3, row.dimension, float(row.bytes), None, seconds * late * 1e3,
            )
        )  # fmt: skip
    return msgspec.structs.replace(
        window(), e2e_sequential_ms=Estimate(exact_step(job, HARDWARE).iteration_ms * late, None, None, 4, 4),
        transfers=tuple(transfers), collectives=tuple(collectives),
        throughput=Throughput(flop_per_step=step_flop(job), num_devices=job.world_size),
    )  # fmt: skip


def test_times_that_the_model_has_made_are_predicted_exactly_from_the_references(predict: ModuleType) -> None:
    shapes = {
        (size, layout): predict.shape_of(predict.setup_of(size, layout), predict.LAYOUTS[layout][0])
        for size in predict.SIZES
        for layout in predict.LAYOUTS
    }
    # The machine is half as fast in the second round, which is no error of the prediction.
    found = [{key: as_predicted(job, late) for key, job in shapes.items()} for late in (1.0, 2.0)]
    results = predict.results_of(predict.Measured(shapes, found))
    fitted = [name for name, job in results["jobs"].items() if job["fitted"]]
    assert fitted == ["small, TP 2 x DP 2"]
    for name, job in results["jobs"].items():
        # In jobs without data parallelism the norm of the gradients takes the latency of the gradients' messages.
        assert job["errors"] == pytest.approx([0.0, 0.0], abs=3e-3), name
    large = results["jobs"]["large, TP 4"]
    assert large["measured_ms"][1] == pytest.approx(2 * large["measured_ms"][0])
    assert large["terms_ms"]["compute"] == pytest.approx(
        1.5 * per_stage_flop(shapes["large", "TP 4"])[0] / 2e10 * 1e3, rel=1e-3
    )
    # Messages are 2 (4-1) steps long on four ranks, not 2: a bandwidth alone does not know that.
    assert large["variants"]["without_latency"]["error"] < -0.005


def test_errors_are_shares_of_what_was_measured(predict: ModuleType) -> None:
    found = predict.errors([100.0, 200.0, 50.0], [110.0, 180.0, 60.0])
    assert found["errors"] == pytest.approx([0.1, -0.1, 0.2])
    assert found["error"] == pytest.approx(0.1)
    assert found["error_of_medians"] == pytest.approx(0.1)
