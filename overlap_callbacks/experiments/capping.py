"""Caps for parts of an experiment, and checks of which are possible."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from overlap_callbacks.experiments.sweep import CannotGoOnError
from overlap_callbacks.instruments.caps.capped import capped
from overlap_callbacks.instruments.caps.settings import CapError, Caps, Driver

Cap = Callable[[Caps], AbstractContextManager[object]]
_OPTIONS = "--power-cap and --clock-cap"


class NotPossibleError(Exception):
    """A part of an experiment cannot have its caps; every device has its earlier settings."""


class Capped(Protocol):
    """A part of an experiment with its own caps; None for the device's limit."""

    @property
    def power_cap_w(self) -> float | None: ...

    @property
    def clock_cap_mhz(self) -> float | None: ...


def caps_of(part: Capped) -> Caps:
    """The caps requested by a part of an experiment; falsy if none."""
    clock_mhz = part.clock_cap_mhz
    return Caps(part.power_cap_w, None if clock_mhz is None else round(clock_mhz))


def refuse_on_cpu(asked: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if ``power_caps_w`` or ``clock_caps_mhz`` were requested and ranks are on the CPU."""
    for option, name in (("--power-cap", "power_caps_w"), ("--clock-cap", "clock_caps_mhz")):
        if any([value is not None for value in asked.get(name, ())]):
            raise ValueError(f"{option} caps GPUs, and the ranks are on the CPU here: leave it out")


def check_may_cap(parts: Iterable[Capped], find_driver: Callable[[], Driver] | None = None) -> None:
    """Raise a ``ValueError`` at once if parts have caps and this process is not root, or the GPUs have no driver."""
    if not any([bool(caps_of(part)) for part in parts]):
        return
    if os.geteuid() != 0:
        raise ValueError(f"{_OPTIONS} need root: run as root, or leave them out")
    from overlap_callbacks.instruments.caps import drivers

    try:
        (find_driver or drivers.find_driver)().close()
    except CapError as error:
        raise ValueError(f"{_OPTIONS} need the driver's library: {error}") from None


@contextlib.contextmanager
def capped_part(wanted: Caps, cap: Cap = capped) -> Iterator[None]:
    """Cap all GPUs of the host while a part of an experiment runs; ``cap`` sets and restores the caps.

    Raises:
        NotPossibleError: a cap cannot be set; every device has its earlier settings.
        CannotGoOnError: a device could not be restored. The message has the command to type.
    """
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(cap(wanted))
    except CapError as error:
        raise NotPossibleError(str(error)) from None
    try:
        yield
    finally:
        try:
            stack.close()
        except CapError as error:
            raise CannotGoOnError(str(error)) from None
