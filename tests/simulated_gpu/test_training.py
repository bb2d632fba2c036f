"""Training on the simulated device where kernels compute: the same bits in every run, near to the CPU's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import Mode
from overlap_callbacks.analysis.causal import row_of
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.simulated_gpu.jobs import on_device, pinning
from tests.simulated_gpu.parameters import Parameters

WIDTH, HEADS, ROWS, WORDS, LENGTH = 32, 2, 4, 24, 8
STEPS, STEPS_WITH_WINDOW = 10, 68
WINDOW: dict[str, Any] = {
    "first_step": 3,
    "every_n_steps": 1000,
    "repeats": 2,
    "advanced": {"spread": False},
    "max_overhead": None,
}
# Kernels take long enough that streams run beside each other, however late the host is.
TIMES: dict[str, Any] = {"kernel_us": 300, "collective_us": 400, "link_gbs": 0.05}


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.mix(self.before(x)).split(WIDTH, dim=-1)
        query, key, value = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in parts)
        scores = (query @ key.transpose(-2, -1) / 4.0).masked_fill(_future(length, x.device), float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.after(x))))  # type: ignore[no-any-return]


def _future(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length).triu(1).bool().to(device)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(LENGTH).to(words.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, WORDS))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "gpt": Gpt}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def _batch(model: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    if model == "mlp":
        return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, WORDS, (ROWS,), generator=generator)
    words = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:].flatten()


def _made(model: str, optimizer: str, wrap: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = MODELS[model]().to(device)
    if wrap == "ddp":
        made = DistributedDataParallel(made, bucket_cap_mb=0.01)
    elif wrap == "fsdp2":
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        parts = made.blocks if isinstance(made, Gpt) else [part for part in made if isinstance(part, nn.Linear)]
        for part in parts:
            fully_shard(part, mesh=mesh)
        fully_shard(made, mesh=mesh)
    return made, OPTIMIZERS[optimizer](made.parameters())


def _weights(model: nn.Module) -> dict[str, list[float]]:
    """Of this rank, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found[name.removeprefix("module.")] = own.detach().cpu().flatten().tolist()
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


Numbers = tuple[list[float], dict[str, list[float]], int]
Look = Callable[[Any, nn.Module, str], contextlib.AbstractContextManager[Callable[[int], Mode]]]


def _trained(
    rank: int, model: str, optimizer: str, wrap: str, device: torch.device, look: Look, steps: int, run_dir: str
) -> Numbers:
    """Losses and weights after some steps, and how many of them were sequential."""
    made, stepper = _made(model, optimizer, wrap, device)
    losses, modes = [], []
    with look(stepper, made, run_dir) as change:
        for number in range(steps):
            modes.append(change(number))
            batch = tuple(one.to(device) for one in _batch(model, rank, number))
            losses.append(_step(made, stepper, batch))
    return [float(loss) for loss in losses], _weights(made), modes.count(Mode.SEQUENTIAL)


@contextlib.contextmanager
def _leave(*_: Any) -> Iterator[Callable[[int], Mode]]:
    yield lambda number: Mode.OVERLAPPED


def _attach(modes: Callable[[int], Mode | None], **options: Any) -> Look:
    """Attach, and pin modes by the number of the step."""

    @contextlib.contextmanager
    def look(optimizer: Any, model: nn.Module, run_dir: str) -> Iterator[Callable[[int], Mode]]:
        from overlap_callbacks.integrations.pytorch import attach

        with attach(optimizer, model=model, run_dir=run_dir, strict=True, **{**WINDOW, **options}) as monitor:
            yield pinning(monitor, modes)

    return look


LOOKS: dict[str, Look] = {
    "absent": _leave,
    "attached": _attach(lambda number: None),
    "toggling": _attach(lambda number: Mode.SEQUENTIAL if number % 2 else Mode.OVERLAPPED),
    "forced": _attach(lambda number: Mode.SEQUENTIAL),
    "native": _attach(lambda number: None, sequential="native"),
    "native forced": _attach(lambda number: Mode.SEQUENTIAL, sequential="native"),
    "causal": _attach(lambda number: None, causal=True, every_n_steps=32, repeats=1, profiled_steps=2),
}

# Units and buckets that issue collectives; autograd's threads have no Python frame of DDP's.
NAMES = {
    ("ddp", "mlp"): {"bucket 0", "bucket 1"},
    ("ddp", "gpt"): {f"bucket {number}" for number in range(7)},
    ("fsdp2", "mlp"): {"0", "2", "4"},
    ("fsdp2", "gpt"): {"blocks.0", "blocks.1", "root"},
}

# How many steps of a look are sequential, at least.
SEQUENTIAL = {"absent": 0, "attached": 4, "toggling": 10, "forced": 20, "native": 4, "native forced": 20, "causal": 4}


def _on_device(
    rank: int,
    parameters: Parameters,
    model: str,
    optimizer: str,
    wrap: str,
    looks: list[str],
    steps: int,
    run_dir: str,
) -> list[Numbers]:
    torch.set_num_threads(1)
    with on_device(rank, parameters) as device:
        return [
            _trained(rank, model, optimizer, wrap, device, LOOKS[look], steps, f"{run_dir}/{number}-{look}")
            for number, look in enumerate(looks)
        ]


def _on_cpu(model: str, optimizer: str, ranks: int) -> tuple[list[float], dict[str, list[float]]]:
    """The same on the CPU: each step on the batches of all ranks, with the mean of their gradients."""
    made, stepper = _made(model, optimizer, "", torch.device("cpu"))
    losses = []
    for number in range(STEPS):
        of_ranks = []
        for rank in range(ranks):
            words, target = _batch(model, rank, number)
            loss = F.cross_entropy(made(words).flatten(0, -2), target)
            (loss / ranks).backward()
            of_ranks.append(loss.detach())
        stepper.step()
        stepper.zero_grad()
        losses.append(float(of_ranks[0]))
    return losses, _weights(made)


def _run(
    ranks: int, model: str, optimizer: str, wrap: str, looks: list[str], folder: Path, steps: int = STEPS
) -> list[list[Numbers]]:
    told = Parameters(computes=True, stall_s=30, **TIMES)
    return run_ranks(
        _on_device, ranks, told, model, optimizer, wrap, looks, steps, str(folder), backend="", timeout_s=150
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("model", "optimizer"), [("mlp", "sgd"), ("mlp", "fused"), ("mlp", "fused sgd"), ("gpt", "adamw")]
)
def test_training_is_the_same_in_every_run_and_near_to_the_cpu(
    ranks: int, model: str, optimizer: str, tmp_path: Path
) -> None:
    found = _run(ranks, model, optimizer, "ddp", ["absent", "absent"], tmp_path)
    for first, again in found:
        assert first == again
    assert [one[0][1] for one in found] == [found[0][0][1]] * ranks
    losses, weights = _on_cpu(model, optimizer, ranks)
    assert found[0][0][0] == pytest.approx(losses, rel=1e-6)
    for name, theirs in weights.items():
        compared = range(len(theirs))
        if name.endswith("mix.bias"):
            # A bias of keys shifts all scores of a query by the same number: its gradient is zero but for rounding,
            # which Adam scales up. Those of queries and values are compared.
            compared = [*range(WIDTH), *range(2 * WIDTH, 3 * WIDTH)]
        own = found[0][0][1][name]
        assert [own[i] for i in compared] == pytest.approx([theirs[i] for i in compared], rel=1e-4, abs=1e-5), name
    assert losses[-1] != losses[0]


@pytest.mark.parametrize(
    ("wrap", "model", "optimizer"),
    [
        ("ddp", "mlp", "sgd"),
        ("fsdp2", "mlp", "sgd"),
        pytest.param("ddp", "gpt", "adamw", marks=pytest.mark.nightly),
        pytest.param("fsdp2", "gpt", "adamw", marks=pytest.mark.nightly),
    ],
)
def test_measuring_changes_no_bit_and_finds_names(wrap: str, model: str, optimizer: str, tmp_path: Path) -> None:
    for of_rank in _run(2, model, optimizer, wrap, list(LOOKS), tmp_path, STEPS_WITH_WINDOW):
        for look, numbers in zip(LOOKS, of_rank, strict=True):
            assert numbers[:2] == of_rank[0][:2], look
            assert numbers[2] >= SEQUENTIAL[look], look
    for number, look in enumerate(LOOKS):
        if look in ("attached", "native"):
            (window,) = record.read(tmp_path / f"{number}-{look}").windows
            assert window.e2e_sequential_ms is not None, window.problems
            assert window.exposure is not None
            names = {row.name.partition(":")[0] for row in window.exposure.names}
            assert names == NAMES[wrap, model], (look, names)
        if look == "causal":
            (delayed,) = record.read(tmp_path / f"{number}-{look}").causal
            assert delayed.missed == 0
            assert delayed.delayed.delay_ms > 0
            members = {row_of(member)[1].partition(":")[0] for member in delayed.delayed.members}
            assert {row.name.partition(":")[0] for row in delayed.names} == members
            assert all(row.path_ms is not None for row in delayed.names)
