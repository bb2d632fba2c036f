from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.sinks import FunctionSink, TensorBoardSink
from tests.environments import gpu_rank
from tests.report.arm_runs import arm_window
from tests.report.runs import rank_window, run_info, window
from tests.samples import aggregate_windows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_every_metric_is_a_scalar_against_the_training_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.open(run_info(framework="<b>mine</b>"))
    for number in (0, 1):
        sink.log(window(number, power=True))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    expected = [window(number, power=True).metrics() for number in (0, 1)]
    assert set(events.Tags()["scalars"]) == set(expected[0])
    for key in expected[0]:
        points = [(point.step, point.value) for point in events.Scalars(key)]
        assert points == [
            (20, pytest.approx(expected[0][key], rel=1e-6)),
            (520, pytest.approx(expected[1][key], rel=1e-6)),
        ]
    (text,) = events.Tensors("overlap/run/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert "    framework: <b>mine</b>" in lines
    assert all(line.startswith("    ") for line in lines), "markdown shows such lines as they are"


def test_windows_of_arms_are_scalars_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink, report = TensorBoardSink(tmp_path), arm_window(0, power=True)
    sink.open(run_info())
    sink.log_arm(report)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(report.metrics())
    (point,) = events.Scalars("arm/prefetch_2_2_speedup")
    assert report.speedup is not None
    assert (point.step, point.value) == (20, pytest.approx(report.speedup.value, rel=1e-6))


def test_the_environment_and_its_findings_are_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own = gpu_rank(0, variables={"NCCL_PROTO": "LL"})
    ranks = [rank_window(0, rank, environment=own) for rank in (0, 1)]
    sink = TensorBoardSink(tmp_path)
    sink.open(run_info(environment=own))
    sink.log(aggregate_windows(ranks, world_size=2, every_n_steps=500))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    texts = [
        events.Tensors(f"overlap/{name}/text_summary")[0].tensor_proto.string_val[0].decode().splitlines()
        for name in ("run", "findings", "bound")
    ]
    assert texts[2] == ["    compute"]
    assert {"    NCCL: 2.28.3", "    NCCL_PROTO: LL"} <= set(texts[0])
    assert [line for line in texts[1] if line.startswith("    warning: NCCL_PROTO=LL")]


def test_a_function_gets_the_metrics_and_the_step() -> None:
    got: list[tuple[int, float]] = []
    sink = FunctionSink(lambda metrics, step: got.append((step, metrics["overlap/compute_slowdown"])))
    sink.log(window())
    slowdown = window().metrics()["overlap/compute_slowdown"]
    assert got == [(20, slowdown)]


def test_a_deferred_function_is_called_by_flush_and_close_alone() -> None:
    got: list[int] = []
    sink = FunctionSink(lambda metrics, step: got.append(step), deferred=True)
    sink.log(window(0))
    assert not got
    sink.flush()
    assert got == [20]
    sink.log(window(1))
    sink.close()
    assert got == [20, 520]


def test_an_argument_that_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write must be a function of the metrics and the step, got 3 \(a int\)"):
        FunctionSink(3)  # type: ignore[arg-type]
