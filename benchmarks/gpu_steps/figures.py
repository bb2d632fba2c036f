"""What a step measures: figures, each with what it proves and what is expected of it.

A step writes each figure to a file as soon as it has it, one JSON object a line. If the step then crashes or hangs, the
figures up to there are kept. This module imports nothing but the standard library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Expectation:
    """What must hold of a value.

    Attributes:
        text: the condition, in words.
        holds: whether a value meets it.
    """

    text: str
    holds: Callable[[Any], bool]


def below(limit: float) -> Expectation:
    return Expectation(f"below {limit:g}", lambda value: value < limit)


def above(limit: float) -> Expectation:
    return Expectation(f"above {limit:g}", lambda value: value > limit)


def near(truth: float, relative: float) -> Expectation:
    return Expectation(
        f"{truth:.4g} within {relative:.0%}", lambda value: math.isclose(value, truth, rel_tol=relative, abs_tol=1e-12)
    )


def equal(truth: Any) -> Expectation:
    return Expectation(str(truth), lambda value: bool(value == truth))


def contains_zero() -> Expectation:
    """Of an interval ``(low, high)``, to a millionth: on the simulated GPU steps differ by nanoseconds."""
    return Expectation("contains zero", lambda interval: interval[0] <= 1e-6 and interval[1] >= -1e-6)


YES = Expectation("yes", lambda value: value is True)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: unique in its step.
        value: a number, a text, a truth value or a pair; None if it could not be measured.
        unit: of the value; empty if it has none.
        proves: what follows if the expectation is met.
        expected: the expectation in words; empty if there is none.
        passed: whether it is met; None if there is none.
    """

    name: str
    value: Any
    unit: str
    proves: str
    expected: str
    passed: bool | None

    def shown(self) -> str:
        """The value with its unit, for the table."""
        value = self.value
        if value is None:
            return "not measured"
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, float):
            text = f"{value:.4g}"
        elif isinstance(value, (list, tuple)):
            text = "[" + ", ".join(f"{part:.4g}" if isinstance(part, float) else str(part) for part in value) + "]"
        else:
            text = str(value)
        return f"{text} {self.unit}".strip()


class Recorder:
    """Takes the figures of a step as they are measured.

    Args:
        path: file that the figures and raw values are appended to.
        on_cpu: whether the step runs in its CPU form.

    Attributes:
        on_cpu: whether the step runs in its CPU form.
    """

    def __init__(self, path: Path, *, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self._path = path

    def figure(
        self, name: str, value: Any, unit: str = "", *, proves: str = "", expect: Expectation | None = None
    ) -> None:
        """Keep a figure. A value of None that something is expected of has not met the expectation."""
        passed = None if expect is None else value is not None and expect.holds(value)
        figure = Figure(name, value, unit, proves, "" if expect is None else expect.text, passed)
        print(f"{name}: {figure.shown()}" + (f" (expected: {figure.expected})" if figure.expected else ""), flush=True)
        self._write({"figure": asdict(figure)})

    def copy(self, figure: Figure) -> None:
        """Keep a figure that a part of the step has measured in a process of its own."""
        print(f"{figure.name}: {figure.shown()}", flush=True)
        self._write({"figure": asdict(figure)})

    def raw(self, name: str, value: Any) -> None:
        """Keep something beside the figures: anything that JSON can hold."""
        self._write({"raw": {name: value}})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[list[Figure], dict[str, Any]]:
    """The figures and raw values that a step wrote; a line that it did not finish is left out."""
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "figure" in entry:
            figures.append(Figure(**entry["figure"]))
        else:
            raw |= entry["raw"]
    return figures, raw
