"""Throughput by numbers that were worked out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.aggregate import aggregate_windows
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import PRESETS, ModelShape, preset
from overlap_callbacks.analysis.communication.step_time import step_flop as job_flop
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import Throughput
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.throughput import run_throughput, step_flop, throughput_of
from tests.analysis.communication.paper_flop import iteration_flop
from tests.environments import gpu_rank, samples


def of(step_ms: float | None = 500.0, device: str = "NVIDIA H200", num_devices: int = 8, **work: Any) -> Any:
    return throughput_of(Workload(**work), step_ms, device=device, num_devices=num_devices)


def test_tokens_and_samples_a_second() -> None:
    # A step of half a second: twice as many in a second.
    found = of(tokens_per_step=4096, samples_per_step=4)
    assert (found.tokens_per_s, found.samples_per_s) == (8192, 8)
    assert (found.flop_per_step, found.mfu) == (None, None)


def test_mfu_of_parameters() -> None:
    # 6 * 7e9 * 65,536 = 2.752512e15 FLOP a step; in half a second 5.505024e15 a second; on 8 devices 6.88128e14 each.
    # Of 989.4e12: 0.69550.
    found = of(tokens_per_step=65_536, model_parameters=7e9, precision="bf16")
    assert found.flop_per_step == pytest.approx(2.752512e15)
    assert found.flop_per_s_per_device == pytest.approx(6.88128e14)
    assert found.mfu == pytest.approx(0.695500, abs=1e-6)
    assert found.peak_flop_per_s == pytest.approx(989.4e12)


def test_a_given_number_of_flop_and_a_given_peak_need_no_table() -> None:
    found = of(device="cpu", flop_per_step=4e12, peak_flop_per_s=2e12)
    assert found.mfu == pytest.approx(4e12 / 0.5 / 8 / 2e12)  # 0.5
    assert (found.tokens_per_s, found.peak_basis) == (None, "given")


@pytest.mark.parametrize(
    "unknown", [{"device": "cpu"}, {"device": ""}, {"precision": None}, {"precision": "fp16", "device": "NVIDIA X1"}]
)
def test_without_device_or_precision_there_is_no_utilisation(unknown: dict[str, Any]) -> None:
    found = of(**{"flop_per_step": 1e15, "precision": "bf16", **unknown})
    assert found.flop_per_s_per_device is not None
    assert (found.mfu, found.peak_flop_per_s) == (None, None)


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert of() is None
    assert of(precision="bf16") is None
    assert of(model_parameters=7e9) is None, "without the tokens of a step"
    assert of(None, tokens_per_step=1) is None
    assert of(0.0, tokens_per_step=1) is None
    assert step_flop(Workload(model_preset="gpt2")) is None


def test_flop_of_a_token_by_hand() -> None:
    # h 4, s 2, V 10, one layer without biases: attention 2*4*(4+4) = 64 weights, MLP 2*4*16 = 128: 192.
    # Products 2*192 = 384, attention 4*2*4 = 32, logits 2*4*10 = 80: 496. With the backward pass 3 * 496.
    model = ModelShape(layers=1, hidden=4, heads=2, sequence=2, vocabulary=10)
    assert model.token_flop == 1488


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_flop_that_predict_counts_without_recomputation(name: str) -> None:
    model = preset(name)
    job = JobShape(model=model, global_batch=2, micro_batch=1, recompute="none")
    found = step_flop(Workload(model_preset=name, tokens_per_step=2 * model.sequence))
    assert found is not None
    assert found[0] == pytest.approx(job_flop(job))


def test_a_gpt_is_equation_11_without_recomputation() -> None:
    model = preset("gpt-1.5b")
    sizes = {"layers": 48, "hidden": 1600, "vocabulary": 50257, "sequence": 1024}
    whole = iteration_flop(batch=1, **sizes)
    # With recomputation the layers pass four times instead of three; logits always three times.
    logits = 6 * 1024 * 1600 * 50257
    assert model.token_flop * 1024 == pytest.approx((whole - logits) * 3 / 4 + logits)


def report(*ranks: Any, **work: Any) -> Any:
    tokens = work.pop("tokens_per_step", None)
    return aggregate_windows(
        samples(*ranks), world_size=len(ranks), every_n_steps=500, tokens_per_step=tokens, work=Workload(**work)
    )


def test_the_report_has_it_by_the_time_of_overlapped_steps_and_the_devices_in_use() -> None:
    ranks = [gpu_rank(rank) for rank in (0, 1)]
    found = report(*ranks, tokens_per_step=1000, flop_per_step=1e12, precision="bf16")
    step_s = found.e2e_overlapped_ms.value / 1e3
    assert found.throughput.tokens_per_s == pytest.approx(1000 / step_s)
    assert found.throughput.mfu == pytest.approx(1e12 / step_s / 2 / 989.4e12)
    metrics = found.metrics()
    assert metrics["throughput/mfu"] == found.throughput.mfu
    assert {key for key in metrics if key.startswith("throughput/")} == {
        f"throughput/{name}" for name in ("tokens_per_s", "flop_per_step", "flop_per_s_per_device", "mfu")
    }
    # Two ranks on one device.
    shared = [gpu_rank(rank, device_uuid="one", pci_bus_id="0000:10:00.0") for rank in (0, 1)]
    assert report(*shared, flop_per_step=1e12).throughput.num_devices == 1


def test_devices_that_differ_have_no_common_peak() -> None:
    ranks = [gpu_rank(0), gpu_rank(1, device="NVIDIA A100-SXM4-80GB")]
    found = report(*ranks, flop_per_step=1e12, precision="bf16").throughput
    assert found.flop_per_s_per_device is not None
    assert found.mfu is None
    assert report(*ranks, flop_per_step=1e12, peak_flop_per_s=1e15).throughput.mfu is not None


def test_a_run_s_rates_are_its_work_over_its_time() -> None:
    # 1,000 tokens in 100 ms and in 300 ms: 2,000 in 400 ms are 5,000 a second, where the mean of the rates is 6,667.
    base = report(gpu_rank(), flop_per_step=1e12, precision="bf16")
    windows = [
        msgspec.structs.replace(
            base,
            e2e_overlapped_ms=Estimate(step_ms, None, None, 16, 8),
            throughput=Throughput(tokens_per_s=1000 / step_ms * 1e3, mfu=60 / step_ms),
        )
        for step_ms in (100.0, 300.0)
    ]
    found = run_throughput([*windows, msgspec.structs.replace(base, throughput=None)])
    assert found is not None
    assert (found.tokens_per_s, found.mfu) == pytest.approx((5000, 60 / 200))
    assert found.samples_per_s is None
    assert run_throughput([]) is None
