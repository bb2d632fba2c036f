"""Megatron-core's mixture of experts on two ranks: the loads are those of its all-to-alls."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from overlap_callbacks.integrations.megatron import attach
from tests.distributed import run_ranks
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import BATCH, LOADS, NUM_STEPS, SEQUENCE, TOGGLING, TWO_RANKS, job
from tests.monitor.jobs import KeptReports

# Loading it takes long, and only the ranks need it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
RANKS_LOAD = LOADS


def train(rank: int) -> list[Any]:
    megatron_shims.install()
    setup, kept = TWO_RANKS["ep"], KeptReports()
    with job(setup) as training:
        monitor = attach(training.model, training.optimizer, sinks=[kept], **TOGGLING)
        try:
            for _ in range(NUM_STEPS):
                training.step()
        finally:
            monitor.close()
    return [(report.experts, report.expert_details) for report in kept.reports] + [setup.hidden, setup.layers]


def test_what_one_rank_sends_the_others_receive() -> None:
    *windows, hidden, layers = run_ranks(train, 2)[0]
    loads, details = windows[0]
    assert (loads.dimension, loads.group_size, loads.num_ranks) == ("expert", 2, 2)
    assert sum(details.by_expert_rank) == pytest.approx(2 * loads.dispatched_bytes)
    # Each token goes to two experts, forward, and its gradient backward; in 32 bit. Probabilities travel beside them.
    tokens = 2 * BATCH * SEQUENCE * hidden * 4 * 2 * layers
    assert tokens <= loads.dispatched_bytes < 1.5 * tokens
    assert loads.load_max_over_mean >= 1
    assert loads.split_max_over_mean >= 1
    assert loads.highest_bytes == pytest.approx(max(details.by_expert_rank))
