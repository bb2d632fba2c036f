"""The valve on a device: streams wait for it as for an event, and the host can let them go on."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

import torch

from overlap_callbacks.instruments.valve import Valve, valve_of
from tests.distributed import run_ranks
from tests.gpu.machine import take_device

LONG_S = 60.0


@contextlib.contextmanager
def _held(stream: torch.cuda.Stream) -> Iterator[torch.Tensor]:
    """A stream does nothing more until this number of the host's is one."""
    go_on = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    assert wait(*map(ctypes.c_void_p, (stream.cuda_stream, go_on.data_ptr())), 1, 0) == 0
    try:
        yield go_on
    finally:
        go_on[0] = 1
        torch.cuda.synchronize()


def _numbers(rank: int, patience_s: float) -> tuple[list[float], list[str]]:
    """What a stream reads that waits for another, which writes a two once the host lets it; and what was released."""
    device = take_device(rank)
    number, read, two = (torch.tensor([value]).to(device) for value in (1.0, 0.0, 2.0))  # copies: all that is computed
    compute, first = torch.cuda.current_stream(), torch.cuda.Stream()
    valve = valve_of(compute)
    assert isinstance(valve, Valve)
    torch.cuda.synchronize()
    released: list[str] = []
    heard = threading.Event()

    def on_release(what: str, _: float) -> None:
        released.append(what)
        heard.set()

    valve.begin(patience_s, on_release)
    with _held(first) as go_on:
        with torch.cuda.stream(first):
            number.copy_(two)
        valve.order(lambda waiting: waiting.wait_stream(first), [compute], "the first")
        read.copy_(number)
        if patience_s < LONG_S:
            assert heard.wait(LONG_S)
            compute.synchronize()  # the other stream is still held
        else:
            time.sleep(0.2)
            assert not compute.query()
        go_on[0] = 1
    valve.close()
    return read.tolist(), released


def _both(rank: int) -> tuple[object, object]:
    return _numbers(rank, LONG_S), _numbers(rank, 0.3)


def test_streams_wait_for_the_valve_until_what_they_wait_for_is_done_or_the_host_releases_them() -> None:
    ((ordered, released),) = run_ranks(_both, 1, backend="", timeout_s=120)
    assert ordered == ([2.0], [])
    assert released == ([1.0], ["the first"])
