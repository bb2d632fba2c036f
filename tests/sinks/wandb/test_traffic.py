"""The traffic of a job in a W&B run, offline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.analysis.communication.layouts import Layout
from tests.report.traffic_runs import report_with
from tests.sinks.wandb.test_content import logged, pictures

pytest.importorskip("wandb")
pytestmark = pytest.mark.usefixtures("apart")


def test_the_matrix_is_a_picture_and_the_messages_a_table_and_both_come_when_they_are_new(tmp_path: Path) -> None:
    report = report_with(Layout(2, 2, 2, ranks_per_host=4))
    as_before = msgspec.structs.replace(report, window=1, first_step=520, messages=None, environment=None)
    run = logged(tmp_path, report, as_before, detail="all")
    (picture,) = pictures(run, "traffic/matrix")
    assert picture.count('class="cell"') == 24  # three neighbours of each rank
    assert "node-" not in picture
    assert run.values("traffic/tensor_messages") == [36, 36]
    assert run.values("traffic/steps_alike_fraction") == [1.0, 1.0]
    assert run.values("traffic/between_hosts_fraction") == [pytest.approx(0.18128, rel=1e-3)] * 2
    tables = [path for path in run.files if path.startswith("media/table/traffic/messages_")]
    assert len(tables) == 1
