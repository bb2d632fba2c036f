"""Lightning's callback under strategies other than DDP's, which ``test_lightning`` covers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks import Mode
from tests.distributed import run_ranks
from tests.integrations.huggingface_jobs import ONE_WINDOW, TOGGLING, anatomy, digest, expect_good, the_record
from tests.integrations.test_lightning import Regression, Watch, batches, overlap_callback, pl
from tests.monitor.jobs import dispatch_table
from tests.toggling import TOGGLING_STEPS

RANKS_LOAD = ("lightning.pytorch",)
NUM_STEPS = 20
NUM_TOGGLING_STEPS = TOGGLING_STEPS
# Bytes of the two layers: 16 x 32 + 32 weights, and 32 x 2 + 2.
FIRST, SECOND = 4 * (16 * 32 + 32), 4 * (32 * 2 + 2)

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is missing")


class TwoLayers(Regression):
    """Both layers' weights divide by two; optionally sharded by FSDP2."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        self.shard = shard
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))

    def configure_model(self) -> None:
        if self.shard:
            from torch.distributed.fsdp import fully_shard

            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def strategy(name: str) -> Any:
    if name == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return fsdp() if name == "fsdp" else deepspeed(stage=int(name[-1]))


def deepspeed(stage: int) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded
    import deepspeed
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.strategies import deepspeed as module

    # DeepSpeed would compile a shared-memory all-reduce for inference, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module._validate_device_index_selection = lambda *_: None  # all processes have the one CPU

    class OnCpu(DeepSpeedStrategy):
        """Lightning refuses DeepSpeed without CUDA, which DeepSpeed itself no longer needs."""

        root_device = torch.device("cpu", 0)

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

    config = {
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": 400,  # elements: fewer than the first layer has
            "allgather_bucket_size": 100_000,
        },
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    return OnCpu(config=config, process_group_backend="gloo")


def fsdp() -> Any:
    from lightning.pytorch.strategies import FSDPStrategy

    class DdpInItsPlace(FSDPStrategy):
        """FSDP1 needs an accelerator. All that the callback sees of the strategy is the trainer's loop around it."""

        def _setup_model(self, model: nn.Module) -> nn.Module:
            return nn.parallel.DistributedDataParallel(model)

    return DdpInItsPlace(process_group_backend="gloo")


class Look(pl.Callback):
    """Records the weights after this many steps, and at the end what is on the model and its optimizers."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == NUM_STEPS:
            self.weights = digest(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.leaves = anatomy(trainer.strategy.model, *trainer.optimizers)


def fit(
    rank: int, folder: str | Path, name: str, *callbacks: Any, checkpoint: str | None = None, **options: Any
) -> Any:
    """The trainer after a training."""
    quiet(rank)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": strategy(name),
        "max_steps": NUM_STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "callbacks": list(callbacks),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 2 if "val_check_interval" in options else 0,
    }
    train = pl.Trainer(**{**defaults, **options})
    train.fit(TwoLayers(shard=name == "fsdp2"), batches(rank, 60), batches(rank, 2), ckpt_path=checkpoint)
    return train


def quiet(rank: int) -> None:
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


# -- weights


def _train_in_four_ways(rank: int, folder: str, name: str, accumulate: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    untouched = dispatch_table()
    ways = {"absent": None, "attached": ONE_WINDOW, "toggling": TOGGLING, "forced": ONE_WINDOW}
    for way, options in ways.items():
        callbacks: list[Any] = []
        if options is not None:
            callback = overlap_callback(**{**options, "run_dir": Path(folder, way)})
            callbacks = [callback, Watch(callback, Mode.SEQUENTIAL if way == "forced" else None)]
        look = Look()
        steps = NUM_TOGGLING_STEPS if way == "toggling" else NUM_STEPS
        fit(rank, folder, name, *callbacks, look, accumulate_grad_batches=accumulate, max_steps=steps)
        found[way], found[f"{way} leaves"] = look.weights, look.leaves
        if callbacks:
            found[f"{way} sequential steps"] = callbacks[1].modes[:NUM_STEPS].count(Mode.SEQUENTIAL)
            found[f"{way} calls"] = callbacks[1].calls
        assert dispatch_table() == untouched
    return found


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        ("fsdp2", 2),
        pytest.param("zero1", 1, marks=[needs_deepspeed, pytest.mark.nightly]),
        pytest.param("zero2", 2, marks=needs_deepspeed),
        ("fsdp", 2),
    ],
)
def test_weights_are_bit_identical_absent_attached_toggling_and_forced(
    tmp_path: Path, name: str, accumulate: int
) -> None:
    for found in run_ranks(_train_in_four_ways, 2, str(tmp_path), name, accumulate, timeout_s=150):
        assert found["absent"] == found["attached"] == found["toggling"] == found["forced"]
        assert found["attached sequential steps"] == 4 + 2
        assert found["toggling sequential steps"] == 8
        assert found["forced sequential steps"] == NUM_STEPS - 1  # all but the recorded one
        for way in ("attached", "toggling", "forced"):
            assert found[f"{way} leaves"] == found["absent leaves"]
            assert found[f"{way} calls"] == [
                call
                for step in range(NUM_TOGGLING_STEPS if way == "toggling" else NUM_STEPS)
                for call in (("begin", step), *[("batch", 0)] * (accumulate - 1), ("end", step), ("batch", 0))
            ]
    for way, num_timed, num_windows in (("attached", 8, 1), ("toggling", 16, NUM_TOGGLING_STEPS // 19)):
        windows = [window for window in the_record(tmp_path / way).windows if window.complete]
        assert len(windows) == num_windows
        for window in windows:
            assert len(window.samples[0].timed) == num_timed
            expect_good(window, expected(name, accumulate), dimension=None)
            # Lightning itself broadcasts over the default group.
            assert {c.dimension for c in window.collectives if c.operator != "broadcast_"} == {"data"}


def expected(name: str, accumulate: int) -> list[tuple[str, int, int, int]]:
    """The collectives of a step, worked out by hand: operator, messages, bytes in and out."""
    weights = FIRST + SECOND
    # Between two batches Lightning broadcasts whether a signal came.
    between = [("broadcast_", accumulate - 1, 8, 8)] if accumulate > 1 else []
    if name == "fsdp":
        # DDP's one bucket, in the last micro-batch only.
        return [*between, ("allreduce_", 1, weights, weights)]
    if name == "fsdp2":
        # In every micro-batch each layer is gathered from its halves for the forward and again for the backward, and
        # its gradients are reduced to halves.
        return [
            ("_allgather_base_", 4 * accumulate, accumulate * weights, 2 * accumulate * weights),
            ("_reduce_scatter_base_", 2 * accumulate, accumulate * weights, accumulate * weights // 2),
            *between,
        ]
    # In every micro-batch ZeRO reduces the second layer's gradients, and then the first's, which fill a bucket; at the
    # end the norm, of one number. Then it gathers the new weights, padded to a multiple of 4 of them.
    padded = weights + 8
    gradients = ("allreduce_", 2 * accumulate + 1, accumulate * weights + 4, accumulate * weights + 4)
    return [gradients, *between, ("_allgather_base_", 1, padded // 2, padded)]


# -- what lies between steps, and resuming


def _validate_and_resume(rank: int, folder: str, name: str) -> list[int]:
    checkpoint = str(Path(folder, "last.ckpt"))
    callback = overlap_callback(**{**ONE_WINDOW, "run_dir": Path(folder, "first")})
    train = fit(rank, folder, name, callback, val_check_interval=5)
    train.save_checkpoint(checkpoint)
    callback = overlap_callback(**{**ONE_WINDOW, "run_dir": Path(folder, "second")})
    watch = Watch(callback)
    fit(rank, folder, name, callback, watch, max_steps=NUM_STEPS + 4, checkpoint=checkpoint)
    return [step for kind, step in watch.calls if kind == "begin"]


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero2", marks=[needs_deepspeed, pytest.mark.nightly])])
def test_validation_between_steps_leaves_a_window_whole_and_a_resumed_fit_goes_on_counting(
    tmp_path: Path, name: str
) -> None:
    for begun in run_ranks(_validate_and_resume, 2, str(tmp_path), name, timeout_s=90):
        assert begun == list(range(NUM_STEPS, NUM_STEPS + 4))
    (window,) = the_record(tmp_path / "first").windows
    assert len(window.samples[0].timed) == 8
    expect_good(window, expected(name, 1), dimension=None)


# -- what CPU cannot show


def test_lightning_still_refuses_fsdp1_on_cpu_so_it_is_tested_with_ddp_in_its_place() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    # Once this fails, the stand-in above can go.
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=FSDPStrategy(), logger=False)
