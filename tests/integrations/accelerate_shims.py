"""What Accelerate needs to shard on a CPU. It patches Accelerate for the life of the process.

Nothing of this library is shimmed. On a CPU Accelerate leaves its FSDP and DeepSpeed plugins aside, and takes DDP. What
it does with them is the same on every device: ``fully_shard`` and ``deepspeed.initialize``, which both run on a CPU.
"""

from __future__ import annotations

import os


def install() -> None:
    """Call it once in each rank, before a Trainer or an Accelerator is made."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # It looks for an accelerator, and takes plugins only where it has found one.
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    # The device that goes with what was found.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
