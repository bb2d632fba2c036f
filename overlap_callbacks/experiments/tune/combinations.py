"""Axes of a tuning, their combinations, the command of each, and the order in which they run. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

MAX_COMBINATIONS = 500
# The value for "as it is": the variable is unchanged, the argument is not given.
AS_IS = ""
AS_IS_IN_WORDS = "as is"
# Placeholder in a command for the run's folder.
RUN_FOLDER = "run_dir"
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


class Kind(Enum):
    """How a setting reaches the command."""

    ENV = "env"
    ARG = "arg"


class Axis(msgspec.Struct, frozen=True):
    """One setting and the values to try.

    Attributes:
        kind: environment variable or argument.
        name: of it.
        values: in the order given; the others are compared with the first.
    """

    kind: Kind
    name: str
    values: tuple[str, ...]


class Setting(NamedTuple):
    """An axis at one of its values."""

    axis: Axis
    value: str

    @property
    def in_words(self) -> str:
        """E.g. ``bucket-mb=25``."""
        return f"{self.axis.name}={self.value}" if self.value else f"{self.axis.name} {AS_IS_IN_WORDS}"


Combination = tuple[Setting, ...]


def parsed_axis(kind: Kind, text: str) -> Axis:
    """An axis from the user's text, e.g. ``NCCL_MAX_CTAS=8,16``; a ``ValueError`` gives the expected form."""
    name, equals, values = text.partition("=")
    option = f"--{kind.value} {text}"
    if not equals or not name or (kind is Kind.ENV and not _VARIABLE.fullmatch(name)):
        form = "NAME=VALUE,VALUE" if kind is Kind.ARG else "VARIABLE=VALUE,VALUE"
        raise ValueError(f"{option}: the form is {form}, e.g. {_EXAMPLES[kind]}")
    axis = Axis(kind, name, tuple([value.strip() for value in values.split(",")]))
    doubled = sorted({value for value in axis.values if axis.values.count(value) > 1})
    if doubled:
        raise ValueError(f"{option}: {doubled[0] or 'the empty value'} is given twice")
    return axis


_EXAMPLES = {Kind.ENV: "NCCL_MAX_CTAS=8,16", Kind.ARG: "bucket-mb=1,25"}


def combinations(axes: Sequence[Axis]) -> list[Combination]:
    """All combinations of the axes' values, starting with that of the first values.

    Raises a ``ValueError`` if there is nothing to compare, there are too many combinations, or a name occurs twice.
    """
    names = [axis.name for axis in axes]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"{doubled[0]} is given twice: list all its values in one option, separated by commas")
    found = list(itertools.product(*[[Setting(axis, value) for value in axis.values] for axis in axes]))
    if len(found) < 2:
        raise ValueError("there is nothing to compare: give --env or --arg with two values or more")
    if len(found) > MAX_COMBINATIONS:
        raise ValueError(f"that makes {len(found)} combinations, and at most {MAX_COMBINATIONS} are allowed")
    return found


def check_command(command: Sequence[str], axes: Sequence[Axis]) -> None:
    """Raise a ``ValueError`` if an axis has the empty value, and the command a placeholder for it."""
    for axis in axes:
        if AS_IS in axis.values and any(f"{{{axis.name}}}" in part for part in command):
            raise ValueError(f"{axis.name} has an empty value, which {{{axis.name}}} in the command cannot be")


def command_of(command: Sequence[str], combination: Combination, run_folder: str) -> list[str]:
    """The user's command with a combination's settings, and the run's folder for ``{run_dir}``.

    ``{NAME}`` in the command is replaced by the setting's value. An argument without a placeholder is appended as
    ``--NAME VALUE``; a name that begins with a dash is appended unchanged.
    """
    values = {setting.axis.name: setting.value for setting in combination} | {RUN_FOLDER: run_folder}
    filled = [_filled(part, values) for part in command]
    for axis, value in combination:
        placed = any(f"{{{axis.name}}}" in part for part in command)
        if axis.kind is Kind.ARG and not placed and value != AS_IS:
            filled += [axis.name if axis.name.startswith("-") else f"--{axis.name}", value]
    return filled


def environment_of(combination: Combination) -> dict[str, str]:
    """The environment variables of a combination."""
    return {axis.name: value for axis, value in combination if axis.kind is Kind.ENV and value != AS_IS}


def line_of(command: Sequence[str], combination: Combination) -> str:
    """The command line for a combination."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment_of(combination).items()]
    return " ".join([*variables, shlex.join(command_of(command, combination, f"{{{RUN_FOLDER}}}"))])


def in_words(combination: Combination) -> str:
    """E.g. ``NCCL_MAX_CTAS=16, bucket-mb=25``."""
    return ", ".join(setting.in_words for setting in combination)


def _filled(part: str, values: Mapping[str, str]) -> str:
    # In one pass: a value may look like a placeholder.
    return re.sub(r"\{([^{}]+)\}", lambda found: values.get(found[1], found[0]), part)
