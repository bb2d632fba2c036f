"""What the library says to its user, each kind of message once."""

from __future__ import annotations

import os

import torch.distributed as dist

from overlap_callbacks._log import logger, to_stderr
from overlap_callbacks.instruments.environment import hidden_names


class Notices:
    """Messages through ``logging``: warnings from every rank, with its number; everything else from rank 0 only.

    Args:
        hosts: whether hosts may be called by their names. If not, no message of this process names them from here on.
    """

    def __init__(self, *, hosts: bool = True) -> None:
        if not hosts:
            logger.hide(hidden_names("this host"))
        self._given: set[str] = set()

    def warn_once(self, key: str, message: str, error: Exception | None = None) -> None:
        """Warn, unless a message with this key was given before.

        Args:
            key: names the kind of message.
            message: for people.
            error: whose traceback is shown.
        """
        if key not in self._given:
            self._given.add(key)
            rank = _rank()
            logger.warning("overlap-callbacks%s: %s", f" (rank {rank})" if rank else "", message, exc_info=error)

    def info_once(self, key: str, message: str) -> None:
        """Inform, unless a message with this key was given before."""
        if key not in self._given:
            self._given.add(key)
            self.info(message)

    @staticmethod
    def info(message: str) -> None:
        """Say something that needs no action."""
        if not _rank():
            logger.info("overlap-callbacks: %s", message)

    @staticmethod
    def announce(message: str) -> None:
        """The final line. Printed to stderr if logging is not configured, so the user always sees it."""
        if _rank():
            return
        if logger.shows_info:
            logger.info("overlap-callbacks: %s", message)
        elif not logger.is_configured:
            to_stderr(logger.hidden(f"overlap-callbacks: {message}"))


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0
