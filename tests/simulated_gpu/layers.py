"""Jobs in which a layer's collective or a rank is slow, and what the library names first.

``benchmarks/layers.py`` runs many, ``test_layers.py`` one of each.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.report import record
from overlap_callbacks.report.views.sections import exposure_of, ideal
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.parameters import Parameters

LAYERS, WIDTH, HEADS, WORDS, LENGTH, ROWS = 12, 64, 4, 1024, 16, 2
# About a layer's parameters: each has its own bucket.
BUCKET = 11 * WIDTH**2
# What slows steps by less is hidden, and holds nothing up.
LEAST_LONGER, MOST_DRAWS = 0.1, 50
# Hosts' times are real. A device that is idle for a larger share of its steps waits for a host that is late, on a busy
# machine: neither what was drawn nor its length is known then.
MOST_IDLE = 0.1
# How many times slower the device is. Megatron and DeepSpeed ask it for a number in each step, so that their steps wait
# for the host, whose times are real: what is drawn must be longer than a busy host is late.
FRAMEWORKS = {"FSDP2": 1, "DDP": 1, "Megatron": 3, "ZeRO-3": 3}
KERNEL_US, COLLECTIVE_US, LINK_GBS, EXTRA_MS = 200, 600, 0.15, (10, 80)
WINDOW: dict[str, Any] = {
    "every_n_steps": 1000, "repeats": 1, "profiled_steps": 2, "warmup_steps": 0,
    "steps_per_block": 1, "spread": False, "max_overhead": None,
}  # fmt: skip
WARM_UP, FIRST_STEP, MORE_STEPS = 12, 2, 3


class Block(nn.Module):
    """A layer, whose MLP is a little wider in each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        wide = 4 * WIDTH + 2 * number
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, -1).transpose(1, 2)
            for part in self.mix(functional.layer_norm(x, (WIDTH,))).split(WIDTH, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(functional.gelu(self.wide(functional.layer_norm(x, (WIDTH,)))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(number) for number in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Held:
    """A collective that a layer needs.

    Attributes:
        layer: its number.
        kernel: in its kernel's name.
        num_bytes: of the whole tensor; no other collective of the step has as many.
        collective: its kind, as the library has it.
        first, last: parameters in it, by their names.
    """

    layer: int
    kernel: str
    num_bytes: int
    collective: str
    first: str
    last: str


def _held(layer: int, kernel: str, num_bytes: int, names: Sequence[str]) -> Held:
    kinds = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce"}
    return Held(layer, kernel, num_bytes, kinds[kernel], names[0], names[-1])


def _numbers(parameters: Sequence[Any]) -> int:
    return sum([parameter.numel() for parameter in parameters])


class Fsdp2(jobs.TorchJob):
    def __init__(self, rank: int, device: torch.device) -> None:
        model = Gpt().to(device)
        mesh = init_device_mesh("cuda", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(rank, device, model)
        self._data = _words(rank, device)

    def held(self, layer: int, draw: random.Random) -> Held:
        own = dict(self.model.layers[layer].named_parameters())  # type: ignore[index,union-attr]
        num_bytes = 4 * _numbers(list(own.values()))
        return _held(layer, draw.choice(("AllGather", "ReduceScatter")), num_bytes, [f"layers.{layer}"])


class Ddp(jobs.TorchJob):
    def __init__(self, rank: int, device: torch.device) -> None:
        model = DistributedDataParallel(
            Gpt().to(device), bucket_cap_mb=4 * BUCKET / 2**20, gradient_as_bucket_view=True
        )
        super().__init__(rank, device, model)
        self._data = _words(rank, device)
        self._sizes: dict[int, tuple[int, list[str]]] = {}

    def update(self) -> None:
        """Gradients are views of their buckets."""
        self.optimizer.step()
        of_buckets: dict[int, list[str]] = {}
        storages = {name: p.grad.untyped_storage() for name, p in self.model.module.named_parameters()}  # type: ignore[union-attr]
        for name, storage in storages.items():
            of_buckets.setdefault(storage.data_ptr(), []).append(name)
        for layer in range(LAYERS):
            storage = storages[f"layers.{layer}.wide.weight"]
            self._sizes[layer] = storage.nbytes(), of_buckets[storage.data_ptr()]
        self.optimizer.zero_grad()

    def held(self, layer: int, draw: random.Random) -> Held:
        del draw
        num_bytes, names = self._sizes[layer]
        return _held(layer, "AllReduce", num_bytes, names)


class Zero3(jobs._DeepSpeed):
    def __init__(self, rank: int, device: torch.device) -> None:
        def made() -> nn.Module:
            from deepspeed.utils import set_z3_leaf_modules

            model = Gpt()
            set_z3_leaf_modules(model, [Block])
            return model

        with mock.patch.multiple(jobs, _layers=made, WIDTH=WIDTH, BATCH=ROWS, BUCKET_NUMBERS=BUCKET):
            super().__init__(rank, device, 3)
        self._data = _words(rank, device)
        self._gathers: list[list[Any]] = []

    def held(self, layer: int, draw: random.Random) -> Held:
        """The longest of the gathers of a step that are of this layer alone."""
        del draw
        self._gathers = self._gathers or self._of_a_step()
        own = {parameter: name for name, parameter in self.model.layers[layer].named_parameters()}  # type: ignore[index,union-attr]
        of_layer = [gather for gather in self._gathers if all(parameter in own for parameter in gather)]
        num_bytes, gather = max([(_gathered_bytes(gather), gather) for gather in of_layer], key=lambda one: one[0])
        return _held(layer, "AllGather", num_bytes, [f"layers.{layer}.{own[parameter]}" for parameter in gather])

    def _of_a_step(self) -> list[list[Any]]:
        """The parameters of each gather of a step, as DeepSpeed is asked for them: it gathers them by number."""
        found = []
        with contextlib.ExitStack() as stack:
            for parameter in self.model.parameters():
                gather = parameter.all_gather_coalesced  # type: ignore[attr-defined]

                def noted(parameters: Any, *args: Any, gather: Any = gather, **options: Any) -> Any:
                    found.append(sorted(parameters, key=lambda one: one.ds_id))
                    return gather(parameters, *args, **options)

                stack.enter_context(mock.patch.object(parameter, "all_gather_coalesced", noted))
            _step(self)
        return found


def _gathered_bytes(parameters: Sequence[Any]) -> int:
    return int(2 * 4 * sum([parameter.ds_tensor.numel() for parameter in parameters]))


class Megatron(jobs._Megatron):
    def __init__(self, rank: int, device: torch.device) -> None:
        torch.compiler.set_stance("force_eager")
        from megatron.core.models.gpt import gpt_model
        from megatron.core.transformer.mlp import MLP

        class Varied(gpt_model.GPTModel):  # type: ignore[misc]
            def __init__(self, config: Any, spec: Any, **options: Any) -> None:
                super().__init__(config, spec, **options)
                for number, layer in enumerate(self.decoder.layers):
                    own = copy.copy(config)
                    own.ffn_hidden_size += 2 * number
                    layer.mlp = MLP(own, spec.submodules.mlp.submodules, ffn_hidden_size=own.ffn_hidden_size)

        sizes = {"HIDDEN": WIDTH, "SEQUENCE": LENGTH, "SAMPLES": ROWS, "VOCABULARY": WORDS, "BLOCKS": LAYERS}
        with (
            mock.patch.object(gpt_model, "GPTModel", Varied),
            mock.patch.multiple(jobs, MEGATRON_BUCKET=BUCKET, **sizes),
        ):
            super().__init__(rank, device)
        self._names = {id(p): name for name, p in self.chunk.module.named_parameters()}

    def forward_backward(self) -> None:
        with mock.patch.multiple(jobs, SEQUENCE=LENGTH, SAMPLES=ROWS):
            super().forward_backward()

    def held(self, layer: int, draw: random.Random) -> Held:
        parameter = self.chunk.module.decoder.layers[layer].mlp.linear_fc1.weight
        (buffer,) = self.chunk.buffers
        bucket = buffer.param_to_bucket[parameter]
        names = [self._names[id(one)] for one in bucket.params_list]
        return _held(layer, draw.choice(("AllGather", "ReduceScatter")), 4 * bucket.grad_data.numel(), names)


def _words(rank: int, device: torch.device) -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank)).to(device)


MAKERS: dict[str, Callable[[int, torch.device], Any]] = {
    "FSDP2": Fsdp2, "DDP": Ddp, "Megatron": Megatron, "ZeRO-3": Zero3,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """What is slow in a run: a collective by ``extra_us``, or the compute of a rank.

    Attributes:
        longer: the step, as a share of the job's own.
    """

    held: Held | None
    rank: int
    extra_us: float
    longer: float = 0.0


def _train(rank: int, parameters: Parameters, kind: str, numbers: Sequence[int], slow: str, folder: str) -> list[Drawn]:
    torch.set_num_threads(1)
    found = []
    with on_device(rank, parameters) as device:
        torch.manual_seed(0)
        job = MAKERS[kind](rank, device)
        with contextlib.closing(job):
            for _ in range(WARM_UP):
                _step(job)
            for number in numbers:
                draw = random.Random(f"{kind} {slow} {number}")
                one = _drawn(job, kind, draw, slow, rank)
                found.append(one)
                with (
                    _slowed(one, job, kind, rank),
                    job.attach(
                        run_dir=f"{folder}/{number}", strict=True, first_step=_next_step(job) + FIRST_STEP, **WINDOW
                    ) as monitor,
                ):
                    for _ in range(FIRST_STEP + monitor.schedule.window_steps + MORE_STEPS):
                        _step(job)
    return found


def _next_step(job: Any) -> int:
    """The number that the adapter gives the next step: DeepSpeed's engine goes on counting."""
    return int(job.engine.global_steps) if isinstance(job, Zero3) else 0


def _drawn(job: Any, kind: str, draw: random.Random, slow: str, rank: int) -> Drawn:
    for _ in range(MOST_DRAWS):
        own_ms = _step_ms(job, 5)  # anew: where the host is late, it is so for a while
        held = job.held(draw.randrange(LAYERS), draw) if slow == "layer" else None
        one = Drawn(held, draw.randrange(2), FRAMEWORKS[kind] * 1e3 * draw.uniform(*EXTRA_MS))
        with _slowed(one, job, kind, rank):
            _step(job)
            longer = _step_ms(job, 3) / own_ms - 1
        if longer >= LEAST_LONGER:
            return replace(one, longer=longer)
    raise RuntimeError(f"none of {MOST_DRAWS} draws made a step longer: was the device built from these sources?")


def _step(job: Any) -> None:
    job.forward_backward()
    job.update()


def _step_ms(job: Any, steps: int) -> float:
    """The median of some steps, the same on both ranks."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        _step(job)
        mark.record()
    torch.cuda.synchronize()
    found = torch.tensor(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)), device="cuda")
    dist.broadcast(found, 0)
    return float(found)


@contextlib.contextmanager
def _slowed(one: Drawn, job: Any, kind: str, rank: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if one.held is not None:
            told = f"{one.held.kernel}:{one.held.num_bytes}:{one.extra_us}"
            stack.enter_context(mock.patch.dict(os.environ, SIMGPU_SLOW_COLLECTIVE=told))
        elif rank == one.rank:
            few = torch.zeros(8, device="cuda")

            def more(*_: Any) -> None:
                for _ in range(round(one.extra_us / LAYERS / (FRAMEWORKS[kind] * KERNEL_US))):
                    few.add_(1)

            for layer in job.model.modules():
                if isinstance(layer, Block) or type(layer).__name__ == "TransformerLayer":
                    stack.callback(layer.register_forward_hook(more).remove)
        yield


def run(kind: str, numbers: Sequence[int], slow: str, folder: Path) -> list[dict[str, Any]]:
    """What is slow in each run, and what the library names first. Not what is slow, if it was ``host_bound``.

    Args:
        kind: of ``FRAMEWORKS``.
        numbers: of the runs.
        slow: ``layer`` or ``rank``.
        folder: for records.
    """
    slower = FRAMEWORKS[kind]
    told = Parameters(
        stall_s=30,
        kernel_us=slower * KERNEL_US,
        collective_us=slower * COLLECTIVE_US,
        link_gbs=LINK_GBS / slower,
        most_data_bytes=100_000,
    )
    of_rank, _ = run_ranks(_train, 2, told, kind, list(numbers), slow, str(folder), backend="", timeout_s=3600)
    return [_judged(one, folder / str(number)) for number, one in zip(numbers, of_rank, strict=True)]


def _judged(one: Drawn, folder: Path) -> dict[str, Any]:
    found = record.read(folder)
    (section,), exposed, bound = ideal(found), exposure_of(found), found.bottleneck()
    assert exposed is not None, found.windows
    assert bound is not None
    idle = found.windows[-1].spread["idle_ms"].high / bound.parts.total_ms
    first, rank = exposed.found.names[0], bound.late_rank(exposed.found)
    if one.held is not None:
        said = rank is None and _is(first, one.held) and f"First by name is the {first.collective}".replace("_", "-")
        right = bool(said) and str(said) in section.answer.replace("\u2011", "-")
    else:
        right = (
            rank == one.rank and f"waiting for rank {one.rank}" in section.answer and "by name" not in section.answer
        )
    return {
        "slow": f"rank {one.rank}" if one.held is None else f"layer {one.held.layer}, {one.held.collective}",
        "extra_ms": round(one.extra_us / 1e3, 1),
        "longer": round(one.longer, 2),
        "first": f"rank {rank}" if rank is not None else f"{first.name}, {first.collective}",
        "idle": round(idle, 3),
        "host_bound": idle > MOST_IDLE,
        "right": right,
    }


def _is(row: Any, held: Held) -> bool:
    """Whether a row by name is of this collective, and named by its parameters."""
    text = row.name.partition(": ")[2] or row.name
    ways = [" … ".join(dict.fromkeys(names)) for names in ((held.first, held.last), (held.last, held.first))]
    named = any(way.startswith(text) for way in ways)  # a long one is cut
    return named and (row.collective, row.most_bytes) == (held.collective, held.num_bytes)
