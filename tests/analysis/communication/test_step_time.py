"""Step times: where a job is as the paper assumes it, exact counts and the paper's forms agree; elsewhere they part."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.communication.bandwidths import Link
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape, preset
from overlap_callbacks.analysis.communication.predicted import sent_rows
from overlap_callbacks.analysis.communication.step_time import (
    Hardware,
    exact_step,
    memory_bytes,
    paper_step,
    step_flop,
    what_if,
)
from overlap_callbacks.analysis.communication.volumes import rank_rows
from tests.analysis.communication.paper_flop import iteration_flop

LINKS = {"tensor": Link(1e9), "pipeline": Link(2e9), "data": Link(4e9)}
HARDWARE = Hardware(links=LINKS, peak_flop_per_s=1e12, utilisation=0.5)


def job(**options: Any) -> JobShape:
    shape = JobShape(**{"model": preset("gpt3-1.3b"), "gradient_dtype": "bf16", **options})
    shape.check()
    return shape


def test_flop_are_those_of_equation_11() -> None:
    # It takes the logits as 6bshV, and the layers with full recomputation.
    model = preset("gpt3-1.3b")
    paper = iteration_flop(
        batch=8, sequence=model.sequence, layers=model.layers, hidden=model.hidden, vocabulary=model.vocabulary
    )
    for sizes in ({}, {"p": 4}, {"t": 2, "d": 2}):
        assert step_flop(job(global_batch=8, recompute="full", **sizes)) == pytest.approx(paper, rel=1e-12)


def test_the_pipeline_s_term_is_the_paper_s_and_others_differ_by_what_the_paper_leaves_out() -> None:
    shape = job(p=4, t=2, d=2, global_batch=16, recompute="full")
    exact, paper = exact_step(shape, HARDWARE), paper_step(shape, HARDWARE)
    assert exact.pipeline_ms == pytest.approx(paper.pipeline_ms)
    # Tensor: 6 layers of 6 all-reduces, and the embedding's: 37 instead of 36 a micro-batch.
    assert exact.tensor_ms / paper.tensor_ms == pytest.approx(37 / 36)
    assert exact.data_ms > paper.data_ms  # embeddings are on the first stage, and not spread over all
    assert exact.expected_bubble_ratio == paper.expected_bubble_ratio == pytest.approx(3 / 11)


def test_terms_add_up_and_an_equal_pipeline_has_the_expected_bubble() -> None:
    # Of a middle stage's work alone the bubble is exactly (p-1)/(p-1+m): a long model makes ends small.
    model = ModelShape(layers=400, hidden=64, heads=1, sequence=64, vocabulary=64)
    shape = job(model=model, p=4, global_batch=12)
    step = exact_step(shape, HARDWARE)
    terms = (step.compute_ms, step.tensor_ms, step.pipeline_ms, step.data_ms, step.bubble_ms)
    assert sum(terms) == pytest.approx(step.iteration_ms)
    assert step.bubble_ratio == pytest.approx(3 / 15, rel=0.1)


def test_without_pipeline_and_tensor_parallelism_only_gradients_are_sent() -> None:
    step = exact_step(job(d=4, global_batch=4), HARDWARE)
    assert (step.tensor_ms, step.pipeline_ms, step.bubble_ms) == (0, 0, 0)
    assert step.data_ms > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"links": LINKS | {"data": Link(-1.0)}}, "data bandwidth must be a positive, finite number, got -1"),
        ({"peak_flop_per_s": float("nan")}, "peak must be a positive, finite number, got nan"),
        ({"utilisation": 1.5}, "utilisation must be a fraction above 0 and at most 1, got 1.5"),
    ],
)
def test_hardware_that_no_machine_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(HARDWARE, **options).check()


def test_memory_by_the_stated_rule() -> None:
    # 1,315,723,264 parameters and 47 more words (50304): 1,315,819,520; 2 + 2 + 12 bytes each. Activations of full
    # recomputation: 2 * 2048 * 2048 * 24 layers.
    assert memory_bytes(job(recompute="full")) == 1_315_819_520 * 16 + 2 * 2048 * 2048 * 24
    whole = memory_bytes(job(d=8, global_batch=8, recompute="full"))
    split = memory_bytes(job(d=8, global_batch=8, recompute="full", distributed_optimizer=True))
    assert whole - split == pytest.approx(1_315_819_520 * 12 * 7 / 8)
    needs = [memory_bytes(job(layout=f"zero{stage}", d=8, global_batch=8)) for stage in (1, 2, 3)]
    assert sorted(needs, reverse=True) == needs


def test_what_if_sorts_by_step_time_and_names_what_cannot_be() -> None:
    choices = what_if(job(p=2, t=2, d=3, global_batch=12), HARDWARE, device_bytes=2**34)
    assert {(c.p, c.t, c.d) for c in choices} >= {(1, 1, 12), (12, 1, 1), (2, 2, 3)}
    assert all(c.p * c.t * c.d == 12 for c in choices)
    feasible = [c for c in choices if not c.infeasible]
    assert choices[: len(feasible)] == tuple(feasible)
    times = [c.step.iteration_ms for c in feasible if c.step is not None]
    assert len(times) == len(feasible) > 1
    assert sorted(times) == times
    (asked,) = [c.step for c in choices if c.is_asked]
    assert asked is not None
    for choice in feasible:
        if choice.is_asked or choice.step is None:
            assert choice.saves_ms is None
            continue
        # Whatever either job hides, the difference lies in between.
        assert choice.saves_ms is not None
        low, high = choice.saves_ms
        assert low == pytest.approx(asked.hidden_ms - choice.step.iteration_ms)
        assert low <= asked.iteration_ms - choice.step.iteration_ms <= high
        assert low <= asked.hidden_ms - choice.step.hidden_ms <= high
    assert all(c.saves_ms is None for c in choices if c.infeasible)
    why = {(c.p, c.t, c.d): c.infeasible for c in choices if c.infeasible}
    assert why[1, 3, 4] == "tp must divide hidden=2048, got 3"
    assert "needs" in why[1, 1, 12]
    assert "a device has 16.0 GiB" in why[1, 1, 12]


def test_all_ranks_of_a_kind_send_the_same_to_their_own_neighbours() -> None:
    shape = job(p=3, t=2, d=2, global_batch=4)
    rows = sent_rows(shape, all_ranks=True)
    assert {row.rank for row in rows} == set(range(12))
    to = {row.rank: row.peer for row in rows if row.operator == "send" and shape.stage_of(row.rank) == 0}
    assert to == {0: 4, 1: 5, 2: 6, 3: 7}
    assert {row.rank for row in sent_rows(shape)} == {0, 4, 8}
    # Even middle stages are of one kind.
    assert {row.rank for row in sent_rows(job(p=4, global_batch=4))} == {0, 1, 3}
    # What is sent is received.
    sent = sum(row.bytes for row in rows if row.operator == "send")
    assert sent == sum(row.bytes for row in rows if row.operator == "recv_")


def test_a_latency_is_paid_for_each_step_of_the_ring() -> None:
    shape = job(t=2, d=4, global_batch=8)
    late = msgspec.structs.replace(
        HARDWARE, links=LINKS | {"tensor": Link(1e9, latency_s=1e-3), "data": Link(4e9, latency_s=1e-4)}
    )
    before, after = exact_step(shape, HARDWARE), exact_step(shape, late)
    rows = rank_rows(shape, 0)
    tensor = sum(row.messages for row in rows if row.dimension == "tensor")
    # All-reduces: 2(n-1) steps each, in milliseconds.
    assert after.tensor_ms - before.tensor_ms == pytest.approx(tensor * 2 * (2 - 1) * 1.0)
    others = sum(row.messages * 2 * (row.group_size - 1) for row in rows if row.dimension != "tensor")
    assert after.data_ms - before.data_ms == pytest.approx(others * 0.1)
    assert paper_step(shape, late) == paper_step(shape, HARDWARE)
    with pytest.raises(ValueError, match="tensor latency must be a finite number of seconds of at least 0, got -1"):
        msgspec.structs.replace(HARDWARE, links={"tensor": Link(1e9, -1.0)}).check()
