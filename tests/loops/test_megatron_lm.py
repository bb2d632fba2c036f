"""Megatron-LM's own ``pretrain_gpt.py``, from a checkout (see ``scripts``), with ``hook_pretrain()`` before it."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import megatron_shims
from tests.loops import cpu_shims
from tests.loops.harness import compare, expect_measured
from tests.loops.scripts import checkout, run_with_lines
from tests.loops.watching import NUM_STEPS, note_loss
from tests.wandb_reader import read_run

pytestmark = pytest.mark.slow

COMMON = (
    "--use-cpu-initialization --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-dropout 0 "
    "--hidden-dropout 0 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --seed 1 "
    "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant "
    "--eval-iters 1 --eval-interval 1000 --log-interval 1 --rerun-mode disabled --num-workers 0 "
    f"--train-iters {NUM_STEPS + 1}"
)
SETUPS = {
    "data": "--global-batch-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 5000",
    "tensor": "--global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--global-batch-size 8 --pipeline-model-parallel-size 2",
    "interleaved": "--global-batch-size 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}


def _note_losses() -> None:
    from megatron.training import training

    own = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        outcome = own(*args, **kwargs)
        for loss in outcome[0].values():
            note_loss(float(loss))
        return outcome

    training.train_step = functools.wraps(own)(train_step)


def _pretrain(options: dict[str, Any] | None, folder: str, arguments: list[str], wandb: str = "") -> None:
    if wandb:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_CONSOLE": "off", "WANDB_SILENT": "true"}
        arguments = [*arguments, "--wandb-project", "loops", "--wandb-exp-name", "one"]
        arguments += ["--wandb-save-dir", f"{wandb}/{'without' if options is None else 'with'}"]
    sys.path.append(folder)  # after the installed Megatron-core, whose helpers in C++ are compiled
    os.chdir(folder)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    warnings.simplefilter("ignore")
    cpu_shims.install_megatron_lm()
    megatron_shims.install()
    if "--num-layers-per-virtual-pipeline-stage" in arguments:
        cpu_shims.keep_memory_of_sends()
    _note_losses()
    if options is not None:
        from overlap_callbacks.integrations.megatron import hook_pretrain

        hook_pretrain(**options)
    run_with_lines(Path(folder, "pretrain_gpt.py"), [*COMMON.split(), *arguments], {}, None)


@pytest.mark.parametrize("setup", SETUPS)
def test_pretrain(setup: str, tmp_path: Path) -> None:
    folder = checkout("Megatron-LM")
    window = compare(_pretrain, tmp_path / "run", str(folder), SETUPS[setup].split(), timeout_s=200)
    expect_measured(window)


def test_the_report_reaches_the_run_that_megatron_lm_opens_on_the_last_rank(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    given = (str(checkout("Megatron-LM")), SETUPS["data"].split(), str(tmp_path / "wandb"))
    window = compare(_pretrain, tmp_path / "run", *given, timeout_s=200)
    expect_measured(window)
    assert window.speedup_vs_sequential is not None
    logged = read_run(tmp_path / "wandb/with").values("overlap/speedup_vs_sequential")
    assert logged == pytest.approx([window.speedup_vs_sequential.value])


def test_native_switches(tmp_path: Path) -> None:
    given = (str(checkout("Megatron-LM")), SETUPS["data"].split())
    expect_measured(compare(_pretrain, tmp_path / "run", *given, timeout_s=200, sequential="native"))
