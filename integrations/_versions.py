"""What the adapters use of other packages that these do not promise to keep, asked for before it is needed.

What is missing then costs the measuring and one message, in which the version found stands beside those that work.
"""

from __future__ import annotations

from typing import Any

import torch

# Versions with which the tests pass.
TORCH = "2.8.0 and 2.13.0"
LIGHTNING = "2.4.0 and 2.6.6"
TRANSFORMERS = "5.23.0"
ACCELERATE = "1.15.0"


def lacks(package: str, version: str, what: str, known: str) -> str:
    """What to tell of something that is not there."""
    return f"{package} {version} has no {what}, which is needed here; known to work: {known}"


def torch_lacks(what: str) -> str:
    """The same of torch."""
    return lacks("torch", str(torch.__version__), what, TORCH)


def missing_of(holder: Any, *names: str) -> list[str]:
    """The names that an object, a class or a module does not have, with its own."""
    owner = getattr(holder, "__name__", type(holder).__name__).rpartition(".")[2]
    return [f"{owner}.{name}" for name in names if not hasattr(holder, name)]


def check(package: str, version: str, known: str, missing: list[str]) -> None:
    """Refuse a version in which something is missing.

    Raises:
        RuntimeError: with the version found, and those known to work.
    """
    if missing:
        raise RuntimeError(lacks(package, version, " and no ".join(missing), known))
