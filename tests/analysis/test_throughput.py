"""Throughput by numbers that were worked out by hand."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import PRESETS, ModelShape, preset
from overlap_callbacks.analysis.communication.step_time import step_flop as job_flop
from overlap_callbacks.analysis.results.catalogue import THROUGHPUT
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import Throughput
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.throughput import (
    DEVICES,
    PRECISIONS,
    RunFigures,
    in_order,
    is_numeric,
    peak_of,
    run_throughput,
    scaled,
    step_flop,
    throughput_of,
)
from tests.analysis.communication.paper_flop import iteration_flop
from tests.environments import gpu_rank, samples
from tests.samples import aggregate_windows


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
    assert metrics["overlap/mfu"] == found.throughput.mfu
    names = ("tokens_per_s", "flop_per_step", "flop_per_s_per_device", "mfu")
    assert {figure.key for figure in THROUGHPUT if figure.key in metrics} == {f"overlap/{name}" for name in names}
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


@pytest.mark.parametrize(
    ("device", "precision", "tflop_per_s"),
    [
        # Half of what data sheets give with sparsity: 1,979 and 3,958 (H100 SXM), 1,513 (PCIe), 1,671 (NVL).
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA B200", "fp8", 4500.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X", "bf16", 191.5),
    ],
)
def test_a_device_has_its_own_dense_peak(device: str, precision: str, tflop_per_s: float) -> None:
    found = peak_of(device, precision)
    assert found is not None
    flop_per_s, source = found
    assert flop_per_s == pytest.approx(tflop_per_s * 1e12)
    assert source.startswith("https://")


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "bf16"),
        ("", "bf16"),
        ("NVIDIA H100", "bf16"),  # which of three?
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA H300", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # it has no such cores
        ("NVIDIA A100-SXM4-80GB", "fp8"),
    ],
)
def test_an_unknown_device_or_precision_has_no_peak(device: str, precision: str) -> None:
    assert peak_of(device, precision) is None


def test_rates_rise_as_precision_falls_and_each_row_has_a_pattern_and_a_document() -> None:
    for device in DEVICES:
        re.compile(device.name)
        assert device.source.startswith("https://")
        assert device.tflop_per_s.keys() <= set(PRECISIONS)
        # Ada has as many of tf32 as of fp32.
        rates = [device.tflop_per_s[name] for name in ("fp32", "tf32", "fp16", "fp8") if name in device.tflop_per_s]
        assert all(slower <= faster for slower, faster in itertools.pairwise(rates)), device.name


def run(name: str, ranks: int, work_per_s: float | None = None, value: int | str | None = None) -> RunFigures:
    work = None if work_per_s is None else Estimate(work_per_s, None, None, 8, 1)
    return RunFigures(name, ranks if value is None else value, ranks, work_per_s=work)


def test_runs_are_compared_with_the_smallest_job() -> None:
    found = scaled([run("a", 8, 3000), run("b", 2, 1000), run("c", 4, 2000), run("d", 16)])
    assert found.keys() == {"a", "b", "c"}
    # 8 ranks do 3,000 tokens a second, 2 ranks 1,000: three times as many on four times the ranks, 75 %.
    assert found["a"] == (3, 0.75)
    assert found["b"] == (1, 1)
    assert found["c"] == (2, 1)


def test_of_several_smallest_jobs_the_mean_is_the_base() -> None:
    found = scaled([run("a", 2, 900), run("b", 2, 1100), run("c", 4, 1500)])
    assert found["c"] == (1.5, 0.75)
    assert (found["a"].factor, found["b"].factor) == (pytest.approx(0.9), pytest.approx(1.1))


def test_runs_of_one_size_do_not_scale() -> None:
    assert scaled([run("a", 2, 900), run("b", 2, 1100)]) == {}
    assert scaled([run("a", 2), run("b", 4)]) == {}
    assert scaled([run("a", 2, 1000), run("b", 4)]) == {}
    assert scaled([run("a", 0, 1000), run("b", 4, 1000)]) == {}, "no job has no ranks"


def test_places_stand_by_size_or_by_the_alphabet() -> None:
    numbers = [run("a", 1, value=16), run("b", 1, value=4), run("c", 1, value=8)]
    assert is_numeric(numbers)
    assert [each.name for each in in_order(numbers)] == ["b", "c", "a"]
    words = [run("a", 1, value="fp32"), run("b", 1, value="bf16"), run("c", 1, value=8)]
    assert not is_numeric(words)
    assert [each.name for each in in_order(words)] == ["c", "b", "a"]
