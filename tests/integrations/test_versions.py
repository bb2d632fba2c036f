"""A version that lacks something gives one message, and costs the measurement but not the job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from overlap_callbacks.integrations import _pytorch_fsdp as fsdp_switch
from overlap_callbacks.integrations.base import KNOWN_TO_WORK, lacks
from overlap_callbacks.integrations.pytorch import attach
from tests.distributed import captured_log, run_ranks
from tests.integrations import parallel_jobs as jobs

KNOWN = f"which is needed here; known to work: {KNOWN_TO_WORK['torch']}"


@contextlib.contextmanager
def without(holder: Any, name: str) -> Iterator[None]:
    """A version that has no such attribute."""
    had = vars(holder)[name]
    delattr(holder, name)
    try:
        yield
    finally:
        setattr(holder, name, had)


def refused(error: type[Exception], call: Callable[..., Any]) -> str:
    """What is said where it is strict; else the same is warned of, once: on rank 0, if there are others."""
    with pytest.raises(error) as raised:
        call(strict=True)
    with captured_log() as lines:
        assert not call().active
    alone = not dist.is_initialized()
    of, code = ("", "OC105") if alone else (" on all ranks", "OC110")
    expected = [f"measuring is switched off{of}, training goes on: {raised.value} [{code}]"]
    assert [line.removeprefix("overlap-callbacks: ") for line in lines] == (
        expected if alone or dist.get_rank() == 0 else []
    )
    return str(raised.value)


def _other_torches(rank: int) -> dict[str, str]:
    said = {}
    pipeline = jobs.one_f_one_b(rank)

    def attach_pipeline(**options: Any) -> Any:
        return attach(pipeline.optimizer, pipeline=pipeline.pipeline, **options)

    for name in ("_batch_p2p", "_PipelineSchedule", "SEND_F"):
        with without(schedules, name):
            said[name] = refused(RuntimeError, attach_pipeline)
    with without(pipeline.pipeline, "_stage"):
        said["_stage"] = refused(RuntimeError, attach_pipeline)

    ddp = jobs.ddp(rank)

    def attach_ddp(**options: Any) -> Any:
        return attach(ddp.optimizer, model=ddp.models, sequential="native", **options)

    with without(dist.Reducer, "_update_process_group"):  # type: ignore[attr-defined]
        said["_update_process_group"] = refused(ValueError, attach_ddp)
    with without(ddp.models[0], "_comm_hooks"):
        said["_comm_hooks"] = refused(ValueError, attach_ddp)

    fsdp = jobs.fsdp2(rank)
    with without(FSDPModule, "_get_fsdp_state"):
        said["_get_fsdp_state"] = refused(
            ValueError, lambda **options: attach(fsdp.optimizer, model=fsdp.models, sequential="native", **options)
        )
        # The gate needs nothing of it but the names of its groups.
        attach(fsdp.optimizer, model=fsdp.models, sinks=[], strict=True).close()
    training = jobs.Training(rank, jobs.fsdp2)
    modules = [module for model in training.job.models for module in model.modules() if isinstance(module, FSDPModule)]
    training.step()
    context = fsdp_switch.fsdp2_state(modules[0])._comm_ctx
    streams = {name: getattr(context, name) for name in fsdp_switch.FSDP2_STREAMS}
    form = fsdp_switch.FsdpStreams(modules)  # type: ignore[arg-type]
    with without(context, "reduce_scatter_stream"), pytest.raises(RuntimeError) as raised:
        form.disable()
    said["reduce_scatter_stream"] = str(raised.value)
    assert all(getattr(context, name) is stream for name, stream in streams.items())  # nothing was changed
    return said


def test_private_parts_of_torch_are_looked_for_and_reported_with_the_version() -> None:
    found = f"torch {torch.__version__} has no "
    for said in run_ranks(_other_torches, 2, timeout_s=90):
        for name in ("_batch_p2p", "_PipelineSchedule", "SEND_F"):
            assert said[name] == f"{found}schedules.{name}, {KNOWN}"
        assert said["_stage"] == f"{found}Schedule1F1B._stage, {KNOWN}"
        assert said["reduce_scatter_stream"] == f"{found}FSDPCommContext.reduce_scatter_stream, {KNOWN}"
        for name, owner in (("_update_process_group", "Reducer"), ("_comm_hooks", "DistributedDataParallel")):
            assert said[name].endswith(f"use 'gate' ({found}{owner}.{name}, {KNOWN})")
        assert re.search(rf"use 'gate' \({re.escape(found)}\w+\._get_fsdp_state, {KNOWN}\)", said["_get_fsdp_state"])


@pytest.mark.parametrize(
    ("holder", "name"),
    [("Trainer", "is_global_zero"), ("Callback", "on_validation_start"), ("strategies", "ModelParallelStrategy")],
)
def test_another_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, holder: str, name: str) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from overlap_callbacks.integrations.lightning import OverlapCallback

    trainer: Any = SimpleNamespace(default_root_dir=tmp_path, global_step=0)
    monkeypatch.delattr(getattr(pl, holder), name)

    def start(**options: Any) -> Any:
        callback = OverlapCallback(**options)
        callback.on_train_start(trainer, None)  # type: ignore[arg-type]
        return callback.monitor

    said = refused(RuntimeError, start)
    assert said == lacks("lightning", pl.__version__, f"{holder}.{name}")


def test_another_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from overlap_callbacks.integrations.transformers import OverlapCallback

    args, state = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(global_step=0)
    model: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}

    def begin(state: Any = state, model: Any = model, **options: Any) -> Any:
        callback = OverlapCallback(**options)
        callback.on_train_begin(args, state, None, **model)
        return callback.monitor

    def told(what: str) -> str:
        return lacks("transformers", transformers.__version__, what)

    assert refused(RuntimeError, lambda **o: begin(SimpleNamespace(), **o)) == told("SimpleNamespace.global_step")
    assert refused(RuntimeError, lambda **o: begin(model={}, **o)) == told("model among what its callbacks are given")
    monkeypatch.delattr(transformers.TrainerCallback, "on_epoch_end")
    assert refused(RuntimeError, begin) == told("TrainerCallback.on_epoch_end")


def test_another_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from overlap_callbacks.integrations.transformers import AcceleratedOptimizer, attach_accelerate

    optimizer = AcceleratedOptimizer.__new__(AcceleratedOptimizer)  # with nothing in it
    said = refused(RuntimeError, lambda **options: attach_accelerate(optimizer, **options))
    assert said == lacks("accelerate", accelerate.__version__, "AcceleratedOptimizer.optimizer")


def test_an_accelerate_without_its_optimizer_is_distinguished_from_a_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    import accelerate.optimizer

    monkeypatch.delattr(accelerate.optimizer, "AcceleratedOptimizer")
    monkeypatch.delitem(sys.modules, "overlap_callbacks.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"accelerate .* has no .*AcceleratedOptimizer.*known to work"):
        import overlap_callbacks.integrations.transformers  # noqa: F401
