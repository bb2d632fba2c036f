"""Pieces of the tests of Megatron-core on two ranks. They share their processes: loading Megatron takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode, OverlapReport, Sink
from overlap_callbacks.integrations import _megatron_reports, megatron
from overlap_callbacks.integrations.megatron import attach, hook_pretrain
from overlap_callbacks.report import record
from tests.distributed import captured_log
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import (
    BATCH,
    LOADS,
    NATIVE_TWO_RANKS,
    NUM_STEPS,
    SEQUENCE,
    TOGGLING,
    TWO_RANKS,
    Job,
    Setup,
    job,
    train_absent,
    train_attached,
)
from tests.monitor.jobs import dispatch_table
from tests.monitor.test_keys_left import keys_of
from tests.wandb_reader import SETTINGS

RANKS_LOAD = LOADS


def run_parts(rank: int, folder: str) -> dict[str, tuple[Any, str]]:
    megatron_shims.install()
    found: dict[str, tuple[Any, str]] = {}
    for name, part in PARTS.items():
        try:
            found[name] = (part(folder), "")
        except BaseException:
            found[name] = (None, traceback.format_exc())
    return found


def _flush(folder: str) -> tuple[bool, dict[str, Any]]:
    # Stages then wait for what they post last in another order than their neighbours post it; in a sequential step
    # they wait batch by batch.
    setup = dataclasses.replace(TWO_RANKS["pp_interleaved"], config=(("overlap_p2p_comm_warmup_flush", True),))
    absent = train_absent(setup)
    attached = train_attached(setup)
    return attached["digest"] == absent, attached


# name -> setup, sequential, attached by hand, what the refusal says
REFUSED: dict[str, tuple[Setup, str, bool, str]] = {
    "unknown": (Setup(), "both", False, "sequential must be 'gate' or 'native', got 'both' (a str)"),
    "tp": (TWO_RANKS["tp"], "native", False, "tensor_model_parallel_size=2"),
    "ep": (TWO_RANKS["ep"], "native", False, "expert_model_parallel_size=2"),
    "average": (Setup(ddp=(("average_in_collective", True),)), "native", False, "average_in_collective=True"),
    "no_overlap": (Setup(overlap_grad_reduce=False), "native", False, "built without overlap"),
    "by_hand": (TWO_RANKS["dp_distributed_optimizer"], "native", True, "needs the optimizer"),
}


def _refuse(folder: str) -> dict[str, Any]:
    found = {}
    for name, (setup, sequential, by_hand, _) in REFUSED.items():
        with job(setup) as training, captured_log() as lines:
            optimizer = None if by_hand else training.optimizer
            with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is looked at outside
                attach(training.model, optimizer, sequential=sequential, strict=True)
            active = False
            with contextlib.suppress(ValueError) if sequential == "both" else contextlib.nullcontext():
                active = attach(training.model, optimizer, sequential=sequential).active
            training.step()
            found[name] = (str(error.value), list(lines), active, "step" in vars(training.optimizer))
    with job(Setup()) as training:
        bare = [chunk.module for chunk in training.model]
        with pytest.raises(ValueError, match="in Megatron-core's DistributedDataParallel"):
            attach(bare, training.optimizer, sequential="native", strict=True)
    return found


def _switch_off_behind_its_back(folder: str) -> None:
    with job(Setup()) as training:
        monitor = attach(training.model, training.optimizer, sequential="native", sinks=[], **TOGGLING)
        for _ in range(3):
            training.step()
        training.model[0].ddp_config.overlap_grad_reduce = False
        with pytest.raises(RuntimeError, match="overlap_grad_reduce was switched off by somebody else"):
            training.step()  # at whose end a sequential step begins
        assert not monitor.active
        assert training.model[0].ddp_config.overlap_grad_reduce is False
        monitor.close()


def _state(training: Job) -> dict[str, Any]:
    """Everything that attaching may touch."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    configs = {"config": training.config, "ddp": training.model[0].ddp_config}
    return {
        "communicator": dict(vars(P2PCommunicator)),
        "optimizer": sorted(vars(training.optimizer)),
        "step": training.optimizer.step,
        **{name: {f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for name, c in configs.items()},
        "hooks": [
            (name, key, list(value))
            for chunk in training.model
            for name, module in chunk.named_modules()
            for key, value in sorted(vars(module).items())
            if "hooks" in key
        ],
        "attributes": [sorted(vars(module)) for chunk in training.model for module in chunk.modules()],
    }


def _look_before_and_after(folder: str) -> list[str]:
    different = []
    for name, sequential in (
        ("dp_distributed_optimizer", "gate"),
        ("dp_distributed_optimizer", "native"),
        ("pp_interleaved", "native"),
    ):
        with job({**TWO_RANKS, **NATIVE_TWO_RANKS}[name]) as training:
            for _ in range(2):
                training.step()
            table, before = dispatch_table(), _state(training)
            monitor = attach(training.model, training.optimizer, sequential=sequential, sinks=[], **TOGGLING)
            assert "step" in vars(training.optimizer)
            for _ in range(4):  # ends in the middle of a window, with the next step to be sequential
                training.step()
            assert monitor.mode is Mode.SEQUENTIAL
            monitor.close()
            after = _state(training)
            different += [f"{name} {sequential} {key}" for key in before if before[key] != after[key]]
            assert dispatch_table() == table
            training.step()
    return different


def _misuse(folder: str) -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"optimizer must be Megatron's, of get_megatron_optimizer\(\), got a SGD"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong in (None, [], [model, "chunk"]):
        with pytest.raises(TypeError, match="model_chunks must be a module or a list of modules"):
            attach(wrong, None)
    with pytest.raises(RuntimeError, match=r"call initialize_model_parallel\(\) first"):
        attach(model, None, strict=True)
    with captured_log() as lines:
        assert not attach(model, None).active
    assert len(lines) == (dist.get_rank() == 0)
    with job(Setup()) as training:
        with pytest.raises(TypeError, match=r"unknown options \['every_step'\]"):
            attach(training.model, training.optimizer, every_step=3)
        with pytest.raises(ValueError, match="start_step must be"):
            attach(training.model, training.optimizer, start_step=-1, strict=True)
        with attach(training.model, training.optimizer, sinks=[]):
            with pytest.raises(RuntimeError, match=r"has a monitor already, of attach\(\)"):
                attach(training.model, training.optimizer, strict=True)
            with pytest.raises(RuntimeError, match=r"has a monitor already, of attach\(\)"):
                hook_pretrain(strict=True)
            with captured_log() as lines:
                assert not attach(training.model, training.optimizer).active
                hook_pretrain()
            assert len(lines) == 2 * (dist.get_rank() == 0)
        first, other = attach(training.model, training.optimizer, sinks=[]), torch.nn.Linear(2, 2)
        with captured_log(logging.INFO) as lines, attach(other, None, sinks=[]) as second:  # a notebook's cell again
            assert (first.active, second.active) == (False, True)
        closed = "an earlier monitor is closed: it was attached to another DistributedDataParallel [OC117]"
        assert sum(closed in line for line in lines) == (dist.get_rank() == 0)
        attach(training.model, training.optimizer, sinks=[]).close()

        with pytest.raises(ImportError, match=r"hook_pretrain needs Megatron-LM, with megatron\.training\.training"):
            hook_pretrain()
        communicator = p2p_communication.P2PCommunicator
        del p2p_communication.P2PCommunicator
        with pytest.raises(
            ImportError, match=r"megatron-core 0\.\S+ lacks .*P2PCommunicator.*known to work: 0\.14\.0, "
        ):
            attach(training.model, training.optimizer)
        p2p_communication.P2PCommunicator = communicator
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}
    sys.modules["megatron"] = None  # type: ignore[assignment]
    with pytest.raises(ImportError, match=r"pip install 'overlap-callbacks\[megatron\]'"):
        attach(model, None)
    sys.modules.update(hidden)


def _overflow(folder: str) -> tuple[str, str, Any]:
    def train(training: Job) -> str:
        for step in range(NUM_STEPS):
            training.forward_backward(step)
            if step == 8:
                training.model[0].buffers[0].grad_data.fill_(float("inf"))
            succeeded, _, _ = training.optimizer.step()
            assert succeeded is (step != 8)
        return training.digest()

    setup = Setup(fp16=16.0)
    with job(setup) as training:
        absent = train(training)
    with job(setup) as training:
        with attach(training.model, training.optimizer, **TOGGLING, run_dir=folder):
            attached = train(training)
        (window,) = record.read(folder).windows if dist.get_rank() == 0 else (None,)
        found = None if window is None else (window.complete, [block.block for block in window.samples[0].timed])
        return absent, attached, found


def _by_hand(folder: str) -> tuple[list[Mode], bool]:
    absent, modes = train_absent(TWO_RANKS["pp_interleaved"]), []
    with job(TWO_RANKS["pp_interleaved"]) as training:
        own = training.optimizer.step
        with attach(training.model, None, sinks=[], **TOGGLING) as monitor:
            for _ in range(NUM_STEPS):
                with monitor.step():
                    modes.append(monitor.mode)
                    training.step()
            assert training.optimizer.step == own
        return modes, training.digest() == absent


def _megatron_lm(training: Job, writer: Any, fail_at: int = -1) -> ModuleType:
    """``megatron.training.training`` with what matters of ``pretrain``, ``train`` and ``train_step``."""
    module = ModuleType("megatron.training.training")
    gathers = training.setup.overlap_param_gather

    def train_step(forward_step_func, data_iterator, model, optimizer, scheduler, config, forward_backward, iteration):
        assert model is training.model
        if iteration == fail_at:
            raise ZeroDivisionError("in train_step")
        succeeded, norm, zeros = training.step()
        return {}, int(not succeeded), False, False, 0, norm, zeros

    def train(model, optimizer, iterations):
        # As there: in the first step no hooks, so that errors in loading do not spread.
        param_sync_func, training.config.param_sync_func = training.config.param_sync_func, None
        if gathers:
            model[0].disable_forward_pre_hook(param_sync=False)
        for iteration in range(iterations):
            step = module.train_step  # a global there, looked up in each iteration
            step(None, None, model, optimizer, None, training.config, None, iteration=iteration)
            if iteration == 0:
                training.config.param_sync_func = param_sync_func
                if gathers:
                    model[0].enable_forward_pre_hook()
            if writer is not None:
                writer.log({"loss": 1.0}, iteration + 1)
            if iteration == 9 and gathers:  # an evaluation
                model[0].disable_forward_pre_hook()
                model[0].enable_forward_pre_hook()
        if fail_at > iterations:
            sys.exit(3)
        return iterations

    def pretrain(iterations):
        done = module.train(training.model, training.optimizer, iterations)
        dist.all_reduce(torch.ones(1))  # an evaluation at the end
        return done

    arguments = SimpleNamespace(seq_length=SEQUENCE, global_batch_size=2 * BATCH, rampup_batch_size=None)
    module.__dict__.update(train_step=train_step, train=train, pretrain=pretrain, get_wandb_writer=lambda: writer)
    module.__dict__.update(get_args=lambda: arguments)
    parent = ModuleType("megatron.training")
    parent.training = module  # type: ignore[attr-defined]
    sys.modules.update({"megatron.training": parent, module.__name__: module})
    return module


def _pretrain(folder: str) -> dict[str, Any]:
    import wandb

    setup = NATIVE_TWO_RANKS["dp_distributed_optimizer"]
    absent = train_absent(setup)
    writer = None
    if dist.get_rank() == dist.get_world_size() - 1:
        wandb.init(project="test", dir=folder, settings=wandb.Settings(**SETTINGS))
        writer = wandb
    digests, said = [], []
    for sequential in ("gate", "native"):
        with job(setup) as training, captured_log() as lines:
            lm = _megatron_lm(training, writer if sequential == "native" else None)
            own = dict(vars(lm))
            hook_pretrain(sequential=sequential, run_dir=str(Path(folder, sequential)), **TOGGLING)
            assert lm.train is not own["train"]
            with pytest.raises(RuntimeError, match=r"has a monitor already, of hook_pretrain\(\)"):
                hook_pretrain(strict=True)
            before = _state(training)
            assert lm.pretrain(NUM_STEPS) == NUM_STEPS
            assert dict(vars(lm)) == own
            after = _state(training)
            digests.append(training.digest())
            for key in ("communicator", "step", "config", "ddp"):
                assert before[key] == after[key], key
            if writer is not None and sequential == "native":
                wandb.finish()
            said += lines
    return {"identical": set(digests) == {absent}, "said": said}


class _Logged(Sink):
    """Replaces the sink of the W&B run on the last rank: records what it is to log."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, report: OverlapReport) -> None:
        self.steps.append(report.first_step)


def _pretrain_apart(folder: str) -> dict[str, Any]:
    """Rank 0 sends its report once it has given up on it; then the last rank is as if dead once training has ended."""
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    log, leave, look = _megatron_reports.Outbox.log, _megatron_reports.Outbox.leave, _megatron_reports.Inbox.look
    given_up = threading.Event()

    def late_log(outbox: Any, report: OverlapReport) -> None:
        assert given_up.wait(60.0)
        log(outbox, report)

    def told_leave(outbox: Any, timeout_s: float) -> Exception | None:
        given_up.set()
        return leave(outbox, timeout_s)

    def dead_look(inbox: Any, wait_s: float | None = None) -> None:
        if wait_s is None:
            look(inbox)

    for name, longest_s, place in (
        ("late", 6.0, mock.patch.multiple(_megatron_reports.Outbox, log=late_log, leave=told_leave)),
        ("dead", 4.0, mock.patch.object(_megatron_reports.Inbox, "look", dead_look)),
    ):
        sink = _Logged()
        with job(Setup()) as training, captured_log() as lines, place:
            lm = _megatron_lm(training, SimpleNamespace(run=None, log=lambda *_: None) if rank == 1 else None)
            hook_pretrain(run_dir=str(Path(folder, name)), **{**TOGGLING, "strict": False})
            with (
                mock.patch.object(megatron, "LAST_REPORT_S", longest_s),
                mock.patch.object(_megatron_reports, "WandbSink", return_value=sink),
                mock.patch.object(_megatron_reports, "_LOOK_INTERVAL_S", 1000.0),  # at the end only
            ):
                lm.pretrain(NUM_STEPS)
            dist.barrier()
            store = dist.distributed_c10d._get_default_store()
            left = [key for key in keys_of(store) if "/megatron/" in key]
            found[name] = {"logged": sink.steps, "lines": list(lines), "left": left}
            dist.barrier()
    for name in ("megatron.training", "megatron.training.training"):
        del sys.modules[name]
    return found


def _pretrain_badly(folder: str) -> list[str]:
    found = []
    for fail_at, error in ((4, ZeroDivisionError), (1000, SystemExit)):
        with job(Setup()) as training:
            lm = _megatron_lm(training, None, fail_at)
            own = dict(vars(lm))
            hook_pretrain(sinks=[], **TOGGLING)
            with pytest.raises(error):
                lm.pretrain(6)
            assert dict(vars(lm)) == own
    with job(TWO_RANKS["tp"]) as training, captured_log() as lines:
        lm = _megatron_lm(training, None)
        hook_pretrain(sequential="native")
        assert lm.pretrain(3) == 3
        found += lines
    for name in ("megatron.training", "megatron.training.training"):
        del sys.modules[name]
    return found


def _pretrain_without_inbox(folder: str) -> dict[str, Any]:
    def no_arguments() -> Any:
        raise AssertionError("args is not initialized.")  # so says Megatron

    def no_writer() -> Any:
        raise AttributeError("no writer")

    with job(Setup()) as training, captured_log() as lines:
        lm = _megatron_lm(training, None)
        lm.get_args = no_arguments
        if dist.get_rank() == 1:
            lm.get_wandb_writer = no_writer
        before, own = _state(training), dict(vars(lm))
        hook_pretrain(run_dir=str(Path(folder, "without_inbox")), **{**TOGGLING, "strict": False})
        lm.pretrain(NUM_STEPS)
        after, left = _state(training), dict(vars(lm))
        hook_pretrain(sinks=[], **{**TOGGLING, "strict": True})
        lm.get_wandb_writer = no_writer  # on both ranks
        with pytest.raises(AttributeError, match="no writer"):
            lm.pretrain(1)
        after_strict = _state(training)
    for name in ("megatron.training", "megatron.training.training"):
        del sys.modules[name]
    restored = {key: before[key] == after[key] == after_strict[key] for key in ("communicator", "step")}
    return {"lines": lines, "restored": restored, "own": left == own}


PARTS: dict[str, Callable[[str], Any]] = {
    "flush": _flush,
    "refuse": _refuse,
    "switch": _switch_off_behind_its_back,
    "state": _look_before_and_after,
    "overflow": _overflow,
    "by_hand": _by_hand,
    "pretrain": _pretrain,
    "pretrain_apart": _pretrain_apart,
    "pretrain_badly": _pretrain_badly,
    "pretrain_without_inbox": _pretrain_without_inbox,
    "misuse": _misuse,
}
