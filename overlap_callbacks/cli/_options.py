"""Options that several commands of ``overlap`` share, and what they do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])

rule_option = click.option(
    "--rule", "rules", multiple=True, metavar="FAMILY=REGEX",
    help="Kernels whose name holds REGEX are of FAMILY; before the rules built in. May be repeated.",
)  # fmt: skip
communication_option = click.option(
    "--communication", "patterns", multiple=True, metavar="REGEX",
    help="Kernels and copies whose name holds REGEX communicate, beside those built in. May be repeated.",
)  # fmt: skip
step_option = click.option(
    "--step", "step", metavar="REGEX",
    help="Ranges of the host whose name holds REGEX are the steps, in the place of ProfilerStep#. Its first group is "
    "the step's number.",
)  # fmt: skip
output_option = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything to this file too, as JSON."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


_MATRIX_OPTIONS = (
    click.option(
        "--by", type=click.Choice(["rank", "host", "stage"]), default=None,
        help="What rows and columns of the matrix stand for. [default: rank up to 64 ranks, else host, else stage]",
    ),
    click.option(
        "--order", type=click.Choice(["logical", "physical"]), default="logical", show_default=True,
        help="Ranks by number, or by host.",
    ),
    click.option(
        "--algorithm", type=click.Choice(["auto", "ring", "tree"]), default="ring", show_default=True,
        help="How all-reduces run; auto: as trees where messages between hosts are small.",
    ),
    click.option(
        "--mapping", metavar="ORDER", default=None,
        help="Compare with another order of the dimensions on the same hosts, the innermost first, e.g. tp-dp-pp.",
    ),
    click.option(
        "--ranks-per-host", type=click.IntRange(min=1), default=None, help="What if each host had so many ranks?"
    ),
    click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw the matrix into this file."),
    click.option(
        "--png", type=click.Path(path_type=Path, dir_okay=False), help="The same as pixels; needs matplotlib."
    ),
)  # fmt: skip
# Their names as parameters of a command.
MATRIX_PARAMETERS = ("by", "order", "algorithm", "mapping", "ranks_per_host", "svg", "png")


def matrix_options(function: _Function) -> _Function:
    """Options of a command that shows a traffic matrix."""
    for option in reversed(_MATRIX_OPTIONS):
        function = option(function)
    return function


def csv_option(tables: Sequence[str]) -> Callable[[_Function], _Function]:
    """The option ``--csv`` of a command that has these tables."""
    return click.option("--csv", type=click.Choice(list(tables)), help="Print a table as CSV.")


def words(text: str | None) -> tuple[str, ...]:
    """The parts of an option's value between its commas."""
    return tuple([part.strip() for part in (text or "").split(",") if part.strip()])


def whole_numbers(text: str | None, option: str) -> tuple[int, ...]:
    """The numbers of an option's value between its commas.

    Raises:
        ValueError: one of them is none; the message names the option.
    """
    try:
        return tuple([int(part) for part in words(text)])
    except ValueError:
        raise ValueError(f"{option} must be whole numbers with commas between them, got {text!r}") from None


def caps(text: str | None, option: str) -> tuple[float | None, ...]:
    """The caps of an option's value between its commas; None for ``none``.

    Raises:
        ValueError: one of them is neither ``none`` nor a number above 0; the message names the option.
    """
    found: list[float | None] = []
    for part in words(text):
        try:
            value = None if part == "none" else float(part)
        except ValueError:
            value = 0.0
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{option} must be numbers above 0, or none, with commas between them, got {text!r}")
        found.append(value)
    return tuple(found)


power_cap_option = click.option(
    "--power-cap", "power_caps", metavar="W,...",
    help="Power limits of all GPUs of the host, in watts; none for their own. Needs root. Put back afterwards.",
)  # fmt: skip
clock_cap_option = click.option(
    "--clock-cap", "clock_caps", metavar="MHZ,...",
    help="The highest SM clock of all GPUs of the host, in MHz, in the same way.",
)  # fmt: skip


def refuse_beside_resume(allowed: Sequence[str]) -> None:
    """Refuse options that the user gave beside ``--resume`` to the command under way.

    Args:
        allowed: names of the parameters that may stand there.

    Raises:
        ValueError: there are others; the message names them.
    """
    context = click.get_current_context()
    others = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name not in allowed
        and context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if others:
        raise ValueError(f"--resume goes on as it was begun: leave out {' and '.join(others)}")


def add_rules(rules: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    """Put the user's rules before those that are built in, for this process.

    Args:
        rules: texts of the form FAMILY=REGEX.
        patterns: regular expressions of names that communicate.

    Raises:
        click.BadParameter: a text is not of that form, or is not a regular expression.
    """
    from overlap_callbacks.analysis import name_rules

    for pattern in patterns:
        _check_pattern(pattern, "--communication")
        name_rules.communication_patterns.append(pattern)
    for position, text in enumerate(rules):
        family, equals, pattern = text.partition("=")
        _check_pattern(pattern, "--rule")
        if not (family and equals and pattern):
            raise click.BadParameter(f"{text!r} must be of the form FAMILY=REGEX", param_hint="--rule")
        name_rules.families.insert(position, name_rules.Rule(family, pattern))


def step_pattern(text: str | None) -> re.Pattern[str] | None:
    """The pattern of ``--step``.

    Raises:
        click.BadParameter: it is not a regular expression.
    """
    if text is None:
        return None
    _check_pattern(text, "--step")
    return re.compile(text)


def _check_pattern(pattern: str, option: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint=option) from None
