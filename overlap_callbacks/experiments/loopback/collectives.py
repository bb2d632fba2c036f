"""The effect of each ``c10d`` operator if both ranks have the same data, and the link to the phantom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Values of ``torch.distributed.ReduceOp.RedOpType`` in the operators' arguments.
SUM, AVG, MIN, MAX = 0, 1, 3, 4

# Kernel names by kind of collective. NCCL has no all-to-all: it sends and receives.
KERNEL_NAMES = {
    "all_reduce": "ncclDevKernel_AllReduce_Loop",
    "all_gather": "ncclDevKernel_AllGather_Loop",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Loop",
    "broadcast": "ncclDevKernel_Broadcast_Loop",
    "all_to_all": "ncclDevKernel_SendRecv",
}


@dataclass(frozen=True)
class LoopSettings:
    """A link to the phantom.

    Attributes:
        device: ``cuda`` (the current device) or ``cpu``.
        ctas: thread blocks of a collective's kernel. Each takes so much shared memory that the large tiles of matrix
            products do not fit next to it, so about as many SMs are unavailable to those.
        gb_s: bandwidth of the link in 10^9 bytes a second; ``math.inf`` for collectives that do not wait.
    """

    device: str = "cuda"
    ctas: int = 24
    gb_s: float = 40.0

    def length_ns(self, num_bytes: int) -> int:
        """Minimum duration of a collective of ``num_bytes``."""
        return int(num_bytes / self.gb_s)  # bytes / (10^9 bytes / s) is nanoseconds


@dataclass(frozen=True)
class Move:
    """``dst`` becomes ``factor`` times ``src``: contiguous tensors of one type and size."""

    dst: torch.Tensor
    src: torch.Tensor
    factor: float = 1.0


@dataclass(frozen=True)
class Call:
    """The arguments of one collective.

    Attributes:
        operator: of ``c10d``.
        outputs, inputs: tensors written and read, one for each member of a coalesced collective. Those of an
            ``allgather_`` have one list of outputs per input.
        reduction: number of the reduction; None without one.
        asynchronous: ``async_op``.
        root: rank of the group that has the data; None without one.
        splits: rows per rank in the output and in the input of an all-to-all; empty for equal parts.
    """

    operator: str
    outputs: Sequence[Any]
    inputs: Sequence[torch.Tensor]
    asynchronous: bool = True
    reduction: int | None = None
    root: int | None = None
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())

    @property
    def kind(self) -> str:
        return _OPERATORS[self.operator][0]

    @property
    def output_tensors(self) -> list[torch.Tensor]:
        """All tensors written."""
        return [tensor for item in self.outputs for tensor in (item if isinstance(item, list) else [item])]

    @property
    def num_bytes(self) -> int:
        return max(sum(t.nbytes for t in self.output_tensors), sum(t.nbytes for t in self.inputs))

    def moves(self, size: int) -> list[Move]:
        """What rank 0 of ``size`` ranks writes; all ranks have the same inputs."""
        return [move for move in _OPERATORS[self.operator][1](self, size) if move.dst.numel()]


def parse(operator: str, group_at: int, async_at: int, args: Sequence[Any]) -> Call:
    """A call from the operator's positional arguments, whose trailing defaults are omitted."""
    asynchronous = bool(args[async_at]) if len(args) > async_at else True
    reduction = args[group_at + 1].op() if "reduce" in operator else None
    if reduction not in (None, SUM, AVG, MIN, MAX):
        raise NotImplementedError(
            f"c10d::{operator} with reduction {reduction}: the phantom knows sums, means and extremes"
        )
    if operator == "broadcast_":
        return Call(operator, args[0], args[0], asynchronous, root=int(args[2]))
    if operator == "alltoall_base_":
        return Call(operator, [args[0]], [args[1]], asynchronous, splits=(tuple(args[3]), tuple(args[4])))
    if group_at == 1:  # in place
        return Call(operator, args[0], args[0], asynchronous, reduction)
    as_list = list if isinstance(args[1], (list, tuple)) else lambda tensor: [tensor]
    return Call(operator, as_list(args[0]), as_list(args[1]), asynchronous, reduction)


# -- the results


def _in_place(call: Call, size: int) -> list[Move]:
    factor = float(size) if call.reduction == SUM else 1.0
    return [Move(tensor, tensor, factor) for tensor in call.outputs]


def _gathered(call: Call, size: int) -> list[Move]:
    pairs = zip(call.outputs, call.inputs, strict=True)
    return [Move(part, source.view(-1)) for output, source in pairs for part in output.view(-1).chunk(size)]


def _gathered_lists(call: Call, size: int) -> list[Move]:
    pairs = zip(call.outputs, call.inputs, strict=True)
    return [Move(part, source) for outputs, source in pairs for part in outputs]


def _scattered(call: Call, size: int) -> list[Move]:
    factor = float(size) if call.reduction == SUM else 1.0
    pairs = zip(call.outputs, call.inputs, strict=True)
    return [Move(output.view(-1), source.view(-1)[: output.numel()], factor) for output, source in pairs]


def _exchanged(call: Call, size: int) -> list[Move]:
    (output,), (source,) = call.outputs, call.inputs
    rows_out, rows_in = call.splits
    own = source[: rows_in[0]] if rows_in else source.chunk(size)[0]
    parts = output.split(list(rows_out)) if rows_out else output.chunk(size)
    return [Move(part, own) for part in parts if part.shape == own.shape]


_OPERATORS: dict[str, tuple[str, Callable[[Call, int], list[Move]]]] = {
    "allreduce_": ("all_reduce", _in_place),
    "allreduce_coalesced_": ("all_reduce", _in_place),
    "broadcast_": ("broadcast", _in_place),
    "allgather_": ("all_gather", _gathered_lists),
    "_allgather_base_": ("all_gather", _gathered),
    "allgather_into_tensor_coalesced_": ("all_gather", _gathered),
    "_reduce_scatter_base_": ("reduce_scatter", _scattered),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _scattered),
    "alltoall_base_": ("all_to_all", _exchanged),
}
OPERATORS = tuple(_OPERATORS)
