"""Starts the ranks of the demo, shows their progress, and reports their errors."""

from __future__ import annotations

import math
import multiprocessing
import queue as queues
import socket

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.multiprocessing.spawn import start_processes

from overlap_callbacks.cli.demo.config import DemoConfig
from overlap_callbacks.cli.demo.worker import run_rank


def launch(config: DemoConfig, console: Console) -> None:
    """Run the demo to its end.

    Args:
        config: options of the run.
        console: where the progress bar is shown.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its traceback is in the message.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = start_processes(
        run_rank, args=(config, _free_port(), queue), nprocs=config.processes, join=False, start_method="spawn"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=config.steps)
        ended = False
        while not ended:
            ended = processes.join(timeout=0.1)
            while True:
                try:
                    step, loss = queue.get_nowait()
                except queues.Empty:
                    break
                description = f"training, loss {loss:.2f}" if math.isfinite(loss) else None
                progress.update(task, completed=step, description=description)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
