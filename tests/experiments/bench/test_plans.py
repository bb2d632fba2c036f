"""Plans from what was asked for; what a machine cannot do is refused in a sentence."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from overlap_callbacks.analysis.results.bench import COLLECTIVES, GEMM, LOOPBACK
from overlap_callbacks.experiments.bench.gemm_bench import flop, message_dtype, product
from overlap_callbacks.experiments.bench.plans import make_plan
from overlap_callbacks.experiments.bench.results import points_of
from tests.commands import invoke

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU refuses")


def test_the_defaults_of_a_machine_without_a_gpu() -> None:
    plan = make_plan(GEMM, {})
    assert (plan.link, plan.device, plan.ranks, plan.dtypes) == ("gloo", "cpu", 2, ("fp32",))
    assert plan.threads >= 1
    every = make_plan(COLLECTIVES, {})
    assert every.message_bytes[0] == 8
    assert {point.kind for point in points_of(every)} == set(every.kinds)  # type: ignore[union-attr]
    assert len(make_plan(GEMM, {}, quick=False).sizes) > len(plan.sizes)


def test_a_launchers_ranks_count() -> None:
    assert make_plan(GEMM, {}, world_size=4).ranks == 4
    assert make_plan(GEMM, {"link": LOOPBACK}, world_size=1).ranks == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gemm-allreduce --dtype tf32", "--dtype tf32 needs a GPU: a CPU multiplies in fp32, fp16 and bf16"),
        ("gemm-allreduce --dtype fp8", "--dtype fp8 needs a GPU"),
        ("gemm-allreduce --dtype fp64", "--dtype must be one of fp32, tf32, fp16, bf16, fp8, got 'fp64'"),
        ("gemm-allreduce --n 0", "--n must be at least 1, got 0"),
        ("gemm-allreduce --n 99999999", "--n must be at most"),
        ("gemm-allreduce --n big", "--n must be whole numbers with commas between them, got 'big'"),
        ("gemm-allreduce --n 100000 --message 900GiB", "are free: choose smaller sizes"),
        ("gemm-allreduce --message 2.5", "--message must be a whole number of bytes"),
        ("gemm-allreduce --message 6", "--message must be whole numbers of 4 bytes with fp32, got 6 bytes"),
        ("gemm-allreduce --ranks 1", "--ranks must be from 2 to 1024, got 1"),
        ("gemm-allreduce --ctas 8", "leave it out on a CPU"),
        ("gemm-allreduce --device cuda", "--device cuda needs a GPU"),
        ("gemm-allreduce --link nccl", "--link nccl needs GPUs"),
        ("gemm-allreduce --link-gb-s 4", "leave it out with gloo"),
        ("gemm-allreduce --link loopback --ranks 4", "--link loopback has 2 ranks in one process"),
        ("gemm-allreduce --rounds 0", "--rounds must be at least 1, got 0"),
        ("gemm-allreduce --block-s -1", "--block-s must be a positive"),
        ("gemm-allreduce --link-peak fast", "--link-peak must be a positive number of GB/s"),
        ("collectives --kind reduce", "--kind must be one of all_reduce"),
        ("collectives --kind send_recv --link loopback", "--kind must be one of all_reduce"),
        ("collectives --groups 3", "--groups 3 must have at least 2 ranks"),
        ("collectives --size 0", "--size must be a whole number of bytes"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments: str, said: str) -> None:
    result = invoke("bench", *arguments.split())
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_the_loopback_link_says_which_torch_it_needs() -> None:
    for version, refused in (("2.8.0", True), ("2.9.0", False), ("2.10.1", False)):
        with mock.patch("torch.__version__", TorchVersion(version)):
            result = invoke("bench", "gemm-allreduce", "--link", "loopback", "--ranks", "4")
        assert (f"--link loopback needs torch 2.9 or newer, got {version}" in result.output) is refused


def test_products_are_those_of_their_type() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        made = product(dtype, 8, torch.device("cpu"))()
        assert isinstance(made, torch.Tensor)
        assert made.shape == (8, 8)
        assert made.dtype == message_dtype(dtype)
    assert flop(1000) == 2 * 10**9
