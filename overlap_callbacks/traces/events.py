"""What is decoded of an event of a trace file, and in which types.

Most events of a file are not needed, and neither are the arguments of most of the others. So arguments are kept as
text, and those that are needed are decoded later (``stream.EventStream.args_of``).
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

NO_ARGS = msgspec.Raw(b"null")

Time = Union[int, float, str, None]


class Event(msgspec.Struct, gc=False):
    """One event. Its times are in microseconds, as JSON numbers are decoded. Its ``args`` are text."""

    ph: Union[str, None] = None
    cat: Union[str, None] = None
    name: Union[str, None] = None
    pid: Any = None
    tid: Any = None
    ts: Time = None
    dur: Time = None
    args: msgspec.Raw = NO_ARGS


class ExactEvent(Event, gc=False):
    """One event, with ``ts`` as text: a floating-point number may be too imprecise for its nanoseconds."""

    ts: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class LaunchArgs(msgspec.Struct, gc=False):
    """What is needed of the ``args`` of a call that launches a kernel."""

    correlation: Any = None


class RangeArgs(msgspec.Struct, gc=False):
    """What is needed of the ``args`` of torch's range of a collective: as text, for most are alike."""

    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


class Args(msgspec.Struct, gc=False):
    """What is needed of the ``args`` of other events, with the types that are in the file: they differ by version."""

    device: Any = None
    correlation: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")


_Triple = Union[tuple[int, int, int], None]


class KernelArgs(Args, gc=False):
    """The ``args`` of a kernel or a copy, as today's files have them: how it was launched can be a key of a dict."""

    grid: _Triple = None
    block: _Triple = None
    registers: Union[int, None] = msgspec.field(default=None, name="registers per thread")
    shared_memory: Union[int, None] = msgspec.field(default=None, name="shared memory")
    blocks_per_sm: Union[int, float, None] = msgspec.field(default=None, name="blocks per SM")


class OddKernelArgs(Args, gc=False):
    """The same where these are of other types: as text."""

    grid: msgspec.Raw = msgspec.Raw()
    block: msgspec.Raw = msgspec.Raw()
    registers: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="registers per thread")
    shared_memory: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="shared memory")
    blocks_per_sm: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="blocks per SM")
