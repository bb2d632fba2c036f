"""Each strategy trains identically with and without the library, and its window counts."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from overlap_callbacks.report.record import read
from tests.distributed import run_ranks
from tests.experiments.study.jobs import losses

RANKS_LOAD = ("tests.integrations.deepspeed_jobs",)

JOBS = [
    ("ddp", "resnet50", "fp32", "data"),
    pytest.param("fsdp2", "bert", "bf16", "data", marks=pytest.mark.nightly),
    pytest.param("zero3", "gpt3-xl", "fp32", "data", marks=pytest.mark.nightly),
    pytest.param("tp", "llama2-13b", "fp32", "tensor", marks=pytest.mark.nightly),
    ("pp", "bert", "fp16", "pipeline"),
    pytest.param("pp", "vgg16", "fp16", "pipeline", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("strategy", "model", "precision", "dimension"), JOBS)
def test_losses_are_bit_identical_and_the_window_is_whole(
    tmp_path: Path, strategy: str, model: str, precision: str, dimension: str
) -> None:
    if strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    ranks = run_ranks(losses, 2, strategy, model, precision, str(tmp_path), timeout_s=90)
    told = [found for found in ranks if found["off"]]
    # Of a pipeline, the last rank has the loss.
    assert len(told) == (1 if strategy == "pp" else 2)
    for found in told:
        assert found["off"] == found["on"]
        assert len(set(found["on"])) > 20  # it trains
        assert all(map(math.isfinite, found["on"]))
    assert not (tmp_path / "off").exists()
    record = read(tmp_path / "on")
    (window,) = record.windows
    assert window.complete, window.problems
    assert record.runs[0].workload is not None
    assert record.runs[0].workload.settings["strategy"] == strategy
    blocks = window.samples[0].timed
    steps = {arm: sum([len(b.step_ms) for b in blocks if b.mode.value == arm]) for arm in ("overlapped", "sequential")}
    assert steps == {"overlapped": 5, "sequential": 5}
    assert dimension in {collective.dimension for collective in window.collectives}
