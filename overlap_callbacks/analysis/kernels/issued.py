"""The kernels that a profile should show for the collectives that the gate saw issued.

Most collectives are one kernel each. Exceptions (for NCCL, see torch's ``ProcessGroupNCCL``):

- A collective on a group of one rank launches none: NCCL copies the tensor if it is out of place, else does nothing.
- A collective without bytes launches none.
- The members of a coalescing block are launched together when it ends: as one kernel, or a few.
- A batch of sends and receives is one kernel if it is coalesced, else one for each message.
- A collective of a library of the host (Gloo) launches none, even if its tensors are on the device: they are copied.
- A barrier waits for an all-reduce of one element.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

SEND_RECV = "send_recv"


class IssuedGroup(Protocol):
    """A process group."""

    @property
    def name(self) -> str:
        """The same name on all its ranks."""

    @property
    def backend(self) -> str:
        """Its backend, or one for each kind of device: ``nccl``, or ``cpu:gloo,cuda:nccl``."""

    @property
    def ranks(self) -> Sequence[int]:
        """Its global ranks; empty if unknown."""


class IssuedCollective(Protocol):
    """A collective, a send or a receive, as the gate saw it.

    Attributes:
        operator: the ``c10d`` operator.
        bytes_in, bytes_out: bytes of the tensors that it reads or sends, and writes or receives.
        peer: of a send or a receive, the group rank of the other side; -1 if unknown.
        asynchronous: whether NCCL runs it on a stream of its communicator; else it runs on the stream that issued it.
        on_device: whether its tensors are on an accelerator.
        coalesced: number of the coalescing block that it is a member of, from 1; 0 for none.
        name: of what it is for; empty if unknown.
    """

    operator: str
    bytes_in: int
    bytes_out: int
    peer: int
    asynchronous: bool
    on_device: bool
    coalesced: int
    name: str

    @property
    def group(self) -> IssuedGroup:
        """Its process group."""

    @property
    def group_size(self) -> int:
        """Ranks of its group."""

    @property
    def dimension(self) -> str:
        """Dimension of parallelism that its group serves."""

    @property
    def point_to_point(self) -> bool:
        """Whether it is a send or a receive."""


# The collectives of each profiled step, by its index, in the order in which they were issued.
Issued = Mapping[int, Sequence[IssuedCollective]]

# The kind that NCCL's kernel names (on the host, Gloo's ranges) give to a collective of another kind.
_ON_DEVICE = {"all_to_all": SEND_RECV, "gather": SEND_RECV, "scatter": SEND_RECV, "barrier": "all_reduce"}
_ON_HOST = {"reduce_scatter": "all_reduce"}
# Further kinds that a collective may run as; with tensors of unequal sizes, as a broadcast or reduction per rank.
_ALSO = {"all_gather": ("broadcast", SEND_RECV), "reduce_scatter": ("reduce", "all_reduce")}
# Kinds that copy engines can do (NCCL 2.28 and later, torch's symmetric memory): they move data without reducing it.
COPIED = frozenset({"all_gather", "all_to_all", "gather", "scatter", "broadcast"})
# Backends that launch no kernels for device tensors.
_ON_HOST_ONLY = frozenset({"gloo", "mpi", "ucc"})


class Expected(msgspec.Struct, frozen=True):
    """What should appear as one kernel, or as one for each member: a collective, a block or a batch.

    Attributes:
        kind: of the collective, e.g. ``all_to_all``.
        runs_as: the kind in the kernel's name, e.g. ``send_recv``.
        group: name of the process group.
        dimension: of parallelism.
        own_lane: whether it runs on a stream of its communicator; on the host, on a thread of its group.
        name: of what it is for; the first member's.
        members: number of collectives, or messages.
        bytes_in, bytes_out: bytes of the tensors that they read or send, and write or receive.
        size_bytes: the larger of the two; 0 if a kernel does an unknown part of it.
        peers: of messages, group ranks of their other sides, in the order of issue.
    """

    kind: str
    runs_as: str
    group: str
    dimension: str
    own_lane: bool
    name: str = ""
    members: int = 1
    bytes_in: int = 0
    bytes_out: int = 0
    size_bytes: int = 0
    peers: tuple[int, ...] = ()

    def __add__(self, other: Expected) -> Expected:
        """This block with one more member."""
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Expected(*mine[:6], *[a + b for a, b in zip(mine[6:], theirs[6:], strict=True)])

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, read and written."""
        return self.bytes_in + self.bytes_out

    def may_run_as(self, kind: str) -> bool:
        """Whether a kernel of this kind can be this collective; a kind without a rule can be any."""
        if name_rules.OTHER in (kind, self.kind):
            return True
        return kind in (self.kind, self.runs_as, *_ALSO.get(self.kind, ()))


def runs_as(kind: str, *, on_device: bool) -> str:
    """The kind in the kernel's name: NCCL implements an all-to-all by sends and receives."""
    return (_ON_DEVICE if on_device else _ON_HOST).get(kind, kind)


def is_device_profile(kernels: KernelTable, issued: Issued) -> bool:
    """Whether a profile shows communication as device kernels, rather than as ranges of a host library."""
    names = [
        kernels.names[number] for number in distinct_values(kernels.name[kernels.kind == Kind.COMMUNICATION]).tolist()
    ]
    if names:
        return not all(re.match(r"(gloo|ucc|mpi):", name) for name in names)
    return any(collective.on_device for collectives in issued.values() for collective in collectives)


def expected_kernels(collectives: Sequence[IssuedCollective], *, on_device: bool) -> list[Expected]:
    """What one step's collectives should launch, in the order of issue. Barriers have the kind ``barrier``."""
    found: list[Expected] = []
    place_of: dict[tuple[int, str], int] = {}
    known: dict[tuple[object, ...], Expected | None] = {}  # a step has thousands of collectives of few kinds
    for collective in collectives:
        group = collective.group.name
        key = (
            collective.operator, group, collective.asynchronous, collective.on_device,
            collective.bytes_in, collective.bytes_out, collective.peer,
        )  # fmt: skip
        if key not in known:
            known[key] = _expected(collective, on_device)
        part = known[key]
        if part is None:
            continue
        if collective.name:
            part = msgspec.structs.replace(part, name=collective.name)
        place = place_of.setdefault((collective.coalesced, group), len(found)) if collective.coalesced else len(found)
        if place < len(found):
            found[place] += part
        else:
            found.append(part)
    return found


def _expected(collective: IssuedCollective, on_device: bool) -> Expected | None:
    """What a collective should launch; None for nothing."""
    kind = SEND_RECV if collective.point_to_point else name_rules.collective_of(collective.operator)
    if collective.group_size == 1 or (on_device and is_of_host_library(collective)):
        return None
    if kind != "barrier" and (collective.on_device != on_device or not collective.bytes_in + collective.bytes_out):
        return None
    return Expected(
        kind=kind,
        runs_as=runs_as(kind, on_device=on_device),
        group=collective.group.name,
        dimension=collective.dimension,
        own_lane=not on_device or collective.asynchronous or collective.point_to_point,
        bytes_in=collective.bytes_in,
        bytes_out=collective.bytes_out,
        size_bytes=max(collective.bytes_in, collective.bytes_out),
        peers=(collective.peer,) if collective.point_to_point else (),
    )


def is_of_host_library(collective: IssuedCollective) -> bool:
    """Whether the group's backend for device tensors is a host library."""
    return _is_host_library(collective.group.backend, "cuda")


def runs_on_host(collective: IssuedCollective) -> bool:
    """Whether a host library runs the collective, wherever its tensors are."""
    return _is_host_library(collective.group.backend, "cuda" if collective.on_device else "cpu")


@functools.cache
def _is_host_library(backend: str, device: str) -> bool:
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return by_device.get(device, "" if by_device else backend) in _ON_HOST_ONLY


def _members(whole: Expected) -> list[Expected]:
    """A block's members as one kernel each; their single sizes are unknown."""
    return [whole if whole.members == 1 else msgspec.structs.replace(whole, members=1, size_bytes=0)] * whole.members


def readings(expected: Sequence[Expected]) -> Iterator[list[Expected]]:
    """The ways a step may have run, likeliest first: without or with barriers, blocks whole or in parts."""
    without = [part for part in expected if part.kind != "barrier"]
    for way in (without, list(expected)) if len(without) < len(expected) else (without,):
        yield way
        if any(whole.members > 1 for whole in way):
            yield [part for whole in way for part in _members(whole)]
