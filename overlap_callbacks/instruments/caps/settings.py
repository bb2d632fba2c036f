"""Caps and earlier settings, and how a device is changed and restored. Drivers are behind an interface."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

# How often restoring a value is tried, and the time between tries.
RESTORE_TRIES = 5
_RETRY_S = 0.2
# Drivers store a limit in whole milliwatts.
_SAME_W = 1e-3


class CapError(RuntimeError):
    """A cap was not set; every value is as before, unless the message says otherwise."""


class Caps(msgspec.Struct, frozen=True):
    """A power limit in watts and a maximum SM clock in MHz for an experiment; None to leave it unchanged."""

    power_w: float | None = None
    clock_mhz: int | None = None

    def __bool__(self) -> bool:
        return self.power_w is not None or self.clock_mhz is not None


class Before(msgspec.Struct, frozen=True):
    """Earlier settings of a device: its power limit (None if not changed), and whether its clocks will be locked.

    Drivers do not report whether clocks were already locked: they are unlocked afterwards.
    """

    uuid: str
    power_w: float | None = None
    clocks_locked: bool = False


class Driver(Protocol):
    """Interface of a driver. Devices are named by UUID; failures raise ``CapError``."""

    def uuids(self) -> list[str]:
        """All devices that can be capped."""

    def power_limit_w(self, uuid: str) -> float:
        """The current power limit."""

    def power_range_w(self, uuid: str) -> tuple[float, float]:
        """The device's lowest and highest possible power limit."""

    def set_power_limit(self, uuid: str, power_w: float) -> None:
        """Set the power limit."""

    def clocks_mhz(self, uuid: str) -> tuple[int, int]:
        """The device's lowest and highest SM clock."""

    def sm_clock_mhz(self, uuid: str) -> int:
        """The current SM clock."""

    def lock_clocks(self, uuid: str, lowest_mhz: int, highest_mhz: int) -> None:
        """Keep the SM clock between two bounds."""

    def unlock_clocks(self, uuid: str) -> None:
        """Let the device choose its clock again."""

    def undo_command(self, before: Before) -> str:
        """The command that restores a device."""

    def close(self) -> None:
        """Release the driver."""


def check(driver: Driver, uuid: str, caps: Caps) -> None:
    """Raise a CapError for caps outside the device's range."""
    if caps.power_w is not None:
        low_w, high_w = driver.power_range_w(uuid)
        if not low_w <= caps.power_w <= high_w:
            raise CapError(f"the power cap of {uuid} must be from {low_w:g} to {high_w:g} W, got {caps.power_w:g}")
    if caps.clock_mhz is not None:
        low_mhz, high_mhz = driver.clocks_mhz(uuid)
        if not low_mhz <= caps.clock_mhz <= high_mhz:
            raise CapError(f"the clock cap of {uuid} must be from {low_mhz} to {high_mhz} MHz, got {caps.clock_mhz}")


def read_before(driver: Driver, uuid: str, caps: Caps) -> Before:
    """The current settings of a device, where the caps will change them."""
    power_w = None if caps.power_w is None else driver.power_limit_w(uuid)
    return Before(uuid, power_w, clocks_locked=caps.clock_mhz is not None)


def set_and_verify(driver: Driver, uuid: str, caps: Caps) -> None:
    """Set the caps of a device, and read back what is in force.

    On a ``CapError`` the driver refused, or did not do what it reported; the device may be partly changed.
    """
    if caps.power_w is not None:
        driver.set_power_limit(uuid, caps.power_w)
        found_w = driver.power_limit_w(uuid)
        if abs(found_w - caps.power_w) > _SAME_W:
            raise CapError(f"the power limit of {uuid} was set to {caps.power_w:g} W, and reads {found_w:g} W")
    if caps.clock_mhz is not None:
        driver.lock_clocks(uuid, driver.clocks_mhz(uuid)[0], caps.clock_mhz)
        found_mhz = driver.sm_clock_mhz(uuid)
        if found_mhz > caps.clock_mhz:
            raise CapError(f"the SM clock of {uuid} was capped at {caps.clock_mhz} MHz, and is {found_mhz} MHz")


def put_back(driver: Driver, before: Before, sleep: Callable[[float], None] = time.sleep) -> str:
    """Restore a device and read it back, in several tries. Returns why it is not restored; empty if it is."""
    why = ""
    for attempt in range(RESTORE_TRIES):
        if attempt:
            sleep(_RETRY_S * 2**attempt)
        why = _put_back_once(driver, before)
        if not why:
            return ""
    return why


def _put_back_once(driver: Driver, before: Before) -> str:
    failed = []
    if before.clocks_locked:
        try:
            driver.unlock_clocks(before.uuid)
        except CapError as error:
            failed.append(str(error))
    if before.power_w is not None:
        try:
            _put_back_power(driver, before.uuid, before.power_w)
        except CapError as error:
            failed.append(str(error))
    return "; ".join(failed)


def _put_back_power(driver: Driver, uuid: str, power_w: float) -> None:
    # A limit that cannot be read may be the cap, so set it anyway.
    with contextlib.suppress(CapError):
        if abs(driver.power_limit_w(uuid) - power_w) <= _SAME_W:
            return
    driver.set_power_limit(uuid, power_w)
    found_w = driver.power_limit_w(uuid)
    if abs(found_w - power_w) > _SAME_W:
        raise CapError(f"the power limit of {uuid} reads {found_w:g} W, not {power_w:g} W")


def not_put_back(driver: Driver, before: Before, why: str) -> str:
    """The message for the user, with the command to type."""
    return (
        f"THE DEVICE {before.uuid} IS NOT AS BEFORE: {why}. Put it back by hand, as root: {driver.undo_command(before)}"
    )
