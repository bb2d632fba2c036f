"""The library's messages. Log handlers, filters and stderr are the user's, and may fail; such failures end here."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any


class GuardedLogger:
    """Like a logger, but never raises: its handlers and filters are the user's."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._hide: Callable[[str], str] | None = None

    def hide(self, change: Callable[[str], str]) -> None:
        """Pass every message and traceback through ``change`` from now on."""
        self._hide = change

    def warning(self, message: str, *args: object, **options: Any) -> None:
        """Warn. If a handler raises, the message goes to stderr, so that it is not lost."""
        try:
            message, args, options = self._hidden(message, args, options)
            self._logger.warning(message, *args, stacklevel=2, **options)
        except Exception:
            to_stderr(message % args)

    def info(self, message: str, *args: object, **options: Any) -> None:
        with contextlib.suppress(Exception):
            message, args, options = self._hidden(message, args, options)
            self._logger.info(message, *args, stacklevel=2, **options)

    def debug(self, message: str, *args: object, **options: Any) -> None:
        with contextlib.suppress(Exception):
            message, args, options = self._hidden(message, args, options)
            self._logger.debug(message, *args, stacklevel=2, **options)

    def hidden(self, text: str) -> str:
        return text if self._hide is None else self._hide(text)

    def _hidden(
        self, message: str, args: tuple[object, ...], options: dict[str, Any]
    ) -> tuple[str, tuple[object, ...], dict[str, Any]]:
        if self._hide is None:
            return message, args, options
        text, error = (message % args) if args else message, options.get("exc_info")
        if isinstance(error, BaseException):
            text = "\n".join([text, "".join(traceback.format_exception(error)).rstrip()])
        return "%s", (self.hidden(text),), {name: value for name, value in options.items() if name != "exc_info"}

    @property
    def shows_info(self) -> bool:
        return self._logger.isEnabledFor(logging.INFO)

    @property
    def is_configured(self) -> bool:
        """Whether the user has configured where messages go."""
        return bool(logging.getLogger().handlers or self._logger.handlers)


def to_stderr(message: str) -> None:
    """Print to stderr. If it is closed or full, the message is lost."""
    with contextlib.suppress(Exception):
        print(message, file=sys.stderr)


logger = GuardedLogger(logging.getLogger("overlap_callbacks"))
