"""``overlap workspace``: saves a W&B workspace that shows what overlap costs."""

from __future__ import annotations

import click

from overlap_callbacks.cli._output import print_json


@click.command("workspace")
@click.option("--entity", required=True, help="W&B user or team.")
@click.option("--project", required=True, help="Project of the entity, with runs that WandbSink has logged.")
@click.option("--name", default="Overlap cost", show_default=True, help="Name of the saved view.")
@click.option("--dry-run", is_flag=True, help="Print what would be saved; needs no network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: with --dry-run, the whole of what would be sent.")
def command(entity: str, project: str, name: str, dry_run: bool, as_json: bool) -> None:
    """Save a W&B workspace that shows what overlap costs."""
    from overlap_callbacks.cli._output import open_console
    from overlap_callbacks.sinks.wandb import workspace as views

    try:
        views.check_names(entity, project, name)
        if dry_run and not as_json:
            click.echo(f"{entity}/{project}\n{views.outline(name)}")
            return
        view = views.build(entity, project, name)
        result: dict[str, object] = {"entity": entity, "project": project, "name": name}
        if dry_run:
            result |= {"spec": views.spec(view)}
        else:
            # wandb retries if a server does not answer.
            with open_console(stderr=True).status("W&B saves the view"):
                result |= {"url": views.save(view)}
    except views.WorkspaceError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json(result)
    else:
        click.echo(f"The workspace is {result['url']}")
