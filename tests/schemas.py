"""Holds what ``--json`` prints against the schemas in the package; for tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from overlap_callbacks import cli

FOLDER = Path(cli.__file__).parent / "schemas"
# More takes jsonschema seconds.
_MAX_BYTES = 500_000


@functools.cache
def validator(command: str) -> Any:
    import jsonschema

    schema = json.loads((FOLDER / f"{'show' if command == 'demo' else command}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def faults(command: str, content: Any) -> list[str]:
    """What the schema of a command refuses, each with its place; at most five."""
    found = [f"{error.json_path}: {error.message[:300]}" for error in validator(command).iter_errors(content)]
    return found[:5]


def check(arguments: tuple[str, ...], text: str) -> None:
    """Hold what ``overlap`` printed with these arguments against the schema, if it is JSON of moderate size."""
    if "--json" not in arguments or "--csv" in arguments or not text or len(text) > _MAX_BYTES:
        return
    found = faults(arguments[0], json.loads(text))
    assert not found, found
