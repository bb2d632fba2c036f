"""What jobs do besides training: data loader workers, uneven inputs, modes pinned by hand, CUDA graphs."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.campaign.case import case
from tests.campaign.job import Rank, Training

GROUP = "Beside training"
STEPS = 50


@case(
    "loader-workers", GROUP, "data loader workers are forked within windows",
    quick_options={"epochs": 4},
)  # fmt: skip
def fork_workers(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    data = TensorDataset(torch.randn(48, 16, generator=torch.Generator().manual_seed(rank.number)))
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    monitor = rank.attach(training)
    for _ in range(rank.options.get("epochs", 8)):
        for (batch,) in loader:
            training.step(batch=batch)
            rank.note(str(training.num_steps), training.digest())
    monitor.close()


@case(
    "uneven-inputs",
    GROUP,
    "DDP's `join()`: rank 1 has eleven batches fewer",
    bound_s=30.0,
    in_record=True,
    says=r"some ranks ended the window early",
    device_runs=3,
)
def join_uneven(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    with training.model.join():
        rank.train(training, STEPS - 11 * rank.number)
    monitor.close()


@case(
    "toggles", GROUP,
    "`force()` switches the mode 10,000 times; nothing may leak",
    runs=1, limit_s=500.0, bound_s=300.0, options={"toggles": 10_000}, quick_options={"toggles": 100}, record="maybe",
)  # fmt: skip
def toggle(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    num_toggles = rank.options["toggles"]
    store: Any = dist.distributed_c10d._get_default_store()
    monitor = rank.attach(training)
    before: dict[str, int] = {}
    for number in range(num_toggles):
        if number == num_toggles // 5:
            before = _resources(store)
        if rank.library:
            from overlap_callbacks import Mode

            monitor.force(Mode.SEQUENTIAL if number % 2 == 0 else Mode.OVERLAPPED)
        rank.train(training, 2 if number % 2 == 0 else 1)
    after = _resources(store)
    monitor.close()
    print("resources", before, after)
    rank.note("resources", "kept" if _grew_little(before, after) else f"grew:{before}{after}".replace(" ", ""))
    dist.barrier()


def _resources(store: Any) -> dict[str, int]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "memory_kib": pages * 4, "threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": store.num_keys(),
    }  # fmt: skip


def _grew_little(before: dict[str, int], after: dict[str, int]) -> bool:
    more = {name: after[name] - before[name] for name in after}
    # Keys of a check that is under way come and go.
    return more["memory_kib"] < 16_384 and more["threads"] <= 0 and more["descriptors"] <= 0 and more["keys"] <= 8


# Where the parts of it that need no GPU are tested: capture with a stand-in for the device, and the report of a job
# with replayed graphs, whose profile is written by hand on a CPU and real on a GPU.
GRAPHS_WITHOUT_GPU = (
    "tests/gate/test_serialiser.py::test_while_a_graph_is_captured_and_on_another_device_nothing_can_be_serialised",
    "tests/gpu/test_loopback_refusals.py::test_collectives_of_a_replayed_graph_are_counted",
)


def _without_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    return "needs a GPU; its parts are tested on a CPU: " + ", ".join(f"`{name}`" for name in GRAPHS_WITHOUT_GPU)


@case(
    "cuda-graphs", GROUP, "the model's step is replayed from a CUDA graph",
    needs=_without_gpu, may_be_silent=True, says=r"", device_runs=3,
)  # fmt: skip
def replay(rank: Rank) -> None:
    rank.start()
    device = torch.device("cuda", rank.number % torch.cuda.device_count())
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, device=device)
    training = Training(rank.number)  # the optimizer that is attached; its model trains beside the graph
    batch = torch.ones(8, 16, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(batch).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(batch).square().mean().backward()
    monitor = rank.attach(training)
    for _ in range(STEPS):
        graph.replay()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        rank.train(training, 1)
    rank.note("graph", str(float(sum(parameter.grad.sum() for parameter in model.parameters()))))
    monitor.close()
