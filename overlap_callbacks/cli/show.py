"""``overlap show``: prints the results of a run."""

from __future__ import annotations

from pathlib import Path

import click

from overlap_callbacks.cli._output import newest_run, print_record


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="All tables of the report page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; it holds everything.")
def command(run: Path, everything: bool, as_json: bool) -> None:
    """Print the results of RUN: a run folder, or its overlap.jsonl; of a folder of runs, those of the newest."""
    print_record(newest_run(run), as_json, everything)
