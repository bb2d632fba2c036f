"""What the library says to its user: each kind of thing once."""

from __future__ import annotations

import logging

logger = logging.getLogger("overlap_callbacks")


class Notices:
    """Warnings through ``logging``, each kind once for each instance."""

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
            logger.warning("overlap-callbacks: %s", message, exc_info=error)

    @staticmethod
    def tell(message: str) -> None:
        """Something that is no trouble."""
        logger.info("overlap-callbacks: %s", message)
