"""How a kernel of a trace file was launched, by the arguments of its event."""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape
from overlap_callbacks.traces.events import OddKernelArgs

_LAUNCH_METADATA = ("grid", "block", "registers per thread", "shared memory", "blocks per SM")


def launched_as(args: Any) -> tuple[Any, ...]:
    """How a kernel was launched, in the order of ``_LAUNCH_METADATA``; None or no text for what is not known."""
    parts = (args.grid, args.block, args.registers, args.shared_memory, args.blocks_per_sm)
    return tuple(map(bytes, parts)) if type(args) is OddKernelArgs else parts


def launch_shape(launched_as: tuple[Any, ...]) -> LaunchShape | str:
    """The shape of a launch; the text of its grid and block where they make no sense."""
    known: dict[str, Any] = {}
    try:
        for name, value in zip(_LAUNCH_METADATA, launched_as, strict=True):
            if value is not None and value != b"":
                known[name] = msgspec.json.decode(value) if isinstance(value, bytes) else value
        shape = LaunchShape.of(known)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        shape = None
    texts = [part if isinstance(part, bytes) else msgspec.json.encode(part) for part in launched_as[:2] if part]
    return shape or safe_text.clean(b" ".join(texts).decode(errors="replace").strip())
