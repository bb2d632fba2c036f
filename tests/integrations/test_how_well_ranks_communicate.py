"""Who comes last, how fast transfers are, and the bubble of a pipeline, in real jobs on Gloo with a known straggler."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from overlap_callbacks.analysis.results.arrivals import Arrivals
from overlap_callbacks.cli import main
from overlap_callbacks.integrations import megatron, pytorch
from overlap_callbacks.report import record, write_page
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.communication import bandwidths_of, latest_pipeline, waiting_of
from tests.distributed import run_ranks
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import FOUR_RANKS, LOADS, TWO_RANKS, job

RANKS_LOAD = LOADS

OPTIONS: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 20, "first_step": 2, "repeats": 2, "steps_per_block": 2, "warmup_steps": 0, "strict": True,
    "max_overhead": None,
}  # fmt: skip
LATE_RANK, LATE_MS = 1, 100.0
# In a step the two others wait for about this, of three ranks. What else they wait for depends on the machine.
KNOWN_MS = 0.8 * LATE_MS * 2 / 3
STEPS, MEGATRON_STEPS = 41, 34  # two windows, and one with a profile


def _train_ddp(rank: int, folder: str, late: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytorch.attach(optimizer, **OPTIONS, profiled_steps=0, run_dir=folder):
        for _ in range(STEPS):
            loss = model(torch.ones(2, 256)).sum()
            if rank == late:
                time.sleep(LATE_MS / 1e3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _train_megatron(rank: int, folder: str, name: str) -> None:
    megatron_shims.install()
    with job({**TWO_RANKS, **FOUR_RANKS}[name]) as training:
        options = {**OPTIONS, "first_step": 3, "profiled_steps": 4, "every_n_steps": 40}
        with megatron.attach(training.model, training.optimizer, **options, run_dir=folder):
            for _ in range(MEGATRON_STEPS):
                training.step()


@pytest.fixture(scope="module")
def with_a_late_rank(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("late")
    run_ranks(_train_ddp, 3, str(folder), LATE_RANK, timeout_s=90)
    return record.read(folder)


def test_the_late_rank_is_named_and_sure_and_the_others_wait_for_about_what_it_is_late(
    with_a_late_rank: Record,
) -> None:
    assert len(with_a_late_rank.windows) == 2
    found = waiting_of(with_a_late_rank)
    assert found is not None
    first = found.ranks[0]
    assert (first.rank, first.sure, first.chance) == (LATE_RANK, True, pytest.approx(1 / 3))
    assert first.windows == first.all_windows == 2
    # It is late to the first bucket of a step alone; what follows is anybody's. So the first one decides the sum.
    calls = with_a_late_rank.windows[0].arrivals
    assert calls is not None
    assert calls.num_steps == 8
    waited_ms = first.last * first.waiting_ms / (2 * calls.num_steps)
    assert waited_ms > 0.8 * LATE_MS
    metrics = with_a_late_rank.windows[0].metrics()
    assert metrics["straggler/rank"] == LATE_RANK
    waiting_ms, transfer_ms = _times_of_a_step(calls)
    assert waiting_ms >= KNOWN_MS
    assert metrics["comm/waiting_fraction"] == pytest.approx(waiting_ms / (waiting_ms + transfer_ms))
    assert metrics["straggler/lost_fraction"] >= KNOWN_MS / (waiting_ms + transfer_ms)
    both = [_times_of_a_step(window.arrivals) for window in with_a_late_rank.windows if window.arrivals is not None]
    assert found.fraction == pytest.approx(sum(waiting for waiting, _ in both) / sum(map(sum, both)))


def _times_of_a_step(arrivals: Arrivals) -> tuple[float, float]:
    """Waiting and transfer of a step's collectives, mean over ranks."""
    rows = arrivals.dimensions
    waiting_ms, transfer_ms = (
        sum(row.calls * row.waiting_ms for row in rows),
        sum(row.calls * row.transfer_ms for row in rows),
    )
    return waiting_ms / arrivals.num_steps, transfer_ms / arrivals.num_steps


def test_transfers_are_without_the_waiting_and_have_the_sizes_of_the_buckets(with_a_late_rank: Record) -> None:
    found = bandwidths_of(with_a_late_rank)
    assert found is not None
    # 256 x 256 weights are a bucket, of 1024 x 256 another, each in 32 bit, with biases.
    assert len({row.transfer.size for row in found.rows}) >= 2
    for row in found.rows:
        assert row.transfer.reach == "one host"
        assert row.peak_fraction is None
    transfers_ms = sum(row.transfer.calls * row.transfer_ms for row in found.rows)
    known = [window.arrivals for window in with_a_late_rank.windows if window.arrivals is not None]
    without_waiting_ms = sum(calls.num_steps * _times_of_a_step(calls)[1] for calls in known)
    assert 0 < transfers_ms <= 1.01 * without_waiting_ms  # small messages have no bandwidth


def test_commands_and_the_page_say_so(with_a_late_rank: Record, tmp_path: Path) -> None:
    run = str(with_a_late_rank.path.parent)
    shown = CliRunner().invoke(main, ["show", run, "--all"], env={"COLUMNS": "120"})
    text = " ".join(shown.output.split())
    assert f"ranks wait for the one that comes last. Most for rank {LATE_RANK}:" in text
    for words in ("Ranks that come last", "Effective bandwidth by size", "The record does not name the links"):
        assert words in text
    found = CliRunner().invoke(main, ["traffic", run, "--link-peak", "100", "--json"])
    assert found.exit_code == 0, found.output
    communication = json.loads(found.stdout)["communication"]
    assert communication["late_ranks"][0]["rank"] == LATE_RANK
    for row in communication["bandwidths"]:
        assert row["peak_fraction"] == pytest.approx(row["gb_s"] / 100)
    assert communication["link_peak"]["gb_s"] == 100
    write_page([with_a_late_rank], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "How well do ranks communicate?" in page
    assert "Ranks that come last" in page


def test_a_job_of_equal_ranks_has_no_sure_straggler_of_any_weight(tmp_path: Path) -> None:
    run_ranks(_train_ddp, 3, str(tmp_path), -1, timeout_s=90)
    found = waiting_of(record.read(tmp_path))
    assert found is not None
    for row in found.ranks:
        # Ranks of one machine share its cores: one may be a little late, none by what a late one would be.
        assert row.last * row.waiting_ms / (2 * 8) < 0.8 * LATE_MS


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
def test_an_interleaved_pipeline_of_two_stages_has_its_chunks(tmp_path: Path) -> None:
    """Of four micro-batches with two chunks the first stage sends twelve messages, all of them to the second."""
    run_ranks(_train_megatron, 2, str(tmp_path), "pp_interleaved", timeout_s=150)
    found = latest_pipeline(record.read(tmp_path))
    assert found is not None
    _, pipeline = found
    assert (pipeline.num_stages, pipeline.micro_batches, pipeline.chunks) == (2, 4, 2)
    assert pipeline.expected_fraction == pytest.approx(1 / 9)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
def test_the_bubble_of_a_pipeline_is_next_to_the_expected_one(tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks, two micro-batches a step: (p-1)/(p-1+m) is a third."""
    run_ranks(_train_megatron, 4, str(tmp_path), "tp_pp", timeout_s=150)
    read = record.read(tmp_path)
    found = latest_pipeline(read)
    assert found is not None
    _, pipeline = found
    assert (pipeline.num_stages, pipeline.micro_batches, pipeline.chunks) == (2, 2, 1)
    assert pipeline.expected_fraction == pytest.approx(1 / 3)
    assert [(stage.stage, stage.num_ranks) for stage in pipeline.stages] == [(0, 2), (1, 2)]
    assert all(0 < stage.bubble_ms < stage.step_ms for stage in pipeline.stages)
    window = read.windows[-1]
    shares = window.dimension_shares()
    assert sum(share.fraction for share in shares) == pytest.approx(1.0)
    assert {"tensor", "pipeline", "bubble", "compute"} <= {share.name for share in shares}
    assert all(share.fraction >= 0 for share in shares)
    metrics = window.metrics()
    assert metrics["pipeline/expected_bubble_fraction"] == pytest.approx(1 / 3)
    assert metrics["pipeline/stage_1_bubble_fraction"] == pytest.approx(pipeline.stages[1].fraction)
    assert metrics["dimension/pipeline_step_fraction"] == next(s.fraction for s in shares if s.name == "pipeline")
    # Stages come to the embeddings' reduction one after the other; that makes none of them a straggler.
    assert window.arrivals is not None
    assert {row.dimension for row in window.arrivals.dimensions} == {"tensor"}
    assert {row.dimension for row in window.transfers} == {"tensor", "embedding", "model"}
    shown = CliRunner().invoke(main, ["show", str(tmp_path), "--all"], env={"COLUMNS": "120"}).output
    assert "Bubble by stage" in shown
    assert "2 stages, 2 micro-batches a step): expected 33.3%; measured" in " ".join(shown.split())
