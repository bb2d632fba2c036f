"""Jobs of the Hugging Face Trainer and of Accelerate, and what tests look at in their windows."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tests.toggling import TOGGLING_STEPS

if TYPE_CHECKING:  # jobs without the library use this module too
    from overlap_callbacks import Mode
    from overlap_callbacks.report import record

NUM_STEPS = 20
NUM_TOGGLING_STEPS = TOGGLING_STEPS
# From step 3 on DDP has rebuilt its buckets, which takes broadcasts, once.
# One recorded step, 2 x OSSO timed and OSSO profiled ones: steps 3 to 15.
ONE_WINDOW: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 100,
    "first_step": 3,
    "repeats": 2,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 2,
    "max_overhead": None,
    "strict": True,
}
# One recorded step, 4 x OSSO timed ones: the mode changes every step or two.
TOGGLING: dict[str, Any] = {**ONE_WINDOW, "every_n_steps": 19, "repeats": 4, "profiled_steps": 0}

# 32 wide, so a block has 2 layer norms of 2 x 32 weights, attention of 32 x 96 + 96 and 32 x 32 + 32, and an MLP of
# 32 x 128 + 128 and 128 x 32 + 32; around the 2 blocks there are 64 + 16 embeddings of 32 and a layer norm of 2 x 32.
GPT2_BYTES = 4 * (2 * (2 * 64 + 3168 + 1056 + 4224 + 4128) + (64 + 16) * 32 + 64)
# DDP closes a bucket once it holds this much. The largest weight of a block has 16384 bytes, so the first bucket holds
# up to 79298 and leaves too little to fill another: there are two.
BUCKET_MB = 0.06


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **no_dropout
        )
    )


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Sentences(torch.utils.data.IterableDataset):
    """Ends after ``count`` sentences, and does not say so before."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(sentences(self.count))


def join(rank: int) -> None:
    """The variables that torchrun gives its processes; the process group exists already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def trainer(rank: int, folder: str | Path, *callbacks: Any, data: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    join(rank)
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": NUM_STEPS,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "ddp_bucket_cap_mb": BUCKET_MB,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**defaults, **options})
    return Trainer(
        model=gpt2(),
        args=arguments,
        train_dataset=sentences(200) if data is None else data,
        eval_dataset=sentences(8),
        callbacks=list(callbacks),
    )


def overlap_callback(**options: Any) -> Any:
    from overlap_callbacks.integrations.transformers import OverlapCallback

    return OverlapCallback(**{**ONE_WINDOW, **options})


def watch(callback: Any, force: Mode | None = None) -> Any:
    """A callback that records the calls to the monitor between micro-batches, and each step's mode."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.modes: list[Mode] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if force is not None:
                callback.monitor.force(force)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            monitor = callback.monitor
            self.calls.append(monitor.last_step)
            self.modes.append(monitor.mode)

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            self.calls.append("micro-batch" if callback.monitor.in_step else "outside")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.calls.append("optimizer" if callback.monitor.in_step else "outside")

        def on_step_end(self, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
            if state.global_step == NUM_STEPS:
                self.weights = digest(model)
            self.calls.append("in step" if callback.monitor.in_step else "end")

    return Watch()


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(local.detach().contiguous().float().cpu().numpy().tobytes())
    return found.hexdigest()


def anatomy(*objects: Any) -> list[Any]:
    """What a library could leave on modules and optimizers: their attributes, and how many hooks each has."""
    found: list[Any] = []
    for thing in objects:
        for part in thing.modules() if isinstance(thing, nn.Module) else [thing]:
            hooks = {name: len(value) for name, value in vars(part).items() if "hooks" in name and value is not None}
            found.append((type(part).__name__, sorted(vars(part)), sorted(hooks.items())))
    return found


def the_record(folder: str | Path) -> record.Record:
    from overlap_callbacks.report import record

    (file,) = Path(folder).rglob("overlap.jsonl")
    return record.read(file)


def expect_good(window: Any, collectives: list[tuple[str, int, int, int]], dimension: str | None = "data") -> None:
    """A whole window with these messages and bytes in and out, which is not valid if its sequential steps overlap.

    All in one dimension, unless that is None.
    """
    assert window.complete
    assert window.ranks == (0, 1)
    assert [block.block for block in window.samples[0].timed] == list(range(len(window.samples[0].timed)))
    assert [(c.operator, c.messages, c.bytes_in, c.bytes_out) for c in window.collectives] == collectives
    if dimension is not None:
        assert {c.dimension for c in window.collectives} == {dimension}
    residual = window.residual_overlap
    assert residual is None or residual.value < 0.05 or not window.valid


# 16 x 32 + 32 weights, then 32 x 1 + 1.
NET_BYTES = 4 * (16 * 32 + 32 + 32 + 1)


def accelerate_job(rank: int, accumulate: int = 1, **options: Any) -> tuple[Any, nn.Module, Any, Any]:
    from accelerate import Accelerator

    join(rank)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    data = torch.randn(NUM_STEPS * 4 * accumulate * 2, 16, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), torch.utils.data.DataLoader(data, batch_size=4)
    )
    return accelerator, model, optimizer, loader
