"""What the adapter uses of Megatron-core: its classes, and the dimensions of its process groups."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed.distributed_c10d as c10d

from .base import KNOWN_TO_WORK

# The dimensions of parallel_state's groups. Groups that are not named here are named by their descriptions.
_DIMENSIONS = {
    "get_tensor_model_parallel_group": "tensor",
    "get_pipeline_model_parallel_group": "pipeline",
    "get_data_parallel_group": "data",
    "get_context_parallel_group": "context",
    "get_expert_model_parallel_group": "expert",
    "get_expert_tensor_parallel_group": "tensor",
    "get_expert_data_parallel_group": "data",  # the gradients of experts
    "get_embedding_group": "embedding",
    "get_position_embedding_group": "embedding",
    "get_expert_tensor_model_pipeline_parallel_group": "model",  # the norm of gradients
    "get_intra_distributed_optimizer_instance_group": "model",
}


@dataclass(frozen=True)
class MegatronCore:
    """The classes and the module of Megatron-core that the adapter uses.

    Attributes:
        name: the package with its version, for the record.
        communicator: the class whose ``_communicate`` posts sends and receives.
        ddp: the class of model chunks whose overlap has switches.
        optimizer: the class of optimizers.
        groups: the module that knows the job's process groups.
    """

    name: str
    communicator: type[Any]
    ddp: type[Any]
    optimizer: type[Any]
    groups: ModuleType

    @classmethod
    def load(cls) -> MegatronCore:
        """Import it.

        Raises:
            ImportError: it is not installed, or lacks something.
        """
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
            )
            # Used later: if one is missing, the message comes now.
            _ = core.groups.model_parallel_is_initialized, core.communicator._communicate
        except (ImportError, AttributeError) as error:
            known = KNOWN_TO_WORK["megatron-core"]
            raise ImportError(
                f"megatron-core {version} lacks what is needed here ({error}); known to work: {known}"
            ) from error
        return core

    def dimensions(self, config: Any) -> dict[str, str]:
        """The dimensions of the job's groups, by group name.

        Args:
            config: of the model; None if it has none.
        """
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
