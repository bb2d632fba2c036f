"""What delays, profiles and configuration say together: gains, contradictions, and what to change."""

from __future__ import annotations

import msgspec
import pytest

from overlap_callbacks.analysis.causal import levels_of
from overlap_callbacks.analysis.causal_findings import Finding, Fix, findings_of, fix_of, merged_buckets
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.analysis.results.exposure import ExposedCollective, Exposure
from overlap_callbacks.analysis.results.prediction import topic_of
from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.analysis.results.window import CollectiveTime

DELAY_MS, MIB = 10.0, 2**20
GATHER = DelayedCall("_allgather_base_", "data", 0, "layers.3")


def delayed(call: DelayedCall, slope: float) -> CausalWindow:
    levels = levels_of(54)
    times = [100 + slope * level * DELAY_MS / 2 + 0.1 * (step * 7 % 5 - 2) for step, level in enumerate(levels)]
    found = DelayedSet((call,), DELAY_MS)
    return CausalWindow(window=1, first_step=0, delayed=found, levels=levels, step_ms=tuple(times))


def exposed(
    kind: str, name: str, exposed_ms: float, hidden_ms: float, waiting_ms: float | None = None, size: int = 2**20
) -> ExposedCollective:
    """Over ten calls."""
    return ExposedCollective(
        kind, "data", 8, "", size, size, 10, 10 * exposed_ms, 10 * hidden_ms, 4, 0.0, 0, 1.0, name,
        None if waiting_ms is None else 10 * waiting_ms,
    )  # fmt: skip


def finding(call: DelayedCall, slope: float, *rows: ExposedCollective) -> tuple[Finding, Exposure]:
    exposure = Exposure(5, 2, (), (), rows)
    (found,) = findings_of([delayed(call, slope)], exposure)
    return found, exposure


def test_removing_one_wins_at_most_its_transfer_and_nothing_if_it_has_slack() -> None:
    row = exposed("all_gather", "layers.3", 3.0, 2.0, waiting_ms=1.0)
    found, _ = finding(GATHER, 0.9, row)
    assert (found.exposed_ms, found.hidden_ms) == (3.0, 2.0)
    assert found.won_ms == pytest.approx(4.0)
    assert finding(GATHER, 0.1, row)[0].won_ms is None
    # Without a profile: what the operator's transfers take alone.
    alone = CollectiveTime(
        operator="_allgather_base_", group="dp (3)", group_size=8, backend="nccl", messages=4, bytes_in=1, bytes_out=1,
        isolated_ms=8.0, dimension="data", transfer_ms=8.0,
    )  # fmt: skip
    (found,) = findings_of([delayed(GATHER, 0.9)], None, [alone, msgspec.structs.replace(alone, dimension="tensor")])
    assert found.won_ms == pytest.approx(2.0)
    assert findings_of([delayed(GATHER, 0.9)])[0].won_ms is None


@pytest.mark.parametrize(
    ("slope", "exposed_ms", "hidden_ms", "words"),
    [
        (0.1, 3.0, 0.5, "exposed for 3.00 ms in steps of other windows, but with slack of at least 8"),
        (0.95, 0.1, 3.0, "hidden for 3.00 ms in steps of other windows, and yet the step waits for it"),
        (0.95, 3.0, 0.5, ""),
        (0.1, 0.1, 3.0, ""),
    ],
)
def test_where_profile_and_delays_differ_it_is_said_and_why(
    slope: float, exposed_ms: float, hidden_ms: float, words: str
) -> None:
    found, _ = finding(GATHER, slope, exposed("all_gather", "layers.3", exposed_ms, hidden_ms))
    assert found.contradiction().startswith(words)
    assert bool(found.contradiction()) is bool(words)


def test_the_critical_path_of_the_profile_goes_before_what_is_exposed() -> None:
    row = exposed("all_gather", "layers.3", 3.0, 0.5)
    found, _ = finding(GATHER, 0.1, msgspec.structs.replace(row, path_ms=20.0))
    assert found.contradiction().startswith(
        "on the critical path for 2.00 ms in steps of other windows, but with slack"
    )
    found, _ = finding(GATHER, 0.1, msgspec.structs.replace(row, path_ms=0.0))
    assert not found.contradiction()
    found, _ = finding(GATHER, 0.95, msgspec.structs.replace(row, path_ms=0.0))
    assert found.contradiction().startswith("not on the critical path in steps of other windows, and yet the step")


def test_the_critical_path_is_that_of_the_windows_that_delay_it() -> None:
    row = exposed("all_gather", "layers.3", 3.0, 0.5, waiting_ms=1.0)
    of_others = Exposure(5, 2, (), (), (msgspec.structs.replace(row, path_ms=20.0),))
    own = [msgspec.structs.replace(row, waiting_ms=None, path_ms=path_ms) for path_ms in (0.0, 0.0, 30.0)]
    windows = [msgspec.structs.replace(delayed(GATHER, 0.95), names=(of,)) for of in own]
    (found,) = findings_of(windows[:2], of_others)
    assert (found.path_ms, found.same_windows, found.waiting_ms) == (0.0, True, 1.0)
    assert found.contradiction().startswith("not on the critical path in undelayed steps of the same windows, and yet")
    (found,) = findings_of(windows, of_others)
    assert (found.path_ms, found.contradiction()) == (1.0, "")  # 30 ms in 30 calls
    (found,) = findings_of([msgspec.structs.replace(windows[0], names=()), *windows[1:]])
    assert found.path_ms == 1.5  # a window without a profile adds none


def test_waiting_of_other_windows_counts_by_its_share_of_their_time() -> None:
    usual = exposed("all_gather", "layers.3", 2.0, 1.2, waiting_ms=1.2)
    own = msgspec.structs.replace(exposed("all_gather", "layers.3", 0.2, 2.0), path_ms=0.0)
    window = msgspec.structs.replace(delayed(GATHER, 0.95), names=(own,))
    (found,) = findings_of([window], Exposure(5, 2, (), (), (usual,)))
    assert found.waiting_ms == pytest.approx(2.2 * 1.2 / 3.2)
    assert found.won_ms == pytest.approx(2.0)  # not 2.2 - 1.2
    fix = fix_of(found, None, {})
    assert fix is not None
    assert "not communication" not in fix.what
    most = (1 - (found.response.slope.ci_low or 0.0)) * DELAY_MS
    assert f"its slack is at most {PLAIN.quantity(most, 'ms')}, or what needs it" in found.contradiction()


BUCKETS = [exposed("all_reduce", f"bucket {n}: a{n} … b{n}", 1.0, 1.0) for n in range(120)]
DDP: dict[str, Setting] = {"ddp_bucket_cap_bytes": MIB, "parameters": 30 * MIB, "parameter_types": "float32"}


def bucket_fix(number: int, rows: list[ExposedCollective], configuration: dict[str, Setting]) -> Fix | None:
    found, exposure = finding(DelayedCall("allreduce_", "data", 0, rows[number].name), 0.95, *rows)
    return fix_of(found, exposure, configuration)


def test_buckets_that_merge_are_named() -> None:
    fix = bucket_fix(7, BUCKETS, DDP)
    assert fix is not None
    assert fix.what == "raise the bucket from 1 to 25 MB: buckets 0 to 24 merge"
    assert fix.arm == "overlap tune --arg bucket-mb=1,25 -- COMMAND"
    assert (fix.topic, fix.rises) == ("buckets", True)
    assert merged_buckets({n: MIB for n in range(60)}, 30, 25 * MIB) == list(range(25, 50))
    assert merged_buckets({0: 20 * MIB, 1: MIB}, 1, 5 * MIB) == [1]


def test_a_large_bucket_is_made_smaller() -> None:
    rows = [exposed("all_reduce", f"bucket {n}: a … b", 1.0, 1.0, size=200 * MIB) for n in range(3)]
    fix = bucket_fix(2, rows, {**DDP, "ddp_bucket_cap_bytes": 200 * MIB, "parameters": 150 * MIB})
    assert fix is not None
    assert fix.what == "lower the bucket from 200 to 5 MB: bucket 2 begins earlier"
    assert fix.rises is False


@pytest.mark.parametrize(
    ("sizes_mb", "own", "slack", "what"),
    [
        (6 * [1.0], 5, {2}, "raise the bucket from 1 to 3 MB: buckets 3 to 5 merge"),
        (6 * [1.0], 5, {4}, "no bucket size is known to help bucket 5: nothing is left to hide it, and what would"),
        (6 * [1.0], 1, {0}, "no bucket size is known to help bucket 1: what would merge with it has slack"),
        ([0.3, 0.9, 0.3, 0.75], 3, {2}, "lower the bucket from 1 to 0.56 MB: the last message gets shorter"),
    ],
)
def test_a_bucket_is_not_merged_with_what_has_slack(
    sizes_mb: list[float], own: int, slack: set[int], what: str
) -> None:
    """Its message would be longer, and begin no earlier."""
    rows = [exposed("all_reduce", f"bucket {n}: a … b", 1.0, 1.0, size=int(mb * MIB)) for n, mb in enumerate(sizes_mb)]
    rows = [msgspec.structs.replace(row, blocking=0.0 if n in slack else None) for n, row in enumerate(rows)]
    fix = bucket_fix(own, rows, {**DDP, "parameters": int(sum(sizes_mb) * MIB / 4)})
    assert fix is not None
    assert fix.what.startswith(what)
    assert (fix.rises, bool(fix.topic), bool(fix.arm)) == (not what.startswith("lower"), *2 * ["MB" in what])


REDUCE = DelayedCall("_reduce_scatter_base_", "data", 0, "layers.3")


@pytest.mark.parametrize(
    ("call", "configuration"),
    [
        (GATHER, {"fsdp_units": 12, "fsdp_sharding": "FULL_SHARD"}),  # FSDP1 has no arm
        (GATHER, {"fsdp_units": 4, "fsdp_prefetch": 3}),  # no other unit is left
        (REDUCE, {"fsdp_units": 12, "fsdp_prefetch": 0}),
        (REDUCE, {"zero_stage": 2, "zero_reduce_bucket_size": 1000}),
        (DelayedCall("allreduce_", "tensor", 0, "layers.3.mlp"), {}),
    ],
)
def test_where_no_setting_is_known_it_is_said(call: DelayedCall, configuration: dict[str, Setting]) -> None:
    found, exposure = finding(call, 0.95)
    assert fix_of(found, exposure, configuration) == Fix(
        "no setting is known for it alone: see what to try for the whole step"
    )


@pytest.mark.parametrize(
    ("configuration", "arm"),
    [
        ({"fsdp_units": 12, "fsdp_prefetch": 0}, "Prefetch(2, 2)"),
        ({"fsdp_units": 12, "fsdp_prefetch": 2}, "Prefetch(3, 3)"),
        ({"zero_stage": 3, "zero_prefetch_bucket_size": 0}, "ZeroPrefetchBucket(100000000)"),
        ({"zero_stage": 3, "zero_prefetch_bucket_size": 5000}, "ZeroPrefetchBucket(10000)"),
    ],
)
def test_a_gather_is_prefetched_by_an_arm_that_the_ledger_knows(configuration: dict[str, Setting], arm: str) -> None:
    from overlap_callbacks import arms

    found, exposure = finding(GATHER, 0.95, exposed("all_gather", "layers.3", 3.0, 2.0))
    fix = fix_of(found, exposure, configuration)
    assert fix is not None
    assert fix.arm == arm
    assert topic_of(eval(arm, vars(arms)).name) == fix.topic == "prefetch"
    said = fix.prediction(found)
    assert said is not None
    assert (said.low_ms, said.high_ms) == (0.0, pytest.approx(5.0))
    assert said.step_ms == pytest.approx(100, abs=0.2)
    assert "all-gather of layers.3, at a slope of 0.9" in said.assumes


def test_a_late_rank_is_named_and_no_setting_is_blamed() -> None:
    found, exposure = finding(GATHER, 0.95, exposed("all_gather", "layers.3", 3.0, 1.0, waiting_ms=3.0))
    fix = fix_of(found, exposure, {"fsdp_units": 12}, late_rank=5)
    assert fix is not None
    assert fix.what.startswith("this is rank 5, not communication")
    assert not fix.arm
    assert fix.prediction(found) is None


def test_what_has_slack_needs_no_fix() -> None:
    found, exposure = finding(GATHER, 0.1, exposed("all_gather", "layers.3", 3.0, 1.0))
    assert fix_of(found, exposure, {"fsdp_units": 12}) is None


def test_the_longer_path_is_named_as_far_as_it_is_known() -> None:
    found, _ = finding(GATHER, 0.1, exposed("all_gather", "layers.3", 3.0, 0.5))
    assert found.contradiction().endswith(": another path is longer, such as a collective before it or a copy")
    host = found._replace(idle_ms=20.0).contradiction()
    assert host.endswith(": the step waits for the host or its input, as nothing runs on the device for 20.00 ms of it")
    assert found._replace(idle_ms=1.0).contradiction() == found.contradiction()
    late = found._replace(idle_ms=20.0, late_rank=5).contradiction()
    assert late.endswith(": the step waits for rank 5, which comes later")
