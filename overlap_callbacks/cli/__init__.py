"""The command ``overlap``: a group that loads a command's module when the command is used.

Starts and ends quickly: what a command loads is never scanned by the garbage collector.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Load modules without garbage collection: nothing that they create is garbage, and scanning takes long.

    Three hundred modules create some thirty thousand objects. The collector would scan the new ones some sixty times
    while they load, and all of them when the process ends.
    """
    was_enabled, loaded = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # What the caller has frozen must stay so. To count that takes long: not where all was loaded before.
        if len(sys.modules) != loaded and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # moves them into the oldest generation, which is scanned only when there is much new garbage
        if was_enabled:
            gc.enable()


def end_quickly() -> None:
    """Let the process end without a final garbage collection: its memory is freed as a whole.

    Only for commands after which no object in a reference cycle needs its finalizer.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


with loading():
    import click

    from overlap_callbacks._version import __version__

__all__ = ["main", "run"]


class ExitCode(enum.IntEnum):
    """How a command has ended: one table for all of them. ``docs/check.md`` has it for users."""

    DONE = 0  # and limits hold, no regression
    BROKEN = 1  # a limit is broken, a regression
    CANNOT = 2  # a wrong option, an unreadable file, files that do not fit, a command that failed
    INCONCLUSIVE = 3  # no window counts, a figure was not measured, an interval is too wide, too few data
    INTERRUPTED = 130  # by Ctrl-C, as in shells


class InconclusiveError(click.ClickException):
    """The data are too few for an answer."""

    exit_code = ExitCode.INCONCLUSIVE


# Under each heading the commands of this package: module, function, and their line in the help.
_COMMANDS = {
    "Commands": {
        "show": ("report", "show", "Print the results of a run."),
        "report": ("report", "report", "Make a page of a run, of several to compare, or of traces."),
        "check": ("check", "command", "Test a run, or a job that is run first, against limits."),
        "analyze": ("traces", "analyze", "Print the overlap in trace files of one rank or several."),
    },
    "While a job runs": {
        "ask": ("ask", "command", "Ask a running job to measure now, or not at all, or how it is."),
        "watch": ("watch", "command", "Show the results of a running job as they come."),
    },
    "See more of it": {
        "compare": ("traces", "compare", "Compare two traces of a rank: with overlap, and without."),
        "traffic": ("traffic", "command", "Print who sends how much to whom in a step."),
        "trace": ("report", "trace", "Write the profiled steps of a run as a trace."),
        "workspace": ("workspace", "command", "Save a W&B workspace that shows what overlap costs."),
    },
    "Find a better setting": {
        "tune": ("tune", "command", "Run a job under every combination of settings; the fastest first."),
        "predict": ("predict", "command", "Predict step time, memory and messages of a training job."),
    },
    "Measure this machine": {
        "demo": ("demo.command", "command", "Train a small GPT on two processes, and measure its overlap."),
        "bench": ("bench", "command", "Time products during all-reduces, and collectives by size."),
        "study": ("study", "command", "Train the models of the study, and measure overlap in each."),
    },
}
_BY_NAME = {name: found for commands in _COMMANDS.values() for name, found in commands.items()}


def leave_pipe() -> None:
    """Let what is still written to stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class SuggestingGroup(click.Group):
    """A group that names what was meant: the nearest command, or the one for a file."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            import difflib

            low = name.lower()
            near = [one for one in known if low and one.startswith(low)] or difflib.get_close_matches(low, known, n=1)
            meant = near[0] if near else ""
            if not near and os.path.exists(name):
                meant = f"{'analyze' if '.json' in name and not name.endswith('l') else 'show'} {name}"
            ctx.fail(f"there is no command {name}{f': did you mean {meant}?' if meant else ''}")
        return super().resolve_command(ctx, args)


class _LazyGroup(SuggestingGroup):
    """A group whose commands are imported on first use: ``overlap show`` needs nothing that the demo needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_BY_NAME)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in _COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<9}", found[2]) for name, found in commands.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _BY_NAME:
            return None
        module, function, _ = _BY_NAME[cmd_name]
        with loading():
            command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return command

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _ending():  # prints the help
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _ending():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """However a command ends, the exit code is that of the table; click's own code 1 means another thing here."""
    try:
        yield
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # nobody reads it
            error.show()
        raise SystemExit(max(error.exit_code, ExitCode.CANNOT)) from None
    except BrokenPipeError:  # whoever reads has enough, e.g. ``head``
        leave_pipe()
        raise SystemExit(ExitCode.DONE) from None
    except OSError as error:
        if error.filename is not None:
            raise
        leave_pipe()
        click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
        raise SystemExit(ExitCode.CANNOT) from None
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        raise SystemExit(ExitCode.INTERRUPTED) from None


def _docs() -> str:
    """The folder that messages call ``docs/``: of a checkout, or installed with the package; empty without either."""
    package = os.path.dirname(os.path.dirname(__file__))
    places = (os.path.dirname(package), os.path.join(sys.prefix, "share", "overlap-callbacks"))
    folders = [os.path.join(place, "docs") for place in places]
    return next((folder for folder in folders if os.path.isfile(os.path.join(folder, "troubleshooting.md"))), "")


_EPILOG = (
    f"docs/ in messages: {_docs() or 'not installed, see the repository'}\n\n"
    f"JSON Schemas of what --json prints, by command (demo: show): {os.path.join(os.path.dirname(__file__), 'schemas')}"
    "\n\nExit codes: 0 done, limits hold; 1 a limit is broken; 2 cannot (a wrong option, an unreadable file, a command "
    "that failed); 3 inconclusive; 130 interrupted."
)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(__version__)
def main() -> None:
    """What overlapping computation with communication costs and saves."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="replace")


def run() -> None:
    """The program ``overlap``. An error of ours is no broken limit: its code is another."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started this has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        main(prog_name="overlap")
    except Exception:
        traceback.print_exc()
        raise SystemExit(ExitCode.CANNOT) from None
