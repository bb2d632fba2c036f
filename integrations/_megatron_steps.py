"""Shared by both entry points for Megatron: Megatron-core's classes, a job's monitor, and its steps."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.analysis.step_vectors import AFTER_BACKWARD, INPUT, OTHER, WAITING

from . import _configuration
from ._megatron_switches import Switches
from ._names import tell_names
from ._options import Options
from ._parts import PassMarks, around
from .base import KNOWN_TO_WORK, MakeSinks, build_monitor, is_native, precision_of, wrap

# The dimensions of parallel_state's groups. Other groups are named by their descriptions.
_DIMENSIONS = {
    "get_tensor_model_parallel_group": "tensor",
    "get_pipeline_model_parallel_group": "pipeline",
    "get_data_parallel_group": "data",
    "get_context_parallel_group": "context",
    "get_expert_model_parallel_group": "expert",
    "get_expert_tensor_parallel_group": "tensor",
    "get_expert_data_parallel_group": "data",  # the experts' gradients
    "get_embedding_group": "embedding",
    "get_position_embedding_group": "embedding",
    "get_expert_tensor_model_pipeline_parallel_group": "model",  # the gradient norm
    "get_intra_distributed_optimizer_instance_group": "model",
}


@dataclass(frozen=True)
class MegatronCore:
    """The classes and the module of Megatron-core that the adapter uses.

    Attributes:
        name: package and version, for the record.
        communicator: the class whose ``_communicate`` posts sends and receives.
        ddp: the class of model chunks whose overlap has switches.
        groups: the module that knows the job's process groups.
        schedules: the module with the loops over micro-batches.
    """

    name: str
    communicator: type[Any]
    ddp: type[Any]
    optimizer: type[Any]
    groups: ModuleType
    schedules: ModuleType

    @classmethod
    def load(cls) -> MegatronCore:
        """Import Megatron-core. Raises an ImportError if it is not installed, or lacks something."""
        version = "of an unknown version"
        try:
            version = getattr(importlib.import_module("megatron.core"), "__version__", version)
        except ImportError:
            raise ImportError("this needs Megatron-core: pip install 'overlap-callbacks[megatron]'") from None
        try:
            p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
            core = cls(
                name=f"megatron-core {version}",
                communicator=p2p.P2PCommunicator,
                ddp=importlib.import_module("megatron.core.distributed").DistributedDataParallel,
                optimizer=importlib.import_module("megatron.core.optimizer").MegatronOptimizer,
                groups=importlib.import_module("megatron.core.parallel_state"),
                schedules=importlib.import_module("megatron.core.pipeline_parallel.schedules"),
            )
            # Used later: if one is missing, raise now.
            _ = core.groups.model_parallel_is_initialized, core.communicator._communicate
        except (ImportError, AttributeError) as error:
            known = KNOWN_TO_WORK["megatron-core"]
            raise ImportError(
                f"megatron-core {version} lacks what is needed here ({error}); known to work: {known}"
            ) from error
        return core

    def dimensions(self, config: Any) -> dict[str, str]:
        """The dimensions of the job's groups, by group name; ``config`` is the model's, None if it has none."""
        known = {}
        for function, dimension in _DIMENSIONS.items():
            groups = None
            with contextlib.suppress(AssertionError, AttributeError):  # this job, or this version, has no such group
                groups = getattr(self.groups, function)()
            for group in groups if isinstance(groups, list) else [groups] if groups is not None else []:
                known[group.group_name] = dimension
                # Without batches, two stages use the default group for one direction, to have two communicators.
                if dimension == "pipeline" and group.size() == 2 and not getattr(config, "batch_p2p_comm", True):
                    known[c10d._get_default_group().group_name] = dimension
        return known


class Steps:
    """Marks steps for a monitor, and for Megatron's switches if they make steps sequential."""

    def __init__(self, monitor: OverlapMonitor) -> None:
        self.monitor = monitor
        self.switches: Switches | None = None  # None until they are in use

    def begin(self, step: int) -> None:
        self.monitor.step_begin(step)
        if self.switches is not None and self.monitor.is_turned(self.switches):
            self.switches.gather_parameters()

    def end(self, *, skipped: bool) -> None:
        if skipped:
            self.monitor.skip_step("its gradients overflowed")
        self.monitor.step_end()
        self.monitor.enter(OTHER)


def checked_chunks(model: Any) -> list[Any]:
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise TypeError(f"model_chunks must be a module or a list of modules, got a {type(model).__name__}")
    return chunks


def open_steps(
    core: MegatronCore,
    chunks: list[Any],
    sequential: str,
    options: Options,
    by_hand: bool = False,
    sinks: MakeSinks | None = None,
    check: Callable[[], None] = lambda: None,
    next_step: int = 0,
    unused: str = "",
) -> Steps:
    """A monitor that knows the job's groups and switches, and waits for its batches of sends and receives."""
    native = is_native(sequential)
    switches: Switches | None = None

    def check_job() -> None:
        nonlocal switches
        check()
        if not core.groups.model_parallel_is_initialized():
            raise RuntimeError("model parallelism is not initialised: call initialize_model_parallel() first")
        switches = Switches(core.ddp, chunks, by_hand) if native else None

    config = getattr(chunks[0], "config", None)
    monitor = build_monitor(
        core.name,
        options,
        sinks=sinks,
        check=check_job,
        precision=lambda: _precision(config),
        next_step=next_step,
        unused=unused,
        target=chunks[0],
    )
    steps = Steps(monitor)

    def make_switches(arm: object = None) -> Switches:
        steps.switches = steps.switches or Switches(core.ddp, chunks, by_hand)
        return steps.switches

    if monitor.active:
        monitor.name_groups(core.dimensions(config))
        tell_names(monitor, [chunk for chunk in chunks if isinstance(chunk, nn.Module)])
        monitor.name_computing_streams(shared_expert_streams(chunks))
        monitor.tell_model_chunks(len(chunks))
        _configuration.tell(monitor, lambda: _configuration.of_megatron(chunks))
        if switches is not None:
            steps.switches = switches
            monitor.use_native(switches)
        monitor.offer_switches({"native": make_switches})
        # If Megatron overlaps its sends and receives, it waits for them later, outside its passes.
        after = WAITING if getattr(config, "overlap_p2p_comm", False) else INPUT
        monitor.call_on_close(wrap(core.communicator, "_communicate", _waiting(monitor, after)))
        marks = PassMarks(monitor)
        marks.watch([chunk for chunk in chunks if isinstance(chunk, nn.Module)])
        marks.watch_backward(core.schedules, "custom_backward")  # it runs the engine itself
        for chunk in chunks:
            if hasattr(chunk, "finish_grad_sync"):
                monitor.call_on_close(wrap(chunk, "finish_grad_sync", around(monitor, WAITING, AFTER_BACKWARD)))
    return steps


def shared_expert_streams(chunks: Iterable[Any]) -> list[Any]:
    """The streams of shared experts (``--moe-shared-expert-overlap``): without tensor parallelism they only compute."""
    modules = [module for chunk in chunks if hasattr(chunk, "modules") for module in chunk.modules()]
    streams = [getattr(module, "stream", None) for module in modules if type(module).__name__ == "SharedExpertMLP"]
    return list({id(stream): stream for stream in streams if stream is not None}.values())


def _precision(config: Any) -> str | None:
    """The precision of matrix products in Megatron's model configuration; None without one."""
    if config is None:
        return None
    kinds = (("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"))
    chosen = next((name for attribute, name in kinds if getattr(config, attribute, None)), None)
    return chosen or precision_of(getattr(config, "params_dtype", None))


def _waiting(monitor: OverlapMonitor, after: int) -> Callable[..., Any]:
    """Wrapper of ``_communicate``, which posts a batch of sends and receives: sequential steps wait after posting.

    This cannot hang: the stages go through their batches in step, and each one's k-th forward (or backward) batch is
    the counterpart of its neighbour's. Megatron itself waits there if ``overlap_p2p_comm`` is off.
    """

    def works_of(result: Any) -> list[Any]:
        works = result[2]  # a list or a dictionary; None if Megatron itself has waited
        return list(works.values()) if isinstance(works, dict) else list(works or ())

    def post(communicate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        monitor.enter(WAITING)
        try:
            result, handed_on = monitor.post(lambda: communicate(*args, **kwargs), works_of)
        finally:
            monitor.enter(after)
        from_previous, from_next, works = result
        if works:
            works = dict(zip(works, handed_on, strict=True)) if isinstance(works, dict) else handed_on
        return from_previous, from_next, works

    return post
