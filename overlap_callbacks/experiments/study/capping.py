"""The caps of a configuration around its job, as the study's runner needs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from overlap_callbacks.analysis.results.study import Configuration
from overlap_callbacks.experiments.caps.capped import capped
from overlap_callbacks.experiments.caps.settings import CapError, Caps
from overlap_callbacks.experiments.study.runner import CannotGoOnError, NotPossibleError

Cap = Callable[[Caps], AbstractContextManager[object]]


def check_may_cap(configurations: tuple[Configuration, ...]) -> None:
    """Refuse at once what would fail in each job.

    Raises:
        ValueError: caps were asked for, and this process is not root.
    """
    if any([caps_of(configuration) for configuration in configurations]) and os.geteuid() != 0:
        raise ValueError("--power-cap and --clock-cap need root: run as root, or leave them out")


def caps_of(configuration: Configuration) -> Caps:
    """What a configuration asks for; false if it asks for nothing."""
    clock_mhz = configuration.clock_cap_mhz
    return Caps(configuration.power_cap_w, None if clock_mhz is None else round(clock_mhz))


@contextlib.contextmanager
def capped_job(configuration: Configuration, cap: Cap = capped) -> Iterator[None]:
    """All GPUs of the host have the configuration's caps while its job runs.

    Args:
        configuration: whose job runs in the block.
        cap: what sets caps and puts them back.

    Raises:
        NotPossibleError: a cap cannot be set; every device is as it was.
        CannotGoOnError: a device is not as it was before. The message has the command to type.
    """
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(cap(caps_of(configuration)))
    except CapError as error:
        raise NotPossibleError(str(error)) from None
    try:
        yield
    finally:
        try:
            stack.close()
        except CapError as error:
            raise CannotGoOnError(str(error)) from None
