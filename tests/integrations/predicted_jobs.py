"""Jobs of Hugging Face's GPT-2 and LLaMA under DDP, FSDP2, HSDP and ZeRO: what the gate sees of one of their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.integrations.pytorch import attach
from tests.monitor.jobs import kept_logs

RANKS_LOAD = ("transformers.trainer", "accelerate", "tests.integrations.deepspeed_jobs")

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 3, 32, 4, 16, 2, 131
MICRO_BATCHES = 2
# One recorded step and four more.
RECORDING: dict[str, Any] = {"spread": False, "every_n_steps": 100, "first_step": 2, "repeats": 1, "steps_per_block": 1}
RECORDING |= {"warmup_steps": 0, "profiled_steps": 0, "max_overhead": None, "strict": True, "sinks": []}
NUM_STEPS = 4

# Dimension, operator, bytes of a message, ranks of its group.
Message = tuple[str, str, int, int]


def model(name: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=LAYERS,
                n_embd=HIDDEN,
                n_head=HEADS,
                vocab_size=VOCABULARY,
                n_positions=SEQUENCE,
                use_cache=False,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2,
            intermediate_size=88, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
        )
    )  # fmt: skip


def blocks(net: Any) -> Any:
    return net.transformer.h if hasattr(net, "transformer") else net.model.layers


def recorded(step: Callable[[], None], optimizer: Any, modules: Any) -> Counter[Message]:
    """What the gate records of a step."""
    with kept_logs() as logs:
        monitor = attach(optimizer, model=modules, **RECORDING)
        for _ in range(NUM_STEPS):
            step()
        monitor.close()
    return messages(logs[0])


def messages(log: StepLog) -> Counter[Message]:
    """How often each message was sent."""
    return Counter(
        [(c.group.dimension, c.operator, max(c.bytes_in, c.bytes_out), c.group.num_ranks) for c in log.collectives]
    )


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))


def data_parallel(name: str, bucket_mb: float = 0.03) -> Counter[Message]:
    net = DistributedDataParallel(model(name), bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with net.no_sync():
            for _ in range(MICRO_BATCHES - 1):
                batch = tokens()
                net(batch, labels=batch).loss.backward()
        batch = tokens()
        net(batch, labels=batch).loss.backward()
        optimizer.step()

    return recorded(step, optimizer, [net])


def fully_sharded(name: str, replicas: int = 1, bf16: bool = False) -> Counter[Message]:
    shards = dist.get_world_size() // replicas
    shape, names = ((replicas, shards), ("dp_replicate", "dp_shard")) if replicas > 1 else ((shards,), ("dp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    net = model(name)
    for block in blocks(net):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            batch = tokens()
            net(batch, labels=batch).loss.backward()
        optimizer.step()

    return recorded(step, optimizer, [net])


def zero(name: str, stage: int, bf16: bool = False, **settings: Any) -> Counter[Message]:
    import deepspeed

    from tests.integrations import deepspeed_jobs

    net = model(name)
    config = deepspeed_jobs.config(stage, MICRO_BATCHES, "bf16" if bf16 else "fp32", zero=settings)
    config["train_micro_batch_size_per_gpu"] = BATCH
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)

    from overlap_callbacks.integrations.deepspeed import attach as attach_engine

    with kept_logs() as logs:
        monitor = attach_engine(engine, **RECORDING)
        for _ in range(NUM_STEPS):
            for _ in range(MICRO_BATCHES):
                batch = tokens()
                engine.backward(engine(batch, labels=batch).loss)
                engine.step()
        monitor.close()
    return messages(logs[0])


def run_jobs(rank: int, jobs: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Counter[Message]]:
    """What this rank sends in a step of each job: name -> (function of this module, its arguments)."""
    if any(kind == "zero" for kind, _ in jobs.values()):
        from tests.integrations import deepspeed_jobs

        deepspeed_jobs.set_up(rank)
    return {name: globals()[kind](**arguments) for name, (kind, arguments) in jobs.items()}
