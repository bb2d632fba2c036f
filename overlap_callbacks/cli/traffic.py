"""``overlap traffic``: who sends how much to whom in a step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from overlap_callbacks.cli import InconclusiveError
from overlap_callbacks.cli._options import json_option, matrix_options
from overlap_callbacks.cli._output import (
    draw_matrix,
    newest_run,
    print_document,
    print_json,
    read_record,
    refusing,
    require,
)


@click.command("traffic")
@click.argument("run", type=click.Path(path_type=Path))
@matrix_options
@click.option(
    "--link-peak",
    metavar="GB/S",
    default=None,
    help="Peak of the link between devices of a host, each way, or its name, e.g. nvlink4; by default what the record "
    "tells.",
)
@click.option(
    "--network-peak",
    metavar="GB/S",
    default=None,
    help="Peak of the network between hosts, for each device, or its name, e.g. ib-ndr.",
)
@click.option("--hosts/--no-hosts", default=True, help="Hosts by name, or by number.")
@json_option
def command(
    run: Path,
    link_peak: str | None,
    network_peak: str | None,
    hosts: bool,
    svg: Path | None,
    png: Path | None,
    as_json: bool,
    **shown: Any,
) -> None:
    """Show who sends how much to whom in a step of RUN: a run folder, or its overlap.jsonl.

    With --mapping, pictures show that mapping.
    """
    from overlap_callbacks.analysis.communication.link_peaks import Peaks, link_of
    from overlap_callbacks.analysis.communication.placement import MappingError
    from overlap_callbacks.analysis.communication.view import ViewError
    from overlap_callbacks.report.run_json import communication_as_json, traffic_as_json
    from overlap_callbacks.report.views.communication import bandwidth_table, bandwidths_of
    from overlap_callbacks.report.views.traffic import MatrixOptions, NoTrafficError, traffic_document, traffic_of

    if png is not None:
        require("matplotlib", "plots")
    with refusing(ValueError):
        own = Peaks(
            None if link_peak is None else link_of(link_peak, "--link-peak"),
            None if network_peak is None else link_of(network_peak, "--network-peak"),
        )
    record = read_record(newest_run(run))
    with refusing(MappingError, ViewError), refusing(NoTrafficError, refusal=InconclusiveError):
        found = traffic_of(record, MatrixOptions(**shown), names=hosts)
    drawn = draw_matrix(found.mappings[-1].view, svg, png)
    if as_json:
        print_json(traffic_as_json(found) | {"communication": communication_as_json(record, own)})
    else:
        by_size = bandwidths_of(record, own)
        print_document(traffic_document(found, drawn, [] if by_size is None else [bandwidth_table(by_size)]))
