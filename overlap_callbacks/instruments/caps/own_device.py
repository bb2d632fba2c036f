"""The power limit of this process's own GPU, for an arm of a job: each rank caps its own."""

from __future__ import annotations

import functools

from overlap_callbacks.instruments.caps.capped import KeeperProcess
from overlap_callbacks.instruments.caps.drivers import find_driver
from overlap_callbacks.instruments.caps.keeper import Request, default_folder
from overlap_callbacks.instruments.caps.settings import CapError, Caps, check
from overlap_callbacks.instruments.power.discovery import identify

# Maximum time that training waits for the keeper: a driver sets a limit within milliseconds.
_ANSWER_S = 10.0


def device_for(caps: Caps) -> OwnDevice:
    """This process's GPU, if it takes a power limit.

    Raises:
        CapError: the driver does not know the GPU, it cannot have this limit or has it already, this process may not
            set it, or somebody else caps it.
    """
    identity = identify()
    driver = find_driver()
    try:
        bare = identity.uuid.removeprefix("GPU-")
        uuid = next((known for known in driver.uuids() if bare and known.removeprefix("GPU-") == bare), "")
        if not uuid:
            raise CapError(f"the driver knows no GPU with the UUID {identity.uuid or 'unknown'}")
        check(driver, uuid, caps)
        own = _own(uuid)  # its keeper first puts back what a job that was killed left
        try:
            now_w = driver.power_limit_w(uuid)
            if now_w == caps.power_w:
                raise CapError(f"the power limit is {now_w:g} W already: nothing would change")
            driver.set_power_limit(uuid, now_w)  # refused without the right to set one
        except CapError:
            own.end()
            raise
    finally:
        driver.close()
    return own


@functools.cache
def _own(uuid: str) -> OwnDevice:
    return OwnDevice(uuid)


class OwnDevice:
    """A GPU whose power limit only this process changes, by a keeper that outlives it and restores.

    Raises:
        CapError: somebody else caps it, or the keeper does not start; its methods raise it too.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._keeper = KeeperProcess(default_folder(), uuid, _ANSWER_S)
        self._is_capped = False

    def cap(self, caps: Caps) -> None:
        """Set and verify a limit; returns once it is in force."""
        self._is_capped = True
        self._ask(Request(caps, [self._uuid]))

    def restore(self) -> None:
        """Restore the limit that the device had before."""
        if self._is_capped:
            self._is_capped = False
            self._ask(Request())

    def end(self) -> None:
        """End the keeper; the next ``device_for`` starts another one."""
        _own.cache_clear()
        self._keeper.end()

    def _ask(self, request: Request) -> None:
        try:
            self._keeper.ask(request)
        except CapError:
            self._is_capped = False
            _own.cache_clear()
            self._keeper.end()  # restores, with or without the keeper, or raises why not
            raise
