"""torchtitan's own ``Trainer`` with FSDP2, and one line where there are options: ``attach(trainer.optimizers)``.

torchtitan has no CPU form. Its device module is replaced here, and so is its attention, which on a CPU has no backward
pass. The loop, the parallelism, the optimizer and the clipping are torchtitan's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.loops.cpu_shims import stub_modules
from tests.loops.watching import NUM_STEPS

SEQUENCE, BATCH = 16, 1


def _install_cpu() -> None:
    from torchtitan.tools import utils

    nothing = dict.fromkeys(("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"), lambda *_: None)
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        **nothing,
        get_device_name=lambda *_: "cpu",
        current_device=lambda: 0,
        get_device_properties=lambda *_: SimpleNamespace(total_memory=2**30),
        memory_stats=lambda *_: {},
    )
    utils.get_local_device = lambda: torch.device("cpu")

    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def sum_on_gloo(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it reduces
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = sum_on_gloo
    # Expert parallelism's kernels, which need Triton when they are imported.
    stub_modules("torchtitan.distributed.minimal_async_ep.kernels")
    from torchtitan.models.common.attention import FlexAttention

    def attention(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        gqa = q.shape[1] != k.shape[1]
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return found.transpose(1, 2)

    FlexAttention.forward = attention

    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda *_, **__: None  # needs a torch later than 2.13


def _config(folder: str, accumulate: int) -> Any:
    from dataclasses import dataclass

    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    class RandomTokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
            self._generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Any:
            while True:
                tokens = torch.randint(0, 2048, (BATCH, SEQUENCE + 1), generator=self._generator)
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dump_folder = folder
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = RandomTokens.Config()
    config.training.seq_len = SEQUENCE
    config.training.local_batch_size = BATCH
    config.training.global_batch_size = 2 * BATCH * accumulate
    config.training.steps = NUM_STEPS
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a torch after 2.13
    config.optimizer.implementation = "foreach"
    config.debug.seed = 0
    config.validator.enable = False
    config.checkpoint.enable = False
    return config


def train(options: dict[str, Any] | None, folder: str, accumulate: int) -> None:
    _install_cpu()
    trainer = _config(folder, accumulate).build()
    if options is None:
        trainer.train()
    else:
        from overlap_callbacks.integrations.pytorch import attach

        with attach(trainer.optimizers, **options):
            trainer.train()
    trainer.close()
