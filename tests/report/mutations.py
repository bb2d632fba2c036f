"""Records with faults, seeded: what no run of this library writes, and a disk, an editor or an enemy may."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

# Python's json writes them as NaN, Infinity and -Infinity, which are no JSON.
_NUMBERS = (
    0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -1e308, 5e-324, 1e-300, -0.0, float("nan"), float("inf"),
    float("-inf"), 0.5, 1e17, 1e100, 1e-100,
)  # fmt: skip
_TEXTS = (
    "", "\x00", "\x1b[2J\x1b]0;x\x07", "\u202eevil", "\u2066\u2069", "\x9b31m", "\ud800", "</script><script>alert(1)",
    "{{ 7 * 7 }}", "[bold]x[/bold]", "[/]", "=1+1", "\r\n", "%s%n", "é" * 50, "a" * 100_000, "\U0001f600", "NaN",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [1, [2, [3]]], {"value": "x"})

Change = Callable[[Any, random.Random], Any]


def mutated(record: bytes, seed: int) -> bytes:
    """A record with one to four faults.

    Args:
        record: whole.
        seed: says which faults.
    """
    chance = random.Random(seed)
    lines = record.splitlines()
    for _ in range(chance.choice((1, 1, 2, 4))):
        chance.choice(_OF_LINES if chance.random() < 0.4 else (_in_tree,))(lines, chance)
    end = b"" if chance.random() < 0.1 else b"\n"
    return b"\n".join(lines) + end


# -- faults of lines


def _position(lines: list[bytes], chance: random.Random) -> int:
    """Mostly of the first line and of windows': of blocks there are many."""
    few = [i for i, line in enumerate(lines) if not line.startswith(b'{"record":"block"')]
    return chance.choice(few) if few and chance.random() < 0.8 else chance.randrange(len(lines))


def _truncate(lines: list[bytes], chance: random.Random) -> None:
    i = _position(lines, chance)
    lines[i] = lines[i][: chance.randrange(len(lines[i]) + 1)]


def _swap(lines: list[bytes], chance: random.Random) -> None:
    i, j = (chance.randrange(len(lines)) for _ in range(2))
    lines[i], lines[j] = lines[j], lines[i]


def _drop(lines: list[bytes], chance: random.Random) -> None:
    lines[_position(lines, chance)] = b""


def _repeat(lines: list[bytes], chance: random.Random) -> None:
    lines.insert(chance.randrange(len(lines)), lines[_position(lines, chance)])


def _bytes(lines: list[bytes], chance: random.Random) -> None:
    i = _position(lines, chance)
    line = bytearray(lines[i] or b" ")
    for _ in range(chance.choice((1, 3, 30))):
        line[chance.randrange(len(line))] = chance.choice((0, 9, 0x22, 0x2C, 0x5C, 0x7B, 0x80, 0xC0, 0xFF, 0x39, 0x65))
    lines[i] = bytes(line).replace(b"\n", b" ")


def _encode(lines: list[bytes], chance: random.Random) -> None:
    i = _position(lines, chance)
    text = lines[i].decode("utf-8", "replace")
    lines[i] = text.encode(chance.choice(("utf-16", "utf-32-le", "utf-8-sig", "utf-7"))).replace(b"\n", b" ")


def _nest(lines: list[bytes], chance: random.Random) -> None:
    depth = chance.choice((50, 900, 5000, 100_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nested = opening * depth + b"1" + closing * chance.choice((depth, 0))
    i = _position(lines, chance)
    if b":" in lines[i] and chance.random() < 0.7:
        head, colon, tail = lines[i].rpartition(chance.choice((b'":', b",")))
        lines[i] = head + colon + nested + b"," + tail
    else:
        lines.insert(i, nested)


def _double_key(lines: list[bytes], chance: random.Random) -> None:
    i = _position(lines, chance)
    line = _decoded(lines[i])
    if isinstance(line, dict) and line:
        key = chance.choice(sorted(line))
        lines[i] = lines[i][:-1] + b"," + json.dumps(key).encode() + b":" + _encoded(_value(None, chance)) + b"}"


def _number_literal(lines: list[bytes], chance: random.Random) -> None:
    literal = chance.choice((b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"0x10", b"1e-999"))
    i = _position(lines, chance)
    parts = lines[i].split(b":")
    j = chance.randrange(len(parts))
    head, comma, tail = parts[j].partition(b",")
    if head.strip(b"-0123456789.e") == b"" and head:
        parts[j] = literal + comma + tail
    lines[i] = b":".join(parts)


_OF_LINES = (_truncate, _swap, _drop, _repeat, _bytes, _encode, _nest, _double_key, _number_literal)


# -- faults within a line that stays JSON


def _in_tree(lines: list[bytes], chance: random.Random) -> None:
    i = _position(lines, chance)
    tree = _decoded(lines[i])
    if not isinstance(tree, dict) or not tree:
        return
    holder, key = _somewhere(tree, chance)
    if isinstance(holder, dict) and chance.random() < 0.15:
        del holder[key]
    else:
        holder[key] = _value(holder[key], chance)
    lines[i] = _encoded(tree)


def _somewhere(tree: Any, chance: random.Random) -> tuple[Any, Any]:
    """A container and a key of it, at any depth."""
    while True:
        key = chance.choice(sorted(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        below = tree[key]
        if not isinstance(below, dict | list) or not below or chance.random() < 0.25:
            return tree, key
        tree = below


def _value(old: Any, chance: random.Random) -> Any:
    """Another value: mostly of the type that was there, so that it is read."""
    if chance.random() < 0.7:
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return int(chance.choice([n for n in _NUMBERS if n == n and abs(n) < 1e300]))
        if isinstance(old, float):
            return chance.choice(_NUMBERS)
        if isinstance(old, str):
            return chance.choice(_TEXTS)
        if isinstance(old, list):
            return chance.choice(([], old[:1], old * 3, old[::-1]))
        if isinstance(old, dict):
            return {chance.choice(_TEXTS): value for value in list(old.values())[:3]}
    return chance.choice((*_NUMBERS, *_TEXTS, *_OTHERS))


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _encoded(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode("utf-8", "surrogatepass")
