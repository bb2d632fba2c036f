"""The link on a GPU: one kernel per collective, on the streams on which NCCL would run it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from overlap_callbacks.experiments.loopback.collectives import KERNEL_NAMES, Call, LoopSettings, Move

_KINDS = {kind: number for number, kind in enumerate(KERNEL_NAMES)}  # in the order of the source
_TYPES = {
    torch.float32: 1, torch.float64: 2, torch.float16: 3, torch.bfloat16: 4, torch.int32: 5, torch.int64: 6,
}  # fmt: skip


class _Move(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("bytes", ctypes.c_ulonglong),
        ("factor", ctypes.c_float),
        ("type", ctypes.c_int),
    )

    @classmethod
    def of(cls, move: Move) -> _Move:
        dst, src = move.dst, move.src
        assert dst.is_contiguous()
        assert src.is_contiguous()
        assert dst.nbytes == src.nbytes
        scaled = move.factor != 1.0
        if scaled and dst.dtype not in _TYPES:
            raise NotImplementedError(f"the phantom cannot sum tensors of {dst.dtype}")
        return cls(dst.data_ptr(), src.data_ptr(), dst.nbytes, move.factor, _TYPES[dst.dtype] if scaled else 0)


def available() -> bool:
    """Whether there is a GPU, and compiled kernels for it or a compiler."""
    return torch.cuda.is_available() and (find_library() is not None or compiler() is not None)


@functools.cache
def load_library() -> Any:
    """The compiled kernels for the current device."""
    library = find_library()
    if library is None:
        major, minor = torch.cuda.get_device_capability()
        library = compile_library(f"sm_{major}{minor}", cache())
    return open_library(str(library))


def open_library(path: str) -> Any:
    """A compiled library, with the types of its functions."""
    library = ctypes.CDLL(path)
    library.loopback_launch.argtypes = (
        ctypes.c_int, ctypes.POINTER(_Move), ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_void_p,
    )  # fmt: skip
    library.loopback_launch.restype = ctypes.c_int
    library.loopback_max_moves.restype = ctypes.c_int
    assert library.loopback_move_bytes() == ctypes.sizeof(_Move)
    return library


class DeviceLink:
    """Runs collectives as kernels on the current device; asynchronous ones on a stream per group name."""

    def __init__(self) -> None:
        self.streams: dict[str, torch.cuda.Stream] = {}
        self._library = load_library()

    def issue(self, call: Call, group: dist.ProcessGroup, settings: LoopSettings) -> dist.Work | None:
        """Issue a collective, as ProcessGroupNCCL does since torch 2.8.

        An asynchronous one runs on the communicator's own stream, which first waits for the current stream. A
        synchronous one runs on the current stream, and has no work.
        """
        if not call.asynchronous:
            self._run(call, group, settings)
            return None
        current = torch.cuda.current_stream()
        stream = self.streams.get(group.group_name)
        if stream is None:
            stream = self.streams[group.group_name] = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._run(call, group, settings)
            outputs = call.output_tensors
            for tensor in (*outputs, *call.inputs):
                tensor.record_stream(stream)  # a caller may drop its tensors before the kernel has run
            future: Any = torch.futures.Future(devices=[torch.cuda.current_device()])
            future.set_result(outputs)  # after an event on this stream, which the waiting stream will wait for
            work: dist.Work = c10d._create_work_from_future(future)  # type: ignore[attr-defined]
            return work

    def _run(self, call: Call, group: dist.ProcessGroup, settings: LoopSettings) -> None:
        moves = call.moves(group.size())
        if group.size() == 1:  # NCCL launches no kernel: it copies what is not in place
            for move in moves:
                if move.dst.data_ptr() != move.src.data_ptr():
                    move.dst.copy_(move.src.view_as(move.dst))
            return
        self.launch(call.kind, moves, ctas=settings.ctas, length_ns=settings.length_ns(call.num_bytes))

    def launch(self, kind: str, moves: Sequence[Move], *, ctas: int, length_ns: int) -> None:
        """Launch a collective's kernel on the current stream; several if it has very many tensors.

        Args:
            kind: e.g. ``all_reduce``.
            moves: what it writes; may be empty.
            ctas: thread blocks, of 512 threads each.
            length_ns: minimum total duration of the kernels.
        """
        stream = torch.cuda.current_stream().cuda_stream
        limit = self._library.loopback_max_moves()
        parts = [list(moves[i : i + limit]) for i in range(0, len(moves), limit)] or [[]]
        for part in parts:
            array = (_Move * len(part))(*[_Move.of(move) for move in part])
            error = self._library.loopback_launch(
                _KINDS[kind], array, len(part), ctas, length_ns // len(parts), ctypes.c_void_p(stream)
            )
            if error:
                raise RuntimeError(f"the kernel of {kind} was not launched: CUDA error {error}")

    def close(self) -> None:
        torch.cuda.synchronize()
        self.streams.clear()


# -- building the kernels


# The link's kernels are compiled here by nvcc, or come precompiled from elsewhere.
SOURCE = Path(__file__).with_name("kernels.cu")
# A compiled library to use instead of the source; and the folder of compiled ones.
LIBRARY_VARIABLE, CACHE_VARIABLE = "LOOPBACK_LIBRARY", "LOOPBACK_CACHE"
PACKED = "packed"  # in place of an architecture: for several of them


def compiler() -> str | None:
    """This machine's nvcc; None without one."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def compile_library(architecture: str, folder: Path, code: Sequence[str] = ()) -> Path:
    """Compile the kernels, unless ``folder`` already has them.

    Args:
        architecture: for nvcc, e.g. ``sm_90``, or ``PACKED``.
        folder: created if missing.
        code: nvcc's options for the code; by default of the architecture.

    Raises:
        RuntimeError: there is no nvcc.
        subprocess.CalledProcessError: it fails.
    """
    nvcc = compiler()
    if nvcc is None:
        raise RuntimeError(
            f"there is no nvcc: compile {SOURCE.name} elsewhere and set {LIBRARY_VARIABLE} to the result"
        )
    library = library_file(architecture, folder)
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.so")
        options = ("-O2", "-shared", "-Xcompiler", "-fPIC", *(code or (f"-arch={architecture}",)))
        subprocess.run([nvcc, *options, str(SOURCE), "-o", str(partial)], check=True, capture_output=True, text=True)
        partial.rename(library)  # atomic
    return library


def find_library() -> Path | None:
    """The precompiled library; None if there is none for these sources."""
    given = os.environ.get(LIBRARY_VARIABLE)
    if given is not None:
        return Path(given)
    packed = library_file(PACKED, cache())
    # One compiled here fits this machine's driver and device best.
    return packed if compiler() is None and packed.exists() else None


def cache() -> Path:
    """The folder of compiled libraries."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path(tempfile.gettempdir(), f"loopback-{os.getuid()}")


def library_file(architecture: str, folder: Path) -> Path:
    """The file of a library; its name depends on the sources."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return folder / f"libloopback-{architecture}-{name}.so"
