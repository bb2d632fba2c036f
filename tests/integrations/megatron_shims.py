"""What Megatron-core (0.14 to 0.16) needs to train on a CPU. It patches torch and Megatron for the life of the process.

Nothing of this library is shimmed. Each shim was seen to be needed by some job of ``megatron_jobs``; where they make
something differ from a GPU, the reason says so.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def install() -> None:
    """Call it once in each rank, before a model is built."""
    _devices()
    _tensors()
    _streams()
    _random_numbers()
    _norms()
    _experts()


def _devices() -> None:
    # Everywhere: Megatron allocates on torch.cuda.current_device().
    torch.cuda.current_device = lambda: torch.device("cpu")
    # Pipelines synchronise after each batch of sends and receives; on the CPU nothing is in flight then.
    torch.cuda.synchronize = lambda *_: None
    # Everywhere: losses and norms are made with the literal device="cuda".
    for name in ("zeros", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _tensors() -> None:
    # The optimizer and the clipping of gradients tell types by names such as "torch.cuda.FloatTensor".
    own = torch.Tensor.type

    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(tensor, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named
    # Pipelines move the losses' number of tokens to the GPU.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def _streams() -> None:
    # Experts: the dispatcher copies to the host on a stream of its own.
    class Stream:
        def wait_stream(self, *_: Any) -> None: ...

        def synchronize(self) -> None: ...

        def record_event(self, *_: Any) -> Stream:
            return self

    torch.cuda.Stream = lambda *_, **__: Stream()
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()


def _random_numbers() -> None:
    # Tensor parallelism forks CUDA's generators; without dropout, and with initialisation on the CPU, none is used.
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    # Recomputation keeps and restores their states.
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None


def _norms() -> None:
    # Sequence parallelism asks for Apex's or Transformer Engine's norm; this is torch's, marked as theirs are.
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
        made = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made

    WrappedTorchNorm.__new__ = norm


def _experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Without Transformer Engine the name is missing, and used all the same.
    moe_utils.te_general_gemm = None
    # It returns a tensor as it is where there is no GPU, also where an array was asked for.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
