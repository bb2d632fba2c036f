"""Caps of power and clocks around the parts of an experiment: what may be asked for, and who sets it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from overlap_callbacks.experiments.caps.capped import capped
from overlap_callbacks.experiments.caps.settings import CapError, Caps, Driver
from overlap_callbacks.experiments.sweep import CannotGoOnError

Cap = Callable[[Caps], AbstractContextManager[object]]
_OPTIONS = "--power-cap and --clock-cap"


class NotPossibleError(Exception):
    """What stands around a part of an experiment, such as a power cap, cannot be; every device is as it was."""


class Capped(Protocol):
    """A part of an experiment with caps of its own; None for a device's own limit."""

    @property
    def power_cap_w(self) -> float | None: ...

    @property
    def clock_cap_mhz(self) -> float | None: ...


def caps_of(part: Capped) -> Caps:
    """What a part of an experiment asks for; false if it asks for nothing."""
    clock_mhz = part.clock_cap_mhz
    return Caps(part.power_cap_w, None if clock_mhz is None else round(clock_mhz))


def refuse_on_cpu(power_caps_w: Sequence[float | None], clock_caps_mhz: Sequence[float | None]) -> None:
    """Refuse caps where ranks are on the CPU.

    Raises:
        ValueError: a cap was asked for.
    """
    for option, asked in (("--power-cap", power_caps_w), ("--clock-cap", clock_caps_mhz)):
        if any([value is not None for value in asked]):
            raise ValueError(f"{option} caps GPUs, and the ranks are on the CPU here: leave it out")


def check_may_cap(parts: Iterable[Capped], find_driver: Callable[[], Driver] | None = None) -> None:
    """Refuse at once what would fail everywhere.

    Args:
        parts: of the experiment.
        find_driver: finds the driver of the GPUs; None for that of this machine.

    Raises:
        ValueError: there are some, and this process is not root, or there is no driver.
    """
    if not any([bool(caps_of(part)) for part in parts]):
        return
    if os.geteuid() != 0:
        raise ValueError(f"{_OPTIONS} need root: run as root, or leave them out")
    from overlap_callbacks.experiments.caps import drivers

    try:
        (find_driver or drivers.find_driver)().close()
    except CapError as error:
        raise ValueError(f"{_OPTIONS} need the driver's library: {error}") from None


@contextlib.contextmanager
def capped_part(wanted: Caps, cap: Cap = capped) -> Iterator[None]:
    """All GPUs of the host have caps while a part of an experiment runs.

    Args:
        wanted: the caps.
        cap: what sets caps and puts them back.

    Raises:
        NotPossibleError: a cap cannot be set; every device is as it was.
        CannotGoOnError: a device is not as it was before. The message has the command to type.
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
