"""The Trainer and Accelerate loops where the model is sharded: FSDP2, and DeepSpeed's ZeRO-2 and ZeRO-3."""

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
from tests.integrations import accelerate_shims
from tests.integrations import huggingface_jobs as jobs
from tests.integrations.huggingface_jobs import (
    GPT2_BYTES,
    NET_BYTES,
    NUM_STEPS,
    NUM_TOGGLING_STEPS,
    ONE_WINDOW,
    TOGGLING,
)
from tests.toggling import at_night

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing"),
    pytest.mark.slow,
]
RANKS_LOAD = ("transformers.trainer", "accelerate", "tests.integrations.deepspeed_jobs")

WAYS: dict[str, Any] = {"absent": None, "attached": ONE_WINDOW, "toggling": TOGGLING, "forced": ONE_WINDOW}

# Of GPT-2's weights, the one of the embedding is the head's as well; a block holds 12704 of them.
BLOCK_BYTES = 4 * 12704
EMBEDDING_BYTES = 4 * 64 * 32
# A weight or bias: 12 in a block, two embeddings, and a layer norm at the end.
NUM_WEIGHTS = 2 * 12 + 2 + 2
# Modules with weights of their own: 6 in a block, two embeddings, a layer norm and the head.
NUM_MODULES = 2 * 6 + 2 + 1 + 1

# Two ranks share a weight by rows, and the last layer has one row, of 32 + 1: it is padded. ZeRO shares all 577 in a
# line, and pads to a multiple of 4 (two for each rank).
FSDP_NET_BYTES = NET_BYTES + 4 * (32 + 1)
ZERO_NET_BYTES = NET_BYTES + 4 * 3

Row = tuple[str, int, int, int]  # operator, messages, bytes in, bytes out

# A Trainer's step in each way of sharding.
TRAINER: dict[str, list[Row]] = {
    "fsdp2": [
        # Gathered in the forward pass: two blocks, the tied embedding, and what is left. The blocks, which were let go
        # since, once more in the backward pass.
        ("_allgather_base_", 4 + 2, (GPT2_BYTES + 2 * BLOCK_BYTES) // 2, GPT2_BYTES + 2 * BLOCK_BYTES),
        ("_reduce_scatter_base_", 4, GPT2_BYTES, GPT2_BYTES // 2),
        ("allreduce_", 1, 4 * NUM_WEIGHTS, 4 * NUM_WEIGHTS),  # the gradients' norm, from each weight's
    ],
    "zero2": [
        ("allreduce_", 1 + 1, GPT2_BYTES + 4, GPT2_BYTES + 4),  # one bucket of gradients, and their norm
        ("_allgather_base_", 1, GPT2_BYTES // 2, GPT2_BYTES),
    ],
    "zero3": [
        # Each module's weights, forward and backward; the embedding's for the head as well.
        ("_allgather_base_", 2 * NUM_MODULES, GPT2_BYTES + EMBEDDING_BYTES, 2 * (GPT2_BYTES + EMBEDDING_BYTES)),
        ("_reduce_scatter_base_", 1, GPT2_BYTES, GPT2_BYTES // 2),
        ("allreduce_", 1, 8, 8),  # the gradients' norm, and whether one is not finite
    ],
}


def deepspeed_config(rank: int, kind: str, learning_rate: float) -> dict[str, Any]:
    from tests.integrations import deepspeed_jobs

    deepspeed_jobs.set_up(rank)
    # All gradients in one bucket.
    config = deepspeed_jobs.config(int(kind[-1]), zero={"reduce_bucket_size": 1_000_000})
    config["optimizer"]["params"]["lr"] = learning_rate
    return {**config, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


# -- the Trainer


def _train_sharded(rank: int, folder: str, kind: str, accumulate: int) -> dict[str, Any]:
    jobs.join(rank)
    options: dict[str, Any] = {"use_cpu": False, "gradient_accumulation_steps": accumulate}
    if kind == "fsdp2":
        options |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    else:
        config = deepspeed_config(rank, kind, learning_rate=1e-3)
        options |= {"learning_rate": 1e-3, "deepspeed": {**config, "gradient_clipping": "auto"}}
    accelerate_shims.install()
    found: dict[str, Any] = {}
    for way, settings in WAYS.items():
        callbacks: list[Any] = []
        if settings is not None:
            callback = jobs.overlap_callback(**settings)
            callbacks = [callback, jobs.watch(callback, Mode.SEQUENTIAL if way == "forced" else None)]
        # ZeRO-3 takes long on a CPU, and DeepSpeed's own adapter has its many steps.
        long = way == "toggling" and accumulate == 1 and kind != "zero3"
        steps = NUM_TOGGLING_STEPS if long else NUM_STEPS
        trainer = jobs.trainer(rank, Path(folder, way), *callbacks, max_steps=steps, **options)
        trainer.train()
        found[way] = callbacks[1].weights if long else digest_of_shards(trainer.model)
        found["made"] = type(trainer.model_wrapped).__name__
        if callbacks:
            found[f"{way} sequential steps"] = callbacks[1].modes[:NUM_STEPS].count(Mode.SEQUENTIAL)
    return found


def digest_of_shards(model: nn.Module) -> str:
    """Equal for bit-identical shards of this rank."""
    shards = [getattr(parameter, "ds_tensor", parameter).detach() for parameter in model.parameters()]
    return jobs.digest(nn.ParameterList([nn.Parameter(shard) for shard in shards]))


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [
        ("fsdp2", 1),
        ("zero2", 2),
        pytest.param("zero3", 1, marks=pytest.mark.nightly),
        pytest.param("fsdp2", 2, marks=pytest.mark.nightly),
        pytest.param("zero2", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_sharded_trainers_weights_are_bit_identical_absent_attached_toggling_and_forced(
    tmp_path: Path, kind: str, accumulate: int
) -> None:
    if kind != "fsdp2":
        pytest.importorskip("deepspeed")
    for found in run_ranks(_train_sharded, 2, str(tmp_path), kind, accumulate, timeout_s=240):
        assert found["made"].startswith("FSDP" if kind == "fsdp2" else "DeepSpeedEngine")
        assert found["absent"] == found["attached"] == found["toggling"] == found["forced"]
        assert found["attached sequential steps"] == 4 + 2
        assert found["toggling sequential steps"] == 8
        assert found["forced sequential steps"] == NUM_STEPS - 1
    for way in ("attached", "toggling"):
        window = jobs.the_record(tmp_path / way).windows[0]
        if accumulate == 1:
            jobs.expect_good(window, TRAINER[kind])
        assert {c.dimension for c in window.collectives} == {"data"}


# -- Accelerate


def _accelerate_sharded(rank: int, folder: str, kind: str) -> dict[str, Any]:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    from overlap_callbacks.integrations import deepspeed as deepspeed_adapter
    from overlap_callbacks.integrations.transformers import attach_accelerate

    jobs.join(rank)
    sharded_by_fsdp = kind.startswith("fsdp2")
    config = deepspeed_config(rank, kind, learning_rate=1e-2) if not sharded_by_fsdp else {}
    config.pop("optimizer", None)  # the loop has its own
    accelerate_shims.install()
    found: dict[str, Any] = {}
    for way, settings in WAYS.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        if sharded_by_fsdp:
            # The one module keeps its weights till the backward pass: as newer versions decide by themselves.
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=False
            )
            mesh = ParallelismConfig(dp_shard_size=2) if kind == "fsdp2 on a mesh" else None
            accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh)
        else:
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        data = torch.randn(NUM_STEPS * 4 * 2, 16, generator=torch.Generator().manual_seed(1))
        loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
        monitor = None
        if settings is not None:
            options = {"run_dir": Path(folder, way), **settings}
            attach_here = attach_accelerate if sharded_by_fsdp else deepspeed_adapter.attach
            monitor = attach_here(optimizer if sharded_by_fsdp else model, **options)
            if way == "forced":
                monitor.force(Mode.SEQUENTIAL)
        modes = []
        for batch in loader:
            loss = model(batch).square().mean()
            if monitor is not None:
                modes.append(monitor.mode)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
            found[f"{way} sequential"] = modes.count(Mode.SEQUENTIAL)
        found[way] = digest_of_shards(model)
        found["made"] = type(model).__name__
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return found


@pytest.mark.parametrize("kind", at_night(["fsdp2", "fsdp2 on a mesh", "zero2"], ["fsdp2"]))
def test_a_sharded_accelerate_loops_weights_are_bit_identical_absent_attached_toggling_and_forced(
    tmp_path: Path, kind: str
) -> None:
    if kind == "zero2":
        pytest.importorskip("deepspeed")
    for found in run_ranks(_accelerate_sharded, 2, str(tmp_path), kind, timeout_s=240):
        assert found["made"].startswith("DeepSpeedEngine" if kind == "zero2" else "FSDP")
        assert found["absent"] == found["attached"] == found["toggling"] == found["forced"]
        assert found["attached sequential"] == 4 + 2
        assert found["toggling sequential"] == 8
    by_rows, in_line = FSDP_NET_BYTES, ZERO_NET_BYTES
    expected: dict[str, list[Row]] = {
        "fsdp2": [("_allgather_base_", 1, by_rows // 2, by_rows), ("_reduce_scatter_base_", 1, by_rows, by_rows // 2)],
        # The gradients as they are, and their norm.
        "zero2": [
            ("allreduce_", 2, NET_BYTES + 4, NET_BYTES + 4),
            ("_allgather_base_", 1, in_line // 2, in_line),
        ],
    }
    for way in ("attached", "toggling"):
        jobs.expect_good(jobs.the_record(tmp_path / way).windows[0], expected[kind.split(maxsplit=1)[0]])


def _name_a_mesh(rank: int) -> list[dict[str, str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    from overlap_callbacks.integrations.transformers import dimensions_of

    found = []
    for names in (("tp",), ("cp",), None):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        found.append(dimensions_of([torch.ones(2), distribute_tensor(torch.ones(2), mesh, [Replicate()])]))
    return found


def test_the_default_group_has_the_name_of_the_mesh_that_covers_all_ranks() -> None:
    for found in run_ranks(_name_a_mesh, 2):
        assert [list(names.values()) for names in found] == [["tensor"], ["context"], ["data"]]
