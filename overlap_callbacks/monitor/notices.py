"""What the library says to its user: each kind of thing once."""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist

logger = logging.getLogger("overlap_callbacks")


class Notices:
    """Messages through ``logging``: warnings from every rank, with its number; the rest from rank 0 alone."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, kind: str, message: str, error: Exception | None = None) -> None:
        """Warn, unless a warning of this kind was given before.

        Args:
            kind: what it is about.
            message: for people.
            error: whose traceback is to be shown.
        """
        if kind not in self._said:
            self._said.add(kind)
            rank = _rank()
            logger.warning("overlap-callbacks%s: %s", f" (rank {rank})" if rank else "", message, exc_info=error)

    def tell_once(self, kind: str, message: str) -> None:
        """Something that is no trouble, unless something of this kind was said before."""
        if kind not in self._said:
            self._said.add(kind)
            self.tell(message)

    @staticmethod
    def tell(message: str) -> None:
        """Something that is no trouble."""
        if not _rank():
            logger.info("overlap-callbacks: %s", message)

    @staticmethod
    def announce(message: str) -> None:
        """The line at the end that a user looks for: seen even where Python's logging is left as it comes."""
        if _rank():
            return
        if logger.isEnabledFor(logging.INFO):
            logger.info("overlap-callbacks: %s", message)
        elif not logging.getLogger().handlers and not logger.handlers:
            print(f"overlap-callbacks: {message}", file=sys.stderr)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0
