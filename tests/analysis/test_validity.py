"""When a window does not count, and doubts about windows that do."""

from __future__ import annotations

import msgspec
import pytest

from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from tests.analysis.test_aggregate import OV, SEQ, full_window, leaky_window, report_of, with_profiled


@pytest.mark.parametrize(
    ("backend", "residual", "valid"),
    [
        ("nccl", 0.019, True),
        ("nccl", 0.021, False),
        ("gloo", 0.021, True),
        ("gloo", 0.049, True),
        ("gloo", 0.051, False),
    ],
)
def test_a_window_whose_sequential_steps_overlapped_is_invalid(backend, residual, valid):
    found = report_of(leaky_window(residual, backend=backend))
    assert found.residual_overlap.value == pytest.approx(residual)
    assert found.valid is valid
    if valid:
        assert found.problems == ()
    else:
        limit = 0.05 if backend == "gloo" else 0.02
        words = f"in sequential steps {residual:.1%} of compute ran during communication, above {limit:.0%}: "
        assert words in found.problems[0]


def test_gloo_in_addition_to_nccl_does_not_widen_the_limit_of_a_gpu():
    # torch.distributed.get_backend() of a job that was given a backend for each kind of device.
    assert not report_of(leaky_window(0.03, backend="cpu:gloo,cuda:nccl", device="NVIDIA H200")).valid


def test_a_control_window_is_meant_to_overlap():
    found = report_of(leaky_window(0.5), control=True)
    assert found.valid
    assert found.problems == ()
    assert found.metrics()["overlap/control"] == 1.0


def leaky_communication(share, **changes) -> RankWindow:
    """Sequential steps with that share of their communication during compute: 1 % of the compute at most."""
    blocks = tuple(
        block
        if block.mode is OV
        else msgspec.structs.replace(
            block, comm_ms=0.6, comm_busy_ms=0.5, hidden_comm_ms=0.5 * share, covered_compute_ms=0.5 * share
        )
        for block in full_window().profiled
    )
    return full_window(**{"profiled": blocks, **changes})


@pytest.mark.parametrize(
    ("backend", "share", "valid"),
    [("nccl", 0.19, True), ("nccl", 0.21, False), ("nccl", 1.0, False), ("gloo", 0.29, True), ("gloo", 0.31, False)],
)
def test_short_communication_during_compute_in_sequential_steps_makes_the_window_invalid(backend, share, valid):
    found = report_of(leaky_communication(share, backend=backend))
    assert found.residual_overlap.value < 0.02
    assert found.residual_comm_overlap.value == pytest.approx(share)
    assert found.valid is valid
    if valid:
        assert found.problems == ()
    else:
        (problem,) = found.problems
        assert f"in sequential steps {share:.0%} of communication time ran during compute" in problem
        assert "overlap/compute_slowdown" not in found.metrics()
        assert "overlap/residual_comm_overlap" in found.metrics()


def test_a_control_window_may_overlap_its_communication_too():
    assert report_of(leaky_communication(1.0), control=True).valid


# -- what is doubtful


@pytest.mark.parametrize(("idle_ms", "noted"), [(9.3, False), (9.5, True)])  # 7 ms overlapped; 2 % of 120 ms are 2.4
def test_sequential_steps_that_wait_for_the_host_are_noted(idle_ms, noted):
    found = report_of(full_window(profiled=with_profiled(SEQ, idle_ms=idle_ms)))
    assert found.valid
    assert [problem.split(":")[0] for problem in found.problems] == ["sequential steps wait for the host"] * noted


@pytest.mark.parametrize(
    ("overlapped_ms", "sequential_ms", "words"),
    [
        (105, 126, ""),  # 5 % each
        (108, 132, ""),  # 8 % and 10 %
        (112, 126, "the profiler makes steps longer by more than 10%"),
        (105, 133, "the profiler makes steps longer by more than 10%"),
        (101, 128, "the profiler slows one mode more than the other, by more than 5%"),
    ],
)
def test_a_profiler_that_makes_steps_longer_or_one_mode_more_than_the_other_is_noted(
    overlapped_ms, sequential_ms, words
):
    # Timed and profiled steps without spread, so that no difference is chance.
    timed = tuple(TimedBlock(b.mode, b.block, (100.0 if b.mode is OV else 120.0,)) for b in full_window().timed)
    of_arm = {OV: overlapped_ms, SEQ: sequential_ms}
    blocks = tuple(msgspec.structs.replace(b, step_ms=of_arm[b.mode]) for b in full_window().profiled)
    found = report_of(full_window(timed=timed, profiled=blocks))
    assert found.valid
    assert len(found.problems) == bool(words)
    assert all(words in problem for problem in found.problems)


def test_a_slowdown_by_the_profiler_that_is_not_clear_is_not_noted():
    blocks = with_profiled(OV, step_ms=130.0)
    found = report_of(full_window(profiled=blocks))  # the timed steps vary by more
    assert found.profiler_slowdown.value == pytest.approx(0.3)
    assert found.profiler_slowdown.ci_low < 0.1
    assert found.problems == ()


def test_on_a_cpu_neither_is_noted_for_there_the_host_is_the_device():
    blocks = with_profiled(SEQ, idle_ms=50.0, step_ms=400.0)
    found = report_of(full_window(profiled=blocks, backend="gloo", device="cpu"))
    assert found.idle_isolated_ms.value == pytest.approx(50)
    assert found.problems == ()


@pytest.mark.parametrize(
    ("arms", "reason"),
    [
        ((), "no overlapped and no sequential step counts"),
        ((OV,), "no sequential step counts"),
        ((SEQ,), "no overlapped step counts"),
        ((OV, SEQ), None),
    ],
)
@pytest.mark.parametrize("control", [False, True])
def test_a_whole_window_without_counted_steps_of_both_modes_is_invalid(arms, reason, control):
    timed = tuple(block for block in full_window().timed if block.mode in arms)
    found = report_of(full_window(timed=timed), control=control)
    assert found.valid is (reason is None)
    assert found.problems[:1] == ((f"{reason}, so there is nothing to compare [OC327]",) if reason else ())


def test_a_window_that_was_cut_short_says_so_itself():
    assert report_of(full_window(timed=(), complete=False)).valid
