"""Descriptions of a collective: its operator's calling convention (from torch's own schemas), its group, its record."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.dimension_rules import dimension_of

if TYPE_CHECKING:
    from overlap_callbacks.gate.serialiser import Serialiser
    from overlap_callbacks.instruments import clocks, device

SENDS = frozenset({"send"})
RECEIVES = frozenset({"recv_", "recv_any_source_"})
POINT_TO_POINT = SENDS | RECEIVES


_NO_NAME = "unregistered"
# Takes lists of tensors, one per rank, as its first arguments.
_ALL_TO_ALL_OF_LISTS = "alltoall_"

# What an all-to-all receives from and sends to each rank of its group: in rows, or for lists of tensors in elements.
Splits = tuple[Sequence[int], Sequence[int]]

# What the gate needs of a call's tensors: bytes in, bytes out, and the first tensor (None without any).
Sizes = tuple[int, int, "torch.Tensor | None"]


@dataclass(frozen=True)
class OperatorSpec:
    """Calling convention of one ``c10d`` operator (positional, trailing defaults left out).

    Attributes:
        name: within the ``c10d`` namespace, with its overload if any, e.g. ``allreduce_``.
        redispatch: ``redispatch(keyset, *args)``, to the kernels below the gate's.
        group: position of the process group.
        sizes: bytes in and out of a call with these arguments, and its first tensor.
        returns_work: whether the operator returns a ``Work`` (last).
        peer, tag: positions of the peer's group rank and of the tag; -1 without one.
        async_op: position of ``async_op``; without one, a position that no call has.
        asynchronous: its value where a call leaves it out; without one, whether the operator returns a ``Work``.
        ends_block: whether a coalescing block issues it at its end.
        splits: reads what a call receives from and sends to each rank; None if the operator has no splits.
    """

    name: str
    redispatch: Callable[..., Any]
    group: int
    sizes: Callable[[tuple[Any, ...]], Sizes]
    returns_work: bool
    point_to_point: bool
    peer: int
    tag: int
    async_op: int = sys.maxsize
    asynchronous: bool = True
    ends_block: bool = False
    splits: Callable[[tuple[Any, ...]], Splits | None] | None = None


@functools.cache
def operator_specs() -> tuple[OperatorSpec, ...]:
    """Every ``c10d`` operator of the installed torch that takes a process group."""
    specs = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition("::")
        if namespace != "c10d":
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.c10d, packet), overload or "default")
        arguments = [argument.name for argument in operator._schema.arguments]
        if "process_group" in arguments:
            specs.append(_spec(name, operator, arguments))
    return tuple(specs)


def _spec(name: str, operator: Any, arguments: list[str]) -> OperatorSpec:
    group = arguments.index("process_group")

    def position(*names: str) -> int:
        return next((arguments.index(n) for n in names if n in arguments), -1)

    async_op = position("async_op", "asyncOp")
    returns_work = any("Work" in str(value.type) for value in operator._schema.returns)
    default = operator._schema.arguments[async_op].default_value if async_op >= 0 else returns_work
    return OperatorSpec(
        name=name,
        redispatch=operator._handle.redispatch_boxed,
        group=group,
        sizes=_sizes_of(name, operator, arguments[:group]),
        returns_work=returns_work,
        point_to_point=name in POINT_TO_POINT,
        peer=position("dst", "src"),
        tag=position("tag"),
        async_op=async_op if async_op >= 0 else sys.maxsize,
        asynchronous=bool(default),
        ends_block="coalesced" in name,
        splits=_splits_of(name, position("output_split_sizes"), position("input_split_sizes")),
    )


def _sizes_of(name: str, operator: Any, arguments: list[str]) -> Callable[[tuple[Any, ...]], Sizes]:
    """Make a function that sizes a call. Made once per operator, because it runs for every collective."""
    outputs = [i for i, argument in enumerate(arguments) if not argument.startswith("input")]
    inputs = [i for i, argument in enumerate(arguments) if not argument.startswith("output")]
    if name in SENDS:
        outputs = []
    if name in RECEIVES:
        inputs = []
    types = [str(operator._schema.arguments[i].type) for i in range(len(arguments))]

    def in_place_list(args: tuple[Any, ...]) -> Sizes:
        tensors = args[0]
        try:
            if len(tensors) == 1:
                tensor = tensors[0]
                size = tensor.nbytes
                return size, size, tensor
            size = sum([tensor.nbytes for tensor in tensors])
            return size, size, tensors[0] if tensors else None
        except RuntimeError:  # a sparse tensor
            return anything(args)

    def out_and_in(args: tuple[Any, ...]) -> Sizes:
        try:
            return args[1].nbytes, args[0].nbytes, args[0]
        except RuntimeError:
            return anything(args)

    def anything(args: tuple[Any, ...]) -> Sizes:
        size_in = sum([num_bytes(args[i]) for i in inputs])
        size_out = sum([num_bytes(args[i]) for i in outputs])
        return size_in, size_out, first_tensor(args[: len(arguments)])

    if types == ["List[Tensor]"] and inputs == outputs:
        return in_place_list
    if types == ["Tensor", "Tensor"] and (outputs, inputs) == ([0], [1]):
        return out_and_in
    return anything


def _splits_of(name: str, output_sizes: int, input_sizes: int) -> Callable[[tuple[Any, ...]], Splits | None] | None:
    """Make a function that reads the splits of a call; it returns None if they are equal or left out."""

    def given(args: tuple[Any, ...]) -> Splits | None:
        received, sent = args[output_sizes], args[input_sizes]
        return (received, sent) if received and sent else None

    def of_lists(args: tuple[Any, ...]) -> Splits | None:
        # Rows of tensors without dimensions are counted as elements; the number of elements per row is the same on all
        # ranks.
        received, sent = [tensor.numel() for tensor in args[0]], [tensor.numel() for tensor in args[1]]
        uneven = received and sent and (received.count(received[0]) < len(received) or sent.count(sent[0]) < len(sent))
        return (received, sent) if uneven else None

    if output_sizes >= 0 and input_sizes >= 0:
        return given
    return of_lists if name == _ALL_TO_ALL_OF_LISTS else None


def num_bytes(value: Any) -> int:
    """Bytes of a tensor (for a sparse one, of its indices and values), or of all tensors in nested lists."""
    if not isinstance(value, torch.Tensor):
        return sum(map(num_bytes, value))
    try:
        return value.nbytes
    except RuntimeError:
        if value.layout is not torch.sparse_coo:
            return 0  # no such layout in torch
        # Without the underscores these raise for uncoalesced gradients.
        return value._indices().nbytes + value._values().nbytes


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in nested lists, or None."""
    if isinstance(value, torch.Tensor):
        return value
    for item in value:
        tensor = first_tensor(item)
        if tensor is not None:
            return tensor
    return None


@dataclass(frozen=True)
class Group:
    """A process group's identity: plain data that does not keep the group alive.

    Attributes:
        name: torch's name of the group, the same on all its ranks.
        description: the name that the user or framework gave it.
        ranks: global ranks, in group order; empty if the group is not registered with torch.distributed.
        backend: e.g. ``nccl`` or ``gloo``.
        dimension: of parallelism that it serves: ``data``, ``tensor``, ...
        size: number of its ranks, also where they are not known.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    backend: str
    dimension: str = ""
    size: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup, dimensions: Mapping[str, str] | None = None) -> Group:
        """Describe a live process group. ``dimensions``: known dimensions, by group name."""
        known = dimensions.get(group.group_name) if dimensions else None
        try:
            ranks, backend = tuple(dist.get_process_group_ranks(group)), backend_name(group)
        except (KeyError, TypeError, ValueError):
            # Not created through torch.distributed, which then knows nothing about it; it may have no name either.
            ranks, backend = (), group.name()
        return cls(
            dimension=known or dimension_of(group.group_desc),
            name=group.group_name or _NO_NAME,
            description=group.group_desc,
            ranks=ranks,
            backend=backend,
            size=group.size(),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.ranks) or self.size

    @property
    def label(self) -> str:
        described = self.description and self.description != "undefined"
        return f"{self.description} ({self.name})" if described else self.name


def backend_name(group: dist.ProcessGroup | None = None) -> str:
    """The backend of a group (default: the default group); for each kind of device if they differ."""
    name = str(dist.get_backend(group))
    return name if name != "undefined" else str(dist.get_backend_config(group))


class Collective(msgspec.Struct, gc=False):
    """One collective, send or receive of a step, as recorded by the gate.

    A struct because it is created on the training thread, in a third of the time of a class with slots.

    Attributes:
        bytes_in, bytes_out: bytes of the tensors read and written on this rank.
        dtype: of its first tensor; None without tensors.
        coalesced: number of its coalescing block, from 1; 0 for none.
        peer: group rank of the other side of a send or receive; -1 for collectives and any-source receives.
        tag: of a send or receive, else 0.
        issued_ns: host time of issue, ``time.perf_counter_ns``.
        start, end: marks around the transfer in sequential mode; None if it was not serialised.
        posted: number of the batch in which an adapter posted it, from 1; 0 for none.
        asynchronous: the operator's ``async_op``. If True, NCCL runs it on a stream of its communicator, else on the
            issuing stream. Sends and receives are always asynchronous.
        on_device: whether its first tensor is on an accelerator.
        splits: for an uneven all-to-all, what is received from and sent to each rank, in rows or elements.
        serialiser: its serialiser, until it is issued.
        stream: the issuing stream, until it is issued, if the serialiser orders streams.
        name: of what it is for, as the framework knows it (``names.py``); empty if unknown.
    """

    operator: str
    group: Group
    bytes_in: int
    bytes_out: int
    dtype: torch.dtype | None
    coalesced: int
    peer: int
    tag: int
    issued_ns: int
    start: clocks.Mark | None = None
    end: clocks.Mark | None = None
    posted: int = 0
    asynchronous: bool = True
    on_device: bool = False
    splits: Splits | None = None
    serialiser: Serialiser | None = None
    stream: device.Stream | None = None
    name: str = ""

    @property
    def group_size(self) -> int:
        return self.group.num_ranks

    @property
    def point_to_point(self) -> bool:
        return self.operator in POINT_TO_POINT

    @property
    def key(self) -> tuple[str, str]:
        """Operator and group: equal for the same collective in two steps."""
        return (self.operator, self.group.name)

    @property
    def dimension(self) -> str:
        return self.group.dimension

    def __str__(self) -> str:
        return f"{self.operator} on group {self.group.label!r}"
