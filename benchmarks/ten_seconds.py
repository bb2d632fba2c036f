"""Pictures for readers: five screens of five runs of the demo, each run for real, on two ranks without a GPU.

python benchmarks/ten_seconds.py FOLDER

Somebody who has not seen them looks at five for ten seconds each, no screen and no run twice, and writes down the
number, how sure it is, and what to do next. ``docs/pictures/readers`` has those that were shown.
"""

from __future__ import annotations

import html
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from click.testing import CliRunner
from rich.console import Console

from overlap_callbacks.analysis.headline import run_verdict, summary
from overlap_callbacks.cli import main as overlap
from overlap_callbacks.cli.demo import worker
from overlap_callbacks.cli.demo.command import train
from overlap_callbacks.cli.demo.worker import DemoConfig
from overlap_callbacks.experiments.supervisor import rank_variables, supervise
from overlap_callbacks.report import record, write_page
from overlap_callbacks.sinks.wandb.cards import SoFar, step_card
from overlap_callbacks.sinks.wandb.sink import run_metrics

# Each run, and the folder of its record.
RUNS = {
    "gain": "bucket-1mb", "nothing": "one-bucket", "inconclusive": "small-model", "invalid": "second-thread",
    "several": "bucket-4mb",
}  # fmt: skip
WIDTH_PX = 1000
_STYLE = "body{margin:14px;font:14px system-ui;background:#fff;color:#222}td,th{text-align:left;padding:2px 16px 2px 0}"


def main() -> None:
    """Train where there is no record yet, and make the pictures of all runs."""
    if sys.argv[1] == "--rank":
        return disturbed(sys.argv[2])
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    demo = DemoConfig(run_dir="")
    jobs = {
        "gain": demo,
        "nothing": replace(demo, bucket_mb=25.0, steps=300),  # one bucket, which ends the backward pass
        "inconclusive": replace(demo, hidden=64, steps=110),
        "invalid": replace(demo, steps=210),
        "several": replace(demo, bucket_mb=4.0, steps=300),
    }
    for name, job in jobs.items():
        run = Path(RUNS[name])
        if not run.exists():
            (train_disturbed if name == "invalid" else train)(replace(job, run_dir=str(run)))
    for name, run in RUNS.items():
        runs = [Path(RUNS["gain"]), Path(run)] if name == "several" else [Path(run)]
        for screen, make in SCREENS.items():
            page = Path(f"{name}-{screen}.html")
            page.write_text(make(runs))
            picture = page.with_suffix(".png")
            height = 1000 if screen == "page" else 640
            size = (f"--window-size={WIDTH_PX},{height}", f"--screenshot={picture}", page.resolve().as_uri())
            subprocess.run(
                ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000", *size],
                check=True, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            print(picture)


# -- the job whose sequential steps are not sequential


def train_disturbed(config: DemoConfig) -> None:
    """Train the demo in ranks that communicate on a second thread, which the library leaves alone."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", msgspec.json.encode(config).decode()]
    outcome = supervise(command, environment=os.environ, ranks=rank_variables(config.processes), stdout=2)
    assert not outcome.exit_code, "a rank failed"


def disturbed(config: str) -> None:
    """One rank of it."""
    ended = threading.Event()

    def share_statistics() -> None:
        while not dist.is_initialized():
            time.sleep(0.01)
        group, statistics = dist.new_group(), torch.zeros(500_000)
        while not statistics[0]:
            statistics[0] = float(ended.is_set())
            dist.all_reduce(statistics, group=group)

    thread = threading.Thread(target=share_statistics)
    thread.start()
    destroy = dist.destroy_process_group

    def end() -> None:
        ended.set()
        thread.join()
        destroy()

    with mock.patch.object(dist, "destroy_process_group", end):
        worker.main(config)


# -- screens


def terminal(*arguments: str) -> str:
    """What a command prints, as a page."""
    result = CliRunner().invoke(overlap, arguments, env={"COLUMNS": "100"})
    return as_page(f"$ overlap {' '.join(arguments)}\n{result.output}")


def as_page(text: str) -> str:
    """Text as a terminal shows it."""
    console = Console(record=True, width=100, file=io.StringIO(), soft_wrap=False)
    console.print(text, highlight=False, markup=False)
    return console.export_html(inline_styles=True)


def log_lines(runs: Sequence[Path]) -> str:
    """The lines of the last windows."""
    whole = [[window for window in record.read(run).windows if window.complete] for run in runs]
    lines = [summary(window) for windows in whole for window in windows[-2 if len(runs) == 1 else -1 :]]
    return as_page("\n".join([f"12:00:{10 + 20 * place} INFO {line}" for place, line in enumerate(lines)]))


def page(runs: Sequence[Path]) -> str:
    """The page of the runs."""
    file = runs[-1] / "report.html"
    write_page([record.read(run) for run in runs], file)
    return file.read_text()


def wandb(runs: Sequence[Path]) -> str:
    """The card in W&B, and a run's summary; of several runs, W&B's table of runs."""
    records = [record.read(run) for run in runs]
    values = {run.name: {"overlap/verdict": run_verdict(one.summary), **run_metrics(one.summary, "short")}
              for run, one in zip(runs, records, strict=True)}  # fmt: skip
    keys = dict.fromkeys([key for each in values.values() for key in each])
    rows = [("", *values)] + [(key, *[shown(each.get(key, "")) for each in values.values()]) for key in keys]
    table = "".join(["<tr>" + "".join([f"<td>{html.escape(cell)}</td>" for cell in row]) + "</tr>" for row in rows])
    summary_table = f"<style>{_STYLE}</style><table>{table}</table>"
    if len(runs) > 1:
        return summary_table
    (one,) = records
    return step_card(one.windows[-1], SoFar.of(one.summary)) + "<hr><h1>Summary</h1>" + summary_table


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


SCREENS: dict[str, Callable[[Sequence[Path]], str]] = {
    "terminal": lambda runs: terminal("show", *map(str, runs)),
    "page": page,
    "wandb": wandb,
    "log": log_lines,
    "check": lambda runs: terminal("check", str(runs[-1]), "--max-exposed", "0.1"),
}

if __name__ == "__main__":
    main()
