"""What scripts written for CUDA need to train on a CPU with Gloo. It patches torch for the life of the process.

Nothing of this library is shimmed. A script keeps its text; "cuda" is the CPU for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def install() -> None:
    """Call it once in each rank, before the script runs."""
    torch.cuda.set_device = lambda *_: None
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    nn.Module.to = _on_cpu(nn.Module.to)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]

    init = dist.init_process_group

    def init_gloo(backend: str | None = None, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo" if backend in (None, "nccl") else backend, **kwargs)

    dist.init_process_group = init_gloo
    keep_groups()

    wrap = nn.parallel.DistributedDataParallel.__init__

    def without_devices(ddp: Any, module: nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        wrap(ddp, module, None, *args, **kwargs)

    nn.parallel.DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]


def keep_groups() -> None:
    """Let loops not destroy their Gloo groups: that waits for peers, which may have gone. Seen without this library."""
    dist.destroy_process_group = lambda *_: dist.barrier()


def install_accelerator(kind: str) -> None:
    """For scripts that ask ``torch.accelerator``: it has four devices of this type. Call ``install`` too."""
    own = torch.accelerator.current_accelerator
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 4
    torch.accelerator.set_device_index = lambda *_: None
    torch.accelerator.device_index = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, misc]
    # Who wants to know whether it is there, as torch does, gets the truth.
    torch.accelerator.current_accelerator = lambda check_available=False: (
        own(check_available=True) if check_available else torch.device(kind)
    )
    nn.Module.cuda = lambda module, *_: module  # type: ignore[method-assign]
    torch.tensor = _made_on_cpu(torch.tensor)


def define_vision_operators() -> None:
    """torchvision from the package index is built for CUDA, and is not imported without its operators."""
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[Any] = []  # an operator lives as long as its library


def _on_cpu(move: Any) -> Any:
    def is_device(value: Any) -> bool:
        return (type(value) is int) or (
            isinstance(value, (str, torch.device)) and bool(re.fullmatch(r"cuda(:\d+)?", str(value)))
        )

    def moved(thing: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(["cpu" if is_device(value) else value for value in args])
        kwargs = {name: "cpu" if is_device(value) else value for name, value in kwargs.items()}
        return move(thing, *args, **kwargs)

    return moved


def _made_on_cpu(make: Any) -> Any:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    return made


def install_megatron_lm() -> None:
    """For Megatron-LM's own scripts, beside ``megatron_shims``. Call it with the checkout on ``sys.path``."""
    import importlib
    import sys
    from types import ModuleType, SimpleNamespace

    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_: None
    torch.cuda.memory_stats = lambda *_: {}
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30, multi_processor_count=1, major=8)
    torch.ones = _made_on_cpu(torch.ones)
    nn.Module.cuda = lambda module, *_: module  # type: ignore[method-assign]
    # These kernels need Triton when they are imported.
    kernels = ModuleType("batch_invariant_kernels")
    kernels.enable_batch_invariant_mode = kernels.set_batch_invariant_mode = lambda *_: None  # type: ignore[attr-defined]
    kernels.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = kernels
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None  # the wheel has them
    importlib.import_module("megatron.legacy.fused_kernels").load = lambda *_: None
    training = importlib.import_module("megatron.training.training")
    training.set_jit_fusion_options = lambda *_: None  # warms up fused kernels on the device
    initialize = training.initialize_megatron
    training.initialize_megatron = lambda *args, **kwargs: initialize(*args, **{**kwargs, "allow_no_cuda": True})


def keep_memory_of_sends() -> None:
    """Let a send hold the memory of its tensor.

    Gloo's send holds the tensor, and reads its memory later. Megatron's interleaved pipeline gives the memory back
    while the send is under way, and leaves the tensor one element (``deallocate_output_tensor``). So what arrives may
    be what came into that memory meanwhile. This library has no part in it.
    """
    own = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(tensor.detach(), *args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = isend


def stub_modules(*names: str) -> None:
    """Modules that a framework imports and does not use on a CPU: any name in them is an empty class."""
    import sys
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    class Stub(ModuleType):
        __path__: list[str] = []  # noqa: RUF012

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in names:
        stub = sys.modules[name] = Stub(name)
        stub.__spec__ = ModuleSpec(name, None)
        parent, _, last = name.rpartition(".")
        if isinstance(sys.modules.get(parent), Stub):
            setattr(sys.modules[parent], last, stub)
