"""Who sends what to whom in real jobs on Gloo, against bytes worked out by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from overlap_callbacks.analysis.communication.predicted import predicted_messages
from overlap_callbacks.cli.traffic import command
from overlap_callbacks.integrations import megatron, pytorch
from overlap_callbacks.report import record
from overlap_callbacks.report.views.traffic import MatrixOptions, predicted_traffic, traffic_of
from tests.distributed import run_ranks
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import BATCH, FOUR_RANKS, LOADS, SEQUENCE, VOCABULARY, job
from tests.integrations.megatron_recorded import shape_of

RANKS_LOAD = LOADS

OPTIONS: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 100, "first_step": 2, "repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 0,
    "strict": True, "max_overhead": None,
}  # fmt: skip


def _train_ddp(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytorch.attach(optimizer, **OPTIONS, run_dir=folder):
        for _ in range(10):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def _train_megatron(rank: int, folder: str) -> None:
    megatron_shims.install()
    with job(FOUR_RANKS["tp_pp"]) as training:
        options = {**OPTIONS, "first_step": 3}
        with megatron.attach(training.model, training.optimizer, **options, run_dir=folder):
            for _ in range(12):
                training.step()


def test_a_ddp_job_of_three_ranks_sends_its_gradients_around_a_ring(tmp_path: Path) -> None:
    run_ranks(_train_ddp, 3, str(tmp_path))
    found = traffic_of(record.read(tmp_path))
    gradients = 4 * (16 * 16 + 16)
    each = 2 * 2 / 3 * gradients
    expected = [[0, each, 0], [0, 0, each], [each, 0, 0]]
    np.testing.assert_allclose(found.mappings[0].view.sent, expected, rtol=1e-12)
    (row,) = found.mappings[0].dimensions
    assert (row.messages, row.bytes, row.between_hosts_bytes) == (3, 3 * gradients, 0)
    assert row.sent_bytes == pytest.approx(3 * each)
    assert (found.num_hosts, found.num_steps, found.num_alike) == (1, 3 * 4, 3 * 4)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
def test_a_megatron_job_of_tensor_and_pipeline_groups_sends_what_was_worked_out_by_hand(tmp_path: Path) -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the last; each stage has two layers; two micro-batches."""
    run_ranks(_train_megatron, 4, str(tmp_path), timeout_s=120)
    read = record.read(tmp_path)
    found = traffic_of(read)
    hidden, number, tokens = 32, 4, SEQUENCE * BATCH * 4
    activation = SEQUENCE * BATCH * hidden * number
    # The first stage: the embedding's output, and four a layer. The last: four a layer, the gradient of the output
    # layer's input, and for the loss three of a number each token.
    first, last = 2 * (1 + 8) * activation, 2 * ((8 + 1) * activation + 3 * tokens)
    # Half of the vocabulary is on each rank of a stage; a group of two sends each message once.
    between = 2 * activation + VOCABULARY // 2 * hidden * number
    norm = 2 * 3 / 4 * number  # of the gradient, on all four ranks
    expected = np.array(
        [
            [0, first + norm, between, 0],
            [first, 0, norm, between],
            [between, 0, 0, last + norm],
            [norm, between, last, 0],
        ]
    )
    np.testing.assert_allclose(found.mappings[0].view.sent, expected, rtol=1e-12)
    assert found.mappings[0].name == "tp-pp"
    assert found.num_alike == found.num_steps > 0
    stages = {(group.dimension, group.stage): group for group in found.messages.groups}
    assert stages["tensor", 0].bytes == 2 * first
    assert stages["tensor", 1].bytes == 2 * last
    assert (stages["tensor", 1].firsts, stages["tensor", 1].offsets) == (((2, ()),), ((0, ((1, 2),)),))

    # The prediction of the same job has the same matrix, and goes through the same code.
    shape = shape_of(FOUR_RANKS["tp_pp"], 4)
    predicted = predicted_traffic(predicted_messages(shape), 4)[0]
    np.testing.assert_allclose(predicted.view.sent, expected, rtol=1e-12)
    # Data-parallel groups of one rank issue calls, and send nothing: they are not predicted.
    assert [(row.dimension, row.messages, row.bytes) for row in predicted.dimensions] == [
        (row.dimension, row.messages, row.bytes) for row in found.mappings[0].dimensions if row.sent_bytes
    ]

    # On two hosts of two ranks, the other order sends the tensor groups' messages between hosts.
    shown = CliRunner().invoke(command, [str(tmp_path), "--mapping", "pp-tp", "--ranks-per-host", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    as_run, other = traffic_of(read, MatrixOptions(mapping="pp-tp", ranks_per_host=2)).mappings
    crossing = [{row.dimension: row.between_hosts_bytes for row in mapping.dimensions} for mapping in (as_run, other)]
    assert (crossing[0]["tensor"], crossing[0]["pipeline"]) == (0, 8 * activation)
    assert (crossing[1]["tensor"], crossing[1]["pipeline"]) == (2 * first + 2 * last, 0)
