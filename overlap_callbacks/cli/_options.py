"""Options shared by several commands of ``overlap``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_options(*options: Callable[[Any], Any], heading: str = "Options") -> Callable[[_Function], _Function]:
    """A decorator that adds options to a command, in the order of its help; ``GroupedCommand`` shows the heading."""

    def add(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
            function.__click_params__[-1].heading = heading  # type: ignore[attr-defined]
        return function

    return add


class GroupedCommand(click.Command):
    """A command with many options: its help has them under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "heading", "Options"), []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: group[0] == "Options"):  # which come last
            with formatter.section(heading):
                formatter.write_dl(records)


# ``docs/schemas.py`` writes the schemas.
json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print JSON instead of tables; overlap --help says where its schema is.")  # fmt: skip

# Options of commands that show a traffic matrix.
matrix_options = with_options(
    click.option(
        "--by", type=click.Choice(["rank", "host", "stage"]), default=None,
        help="What the rows and columns of the matrix are. [default: rank up to 64 ranks, else host, else stage]",
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
        "--ranks-per-host", type=click.IntRange(min=1), default=None, help="What if each host had this many ranks?"
    ),
    click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw the matrix into this file."),
    click.option(
        "--png", type=click.Path(path_type=Path, dir_okay=False), help="The same as pixels; needs matplotlib."
    ),
    heading="Messages",
)  # fmt: skip
# Their parameter names.
MATRIX_PARAMETERS = ("by", "order", "algorithm", "mapping", "ranks_per_host", "svg", "png")


class WithCommand(click.Command):
    """A command that runs the command after ``--``; the options before it may stand anywhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        try:
            rest = super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            said = error.format_message()
            if at == len(args):
                said += f"{'' if said[-1] in '.?)' else '.'} Put -- before a command that is run."
            raise click.UsageError(said, ctx) from None
        ctx.params["command"] = tuple(args[at + 1 :])
        return rest


def words(text: str | None) -> tuple[str, ...]:
    """The comma-separated parts of an option's value."""
    return tuple([part.strip() for part in (text or "").split(",") if part.strip()])


class Amount(click.FloatRange):
    """A finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no amount.", param, ctx)
        return found


def whole_numbers(text: str | None, option: str) -> tuple[int, ...]:
    """The comma-separated numbers of an option's value; raises a ``ValueError`` that names the option."""
    try:
        return tuple([int(part) for part in words(text)])
    except ValueError:
        raise ValueError(f"{option} must be whole numbers with commas between them, got {text!r}") from None


def caps(text: str | None, option: str) -> tuple[float | None, ...]:
    """The comma-separated caps of an option's value; None for ``none``.

    Raises:
        ValueError: one is neither ``none`` nor a number above 0; the message names the option.
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


def is_given(name: str) -> bool:
    """Whether the user gave this parameter of the current command on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def refuse_with_resume(allowed: Sequence[str]) -> None:
    """Raise a ``ValueError`` if ``--resume`` comes with parameters other than those allowed; it names their options."""
    parameters = click.get_current_context().command.params
    others = [one.opts[-1] for one in parameters if one.name not in allowed and is_given(one.name or "")]
    if others:
        raise ValueError(f"--resume goes on as it was begun: leave out {' and '.join(others)}")
