"""Plain attributes of a framework's objects that a repeated step may change: held before it, and put back after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Values that are put back as they are.
_PLAIN = (type(None), bool, int, float, str)


class HeldAttributes:
    """Plain values of some objects, and dictionaries and lists, as they were when this was made.

    Dictionaries and lists come back as the same objects with what they held. Of tensors and other objects it is held
    which they were, in a dictionary or list, and not what was in them.

    Args:
        holders: the objects, and of each whether its dictionaries and lists are put back too.
    """

    def __init__(self, holders: Sequence[tuple[Any, bool]]) -> None:
        self._holders = [
            (holder, whole, {name: _held(value) for name, value in vars(holder).items() if _counts(value, whole)})
            for holder, whole in holders
        ]

    def put_back(self) -> None:
        """Put everything back, and take away what is there since."""
        for holder, whole, values in self._holders:
            for name in [name for name, value in vars(holder).items() if _counts(value, whole) and name not in values]:
                delattr(holder, name)
            for name, held in values.items():
                vars(holder)[name] = _restored(held)


class _Container:
    """A dictionary or list, and what it held.

    Args:
        container: the very object.
    """

    def __init__(self, container: Any) -> None:
        self._container = container
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        self._items = [(key, _held(container[key])) for key in keys]

    def restored(self) -> Any:
        self._container.clear()
        for key, held in self._items:
            if isinstance(self._container, dict):
                self._container[key] = _restored(held)
            else:
                self._container.append(_restored(held))
        return self._container


def _counts(value: Any, whole: bool) -> bool:
    return isinstance(value, (*_PLAIN, dict, list)) if whole else isinstance(value, _PLAIN)


def _held(value: Any) -> Any:
    return _Container(value) if type(value) in (dict, list) else value


def _restored(held: Any) -> Any:
    return held.restored() if isinstance(held, _Container) else held
