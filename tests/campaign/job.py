"""What a rank of the campaign does: it trains, notes its weights after each step, and is measured or not.

Nothing here imports the library at the top: the reference runs without it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

# Windows of nine steps: one recorded step, the blocks O S S O, and two profiled steps of each mode.
MEASURED = {
    "spread": False,
    "every_n_steps": 16, "first_step": 2, "repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 2,
    "max_overhead": None, "order_timeout_s": 2.0, "report_timeout_s": 6.0,
}  # fmt: skip
# NCCL's watchdog ends a job whose collective takes longer.
BACKEND, GROUP_TIMEOUT_S = ("nccl", 10) if ON_SIMULATED_GPU else ("gloo", 30)
RUN_FOLDER = "run"


def device_of(rank: int) -> torch.device:
    """The device that a rank trains on."""
    return torch.device("cuda", rank) if ON_SIMULATED_GPU else torch.device("cpu")


class Rank:
    """One rank of a job.

    Args:
        folder: of the job; each rank writes its own files there.
        library: whether it is measured.
        seed: of what the case chooses by chance, alike on all ranks.
        options: of the case.
    """

    def __init__(self, folder: str, library: bool, seed: int, options: dict[str, Any]) -> None:
        self.number = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.folder = Path(folder)
        self.library = library
        self.random = random.Random(seed)
        self.options = options
        self._steps = os.open(self.folder / f"steps-{self.number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def start(self, store: dist.Store | None = None) -> None:
        """Make the process group."""
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        if ON_SIMULATED_GPU:
            torch.cuda.set_device(device_of(self.number))
        if store is None:
            dist.init_process_group(BACKEND, timeout=timeout)
        else:
            dist.init_process_group(BACKEND, store=store, rank=self.number, world_size=self.world_size, timeout=timeout)

    def attach(self, training: Training, *, same_log: bool = True, **options: Any) -> Any:
        """The user's line; something that does nothing where the job is not measured."""
        if not self.library:
            return Unmeasured()
        from overlap_callbacks.integrations.pytorch import attach

        if same_log:
            self.keep_log()
        if "sinks" not in options:
            options.setdefault("run_dir", str(self.folder / RUN_FOLDER))
        return attach(training.optimizer, **{**MEASURED, **options})

    def keep_log(self) -> None:
        """Write what the library says to a file of this rank."""
        logger = logging.getLogger("overlap_callbacks")
        logger.setLevel(logging.INFO)
        if not any(isinstance(handler, Kept) for handler in logger.handlers):
            logger.addHandler(Kept(self.folder / f"log-{self.number}"))

    def note(self, key: str, weights: str) -> None:
        """Note what the weights were; on the disk at once."""
        os.write(self._steps, f"{self.attempt}.{key} {weights}\n".encode())

    def train(self, training: Training, num_steps: int, within: dict[int, Callable[[], object]] | None = None) -> None:
        """Train some steps.

        Args:
            training: the model.
            num_steps: to train.
            within: what to do between the forward and the backward pass of a step, by its number from 0.
        """
        for step in range(num_steps):
            training.step((within or {}).get(step))
            self.note(str(training.num_steps), training.digest())

    def some_step(self, first: int = 3, last: int = 34) -> int:
        """A step of the first two windows or between them, by chance."""
        return self.random.randint(first, last)


class Kept(logging.Handler):
    """Writes each message to a file that is open from the start."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, record: logging.LogRecord) -> None:
        line = json.dumps([record.levelname, record.getMessage()])
        os.write(self._file, line.encode() + b"\n")


class Unmeasured:
    """Takes the monitor's place, and does nothing."""

    active = False

    def close(self) -> None:
        pass

    def force(self, mode: str | None) -> None:
        pass

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        yield


class Training:
    """A model that trains in some milliseconds a step, with several buckets of gradients.

    Args:
        rank: seeds the data.
        extra: communication of the user's own, in each step; gets the number of the step.
        width: of its layers.
    """

    def __init__(self, rank: int, extra: Callable[[int], object] | None = None, width: int = 32) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        layers = [torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        self._device = device_of(rank)
        self.model = DistributedDataParallel(net.to(self._device), bucket_cap_mb=0.002)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.num_steps = 0
        self._data = torch.Generator().manual_seed(100 + rank)
        self._extra = extra

    def step(self, within: Callable[[], object] | None = None, batch: torch.Tensor | None = None) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        batch = torch.randn(8, 16, generator=self._data) if batch is None else batch
        loss = self.model(batch.to(self._device)).square().mean()
        if within is not None:
            within()
        if self._extra is not None:
            self._extra(self.num_steps)
        loss.backward()
        self.optimizer.step()
        self.num_steps += 1

    def digest(self) -> str:
        """Equal for bit-identical weights."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().cpu().numpy().tobytes())
        return found.hexdigest()[:16]


def run_rank(module: str, function: str, folder: str, library: bool, seed: int, options: dict[str, Any]) -> None:
    """Run a case's function in this process."""
    kept.append(rank := Rank(folder, library, seed, options))
    getattr(importlib.import_module(module), function)(rank)


def serve_store(port: int) -> None:
    """Serve the job's store until killed, as the agent of ``torchrun`` does."""
    kept.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    while True:
        time.sleep(3600)


def show_record(path: str) -> None:
    """``overlap show``, in this process."""
    from overlap_callbacks.cli import main

    main(["show", path, "--all"])


kept: list[object] = []  # as the variables of a script's top level are: alive until the interpreter ends
