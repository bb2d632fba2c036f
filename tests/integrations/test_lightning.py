from __future__ import annotations

import csv
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks import Mode, OverlapMonitor
from overlap_callbacks.analysis.results.catalogue import every_figure
from overlap_callbacks.report import record
from overlap_callbacks.sinks.base import chosen
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import is_pass_through, kept_logs

pl = pytest.importorskip("lightning.pytorch")

RANKS_LOAD = ("lightning.pytorch",)

# A window of 1 + 8 x 2 + 4 x 2 = 25 steps.
WINDOWS: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 28,
    "first_step": 2,
    "repeats": 2,
    "steps_per_block": 1,
    "profiled_steps": 2,
    "strict": True,
    "max_overhead": None,
}


class Regression(pl.LightningModule):
    """Two layers; batches that differ by rank and index."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        # A collective of its own, which no training step has.
        self.log("val", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TwoOptimizers(Regression):
    """Manual optimization: each optimizer steps once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in (self.net[0], self.net[2])]


def batches(rank: int, count: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    data = torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(rank))
    return torch.utils.data.DataLoader(data, batch_size=None)


def trainer(rank: int, folder: str, *callbacks: Any, strategy: dict[str, Any] | None = None, **options: Any) -> Any:
    import logging
    import warnings

    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": DDPStrategy(process_group_backend="gloo", **(strategy or {})),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **options})


def overlap_callback(**options: Any) -> Any:
    from overlap_callbacks.integrations.lightning import OverlapCallback

    return OverlapCallback(**{**WINDOWS, **options})


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


class Watch(pl.Callback):
    """Records the calls to the monitor by batch, and each step's mode."""

    def __init__(self, callback: Any, force: Mode | None = None) -> None:
        self.callback = callback
        self.force = force
        self.calls: list[tuple[str, int]] = []
        self.modes: list[Mode] = []
        self.first = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        monitor = self.callback.monitor
        if self.force is not None:
            monitor.force(self.force)
        begin, end = monitor.step_begin, monitor.step_end

        def note_begin(step: int) -> None:
            self.calls.append(("begin", step))
            begin(step)
            self.modes.append(monitor.mode)

        def note_end(step: int) -> None:
            self.calls.append(("end", step))
            end(step)

        monitor.step_begin, monitor.step_end = note_begin, note_end

    def on_train_batch_end(self, *_: Any) -> None:
        self.calls.append(("batch", 0))


# -- weights


def _train_in_three_ways(rank: int, folder: str, accumulate: int, hook: bool) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    found: dict[str, Any] = {}
    for way in ("absent", "attached", "forced"):
        callbacks: list[Any] = []
        if way != "absent":
            callback = overlap_callback(run_dir=Path(folder, way))
            callbacks = [callback, Watch(callback, Mode.SEQUENTIAL if way == "forced" else None)]
        module = Regression()
        strategy = {"ddp_comm_hook": fp16_compress_hook} if hook else {}
        fit = trainer(
            rank, folder, *callbacks, strategy=strategy, max_steps=60, accumulate_grad_batches=accumulate, max_epochs=-1
        )
        with kept_logs() as logs:
            fit.fit(module, batches(rank, 60))
        found[way] = digest(module)
        found[f"{way} micro-batches"] = {log.micro_batches for log in logs}
        if callbacks:
            found[f"{way} sequential steps"] = callbacks[1].modes.count(Mode.SEQUENTIAL)
    return found


@pytest.mark.parametrize(
    ("accumulate", "hook"),
    [(1, False), (2, True), *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((2, False), (1, True)))],
)
def test_weights_are_bit_identical_absent_attached_and_forced(tmp_path: Path, accumulate: int, hook: bool) -> None:
    ranks = run_ranks(_train_in_three_ways, 2, str(tmp_path), accumulate, hook, timeout_s=120)
    for found in ranks:
        assert found["absent"] == found["attached"] == found["forced"]
        assert found["attached micro-batches"] == {accumulate}
        # In 60 steps two windows are complete, with 8 timed and 4 profiled sequential steps each, warm-up included.
        assert found["attached sequential steps"] == 2 * (8 + 4)
        assert found["forced sequential steps"] == 59  # all but the recorded one
    assert ranks[0]["absent"] == ranks[1]["absent"]
    run = record.read(tmp_path / "attached")
    assert [window.complete for window in run.windows] == [True, True]
    assert len(run.left_out) == 1  # the third ends with the job, before a step of it counts
    assert [window.valid for window in run.windows] == [True, True]
    assert run.windows[0].ranks == (0, 1)
    assert run.runs[0].framework.startswith("lightning 2")
    assert run.runs[0].configuration["ddp_bucket_cap_bytes"] > 0
    assert run.runs[0].configuration["accumulate_grad_batches"] == accumulate


# -- bounds of steps


def _count_steps(rank: int, folder: str, kind: str) -> list[tuple[str, int]]:
    callback = overlap_callback(run_dir=Path(folder, "run"))
    watch = Watch(callback)
    if kind == "accumulation":
        fit = trainer(rank, folder, callback, watch, accumulate_grad_batches=4, max_epochs=1)
        fit.fit(Regression(), batches(rank, 10))
    elif kind == "two optimizers":
        fit = trainer(rank, folder, callback, watch, max_epochs=1)
        fit.fit(TwoOptimizers(), batches(rank, 3))
        assert fit.global_step == 6  # Lightning counts every optimizer
    return watch.calls


def test_a_step_holds_all_its_micro_batches_and_the_last_one_may_be_short(tmp_path: Path) -> None:
    batch = ("batch", 0)
    for calls in run_ranks(_count_steps, 2, str(tmp_path), "accumulation"):
        assert calls == [
            ("begin", 0), batch, batch, batch, ("end", 0), batch,
            ("begin", 1), batch, batch, batch, ("end", 1), batch,
            ("begin", 2), batch, ("end", 2), batch,
        ]  # fmt: skip


def test_manual_optimization_with_two_optimizers_counts_steps_by_one(tmp_path: Path) -> None:
    for calls in run_ranks(_count_steps, 2, str(tmp_path), "two optimizers"):
        steps = [call for call in calls if call[0] != "batch"]
        assert steps == [(kind, step) for step in range(3) for kind in ("begin", "end")]


# -- what lies between steps


def _validate_meanwhile(rank: int, folder: str, accumulate: int) -> None:
    # From step 4 on, DDP has rebuilt its buckets (which takes three broadcasts, once).
    callback = overlap_callback(run_dir=Path(folder, "run"), first_step=4)
    fit = trainer(
        rank,
        folder,
        callback,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        val_check_interval=5,
        num_sanity_val_steps=2,
        limit_val_batches=2,
    )
    fit.fit(Regression(), batches(rank, 30 * accumulate), batches(rank, 4))


def test_validation_between_steps_leaves_a_window_whole(tmp_path: Path) -> None:
    run_ranks(_validate_meanwhile, 2, str(tmp_path), 1)
    (window,) = record.read(tmp_path / "run").windows
    assert window.complete
    assert window.valid
    assert len(window.samples[0].timed) == 8
    # The one all-reduce of DDP's bucket, and no collective of validation's.
    assert [(row.operator, row.messages) for row in window.collectives] == [("allreduce_", 1)]


def test_validation_within_a_step_costs_that_step_and_nothing_else(tmp_path: Path) -> None:
    run_ranks(_validate_meanwhile, 2, str(tmp_path), 4)  # after every 5th batch, so within steps of 4 batches
    (window,) = record.read(tmp_path / "run").windows
    assert window.complete
    assert 0 < len(window.samples[0].timed) < 8
    # Between batches, of which a step has 4, Lightning broadcasts whether a SIGTERM came.
    assert [(row.operator, row.messages) for row in window.collectives] == [("broadcast_", 3), ("allreduce_", 1)]
    assert not any("left out" in problem for problem in window.problems)


# -- fits


def _fit_twice(rank: int, folder: str) -> None:
    callback = overlap_callback()
    for name in ("one", "two"):
        fit = trainer(rank, str(Path(folder, name)), callback, max_steps=30)
        fit.fit(Regression(), batches(rank, 30))
        assert callback.monitor is None


def test_several_fits_in_a_row_have_a_record_each(tmp_path: Path) -> None:
    run_ranks(_fit_twice, 2, str(tmp_path))
    for name in ("one", "two"):
        (file,) = Path(tmp_path, name).rglob("overlap.jsonl")
        run = record.read(file)
        assert len(run.runs) == 1
        assert run.windows[0].complete


class Boom(Exception):
    pass


class Explode(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 9:
            raise Boom("the user's own")


def _fail_in_a_window(rank: int, folder: str) -> None:
    callback = overlap_callback(run_dir=Path(folder, "run"))
    with pytest.raises(Boom, match="the user's own"):
        trainer(rank, folder, callback, Explode(), max_steps=30).fit(Regression(), batches(rank, 30))
    assert is_pass_through()
    assert callback.monitor is None
    # The process goes on, and may measure again.
    trainer(rank, folder, overlap_callback(run_dir=Path(folder, "again")), max_steps=30).fit(
        Regression(), batches(rank, 30)
    )


def test_an_exception_in_a_window_passes_through_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    run_ranks(_fail_in_a_window, 2, str(tmp_path))
    (window,) = record.read(tmp_path / "run").windows
    assert not window.complete
    assert any("exception in the user's step" in problem for problem in window.problems)
    # Steps 2 to 8 ran: one recorded, then three blocks of two steps each.
    assert [block.mode for block in window.samples[0].timed] == [Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.OVERLAPPED]
    assert record.read(tmp_path / "again").windows[0].complete


def _resume(rank: int, folder: str, make: Callable[[], Any]) -> list[list[tuple[str, int]]]:
    found = []
    for part, steps in enumerate((4, 8)):
        callback = overlap_callback(run_dir=Path(folder, f"run{part}"))
        watch = Watch(callback)
        fit = trainer(rank, folder, callback, watch, max_epochs=part + 1)
        checkpoint = Path(folder, "last.ckpt")
        fit.fit(make(), batches(rank, 4), ckpt_path=checkpoint if part else None)
        fit.save_checkpoint(checkpoint)
        found.append([call for call in watch.calls if call[0] == "begin"])
        assert steps
    return found


@pytest.mark.parametrize("make", [Regression, TwoOptimizers])
def test_a_resumed_fit_goes_on_counting_where_it_was(tmp_path: Path, make: Callable[[], Any]) -> None:
    for first, second in run_ranks(_resume, 2, str(tmp_path), make):
        assert first == [("begin", step) for step in range(4)]
        assert second == [("begin", step) for step in range(4, 8)]


# -- loggers


def _log_to_csv(rank: int, folder: str) -> list[bool]:
    """Whether each report was logged on the training thread."""
    from lightning.pytorch.loggers import CSVLogger

    on_training_thread: list[bool] = []

    class Watched(CSVLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            if any(key.startswith("overlap/") for key in metrics):
                on_training_thread.append(threading.current_thread() is threading.main_thread())
            super().log_metrics(metrics, step)

    logger = Watched(folder, name="csv", flush_logs_every_n_steps=1)
    fit = trainer(rank, folder, overlap_callback(), logger=logger, max_steps=56, log_every_n_steps=1)
    fit.fit(Regression(), batches(rank, 56))
    return on_training_thread


def test_the_trainers_logger_gets_the_metrics_and_the_record_lies_below_the_root_folder(tmp_path: Path) -> None:
    assert run_ranks(_log_to_csv, 2, str(tmp_path)) == [[True, True], []]  # the last report comes as the monitor closes
    (metrics,) = Path(tmp_path, "csv").rglob("metrics.csv")
    with metrics.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("overlap/e2e_sequential_ms")]
    assert [int(row["step"]) for row in rows] == [2, 30]
    (file,) = Path(tmp_path, "overlap_runs").rglob("overlap.jsonl")
    window = record.read(file).windows[0]
    assert window.e2e_sequential_ms is not None
    assert float(rows[0]["overlap/e2e_sequential_ms"]) == pytest.approx(window.e2e_sequential_ms.value)
    own = {key for key in rows[0] if "/" in key}
    assert own == {value.key for value in chosen(window.values(), "short")}
    assert len(own) == 11  # no power on a CPU, and no verdict


def _log_to_wandb(rank: int, folder: str, detail: str) -> None:
    import wandb
    from lightning.pytorch.callbacks import ThroughputMonitor
    from lightning.pytorch.loggers import WandbLogger

    from tests.wandb_reader import SETTINGS

    settings = {name: value for name, value in SETTINGS.items() if name != "mode"}
    logger = WandbLogger(project="test", save_dir=folder, offline=True, settings=wandb.Settings(**settings))
    callback, monitor = overlap_callback(detail=detail), ThroughputMonitor(len, window_size=5)
    fit = trainer(rank, folder, callback, monitor, logger=logger, max_steps=30, log_every_n_steps=1)
    fit.fit(Regression(), batches(rank, 30))
    wandb.finish()


def test_a_wandb_logger_gets_metrics_on_an_axis_of_their_own_and_a_table(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tests.wandb_reader import read_run

    run_ranks(_log_to_wandb, 2, str(tmp_path), "short")
    run = read_run(tmp_path)
    assert not shared_prefixes(run)
    assert len([key for key in run.metrics if key.startswith("overlap/") and len(run.values(key)) == 1]) <= 14
    assert run.values("overlap/step")[0] == 2
    assert len(run.values("overlap/e2e_sequential_ms")) == 1
    assert run.metrics["overlap/e2e_sequential_ms"]["step_metric"] == "overlap/step"
    assert len(run.tables("overlap/kernels")) == 1


def test_all_keys_of_a_wandb_logger_share_no_prefix_with_those_of_the_trainer_either(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tests.wandb_reader import read_run

    run_ranks(_log_to_wandb, 2, str(tmp_path), "all")
    run = read_run(tmp_path)
    assert run.values("overlap/comm_ms")
    assert not shared_prefixes(run)


def shared_prefixes(run: Any) -> set[str]:
    """The parts of keys before a slash that both the library and the trainer's ``ThroughputMonitor`` use."""
    trainers = {key for row in run.history for key in row if key.startswith("train/")}
    assert any("/device/" in key for key in trainers), "the monitor logged nothing"
    sections = {figure.section for figure in every_figure().values()}  # those of a GPU too
    own = sections | {key.partition("/")[0] for key in run.metrics if key.partition("/")[0] not in ("*", "trainer")}
    # Lightning logs the latter below the stage; with Fabric it stands first.
    return own & {part for key in trainers for part in key.split("/")[:-1]}


def _log_to_a_logger_that_fails(rank: int, folder: str) -> tuple[list[str], int]:
    from lightning.pytorch.loggers import CSVLogger

    class Failing(CSVLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            if any(key.startswith("overlap/") for key in metrics):
                raise OSError("no space left")
            super().log_metrics(metrics, step)

    fit = trainer(
        rank, folder, overlap_callback(strict=False), logger=Failing(folder), max_steps=60, log_every_n_steps=1
    )
    with captured_log() as lines:
        fit.fit(Regression(), batches(rank, 60))
    return lines, fit.global_step


def test_a_logger_that_fails_costs_its_rows_and_one_warning_and_not_the_job(tmp_path: Path) -> None:
    (first, steps), (second, _) = run_ranks(_log_to_a_logger_that_fails, 2, str(tmp_path))
    assert steps == 60
    (line,) = first
    assert "no space left" in line
    assert second == []


def _give_one_sink(rank: int, folder: str) -> tuple[list[str], int]:
    from overlap_callbacks import JsonlSink

    callback = overlap_callback(strict=False, sinks=JsonlSink(Path(folder, "own")))
    fit = trainer(rank, folder, callback, max_steps=30)
    with captured_log() as lines:
        fit.fit(Regression(), batches(rank, 30))
    return lines, fit.global_step


def test_one_sink_may_be_given_as_it_is(tmp_path: Path) -> None:
    assert run_ranks(_give_one_sink, 2, str(tmp_path)) == [([], 30)] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_dir": 5}, "run_dir must be the path of a folder"),
        ({"sinks": 5}, "list of Sink"),
        ({"every_n_steps": 10}, "every_n_steps=10 is shorter than a window"),
        ({"every_n_step": 500}, r"\(did you mean every_n_steps\?\)"),
    ],
)
def test_a_wrong_value_raises_where_the_callback_is_made(options: dict[str, Any], said: str) -> None:
    from overlap_callbacks.integrations.lightning import OverlapCallback

    with pytest.raises((TypeError, ValueError), match=said):
        OverlapCallback(**options)


def test_an_unknown_option_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown options \['every'\].*every_n_steps"):
        overlap_callback(every=3)


def test_the_monitors_class_is_the_one_that_the_core_exports() -> None:
    # The adapter and the user's code must see one installation, not two.
    from overlap_callbacks.integrations import base

    assert base.OverlapMonitor is OverlapMonitor
