"""A quick start and a quick end: what a command loads is never looked through for garbage."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Load modules in this context. None of what they make is garbage, and to look through it takes long.

    Three hundred modules make some thirty thousand objects that the collector follows. It would look at the new ones
    some sixty times while they load, and at all of them when the process ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody has put objects aside, which stay there
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, unseen: they are looked at again when there is much new garbage
        if was_enabled:
            gc.enable()


def end_quickly() -> None:
    """Let the process end without a last look for garbage among all objects: its memory is freed as a whole.

    Only for commands after which nothing in a cycle of references waits for its finalizer.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
