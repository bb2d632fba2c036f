"""Arms that turn a framework's own options: weights stay what they are, and the job is as before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_callbacks import Mode, OverlapMonitor, arms
from overlap_callbacks.gate.arms import BaseArm
from tests.distributed import captured_log, run_ranks
from tests.integrations import parallel_jobs as jobs
from tests.integrations.parallel_jobs import Job, Training, belongings, fsdp_options
from tests.monitor.jobs import tiny_schedule
from tests.toggling import at_night

RANKS_LOAD = ("tests.integrations.deepspeed_jobs",)

STEPS = 24
BUCKET, LIVE = 16 * 16, 0  # of the job
ENDINGS = ("close", "force", "exception")
OPTIONS: dict[str, Any] = {"schedule": tiny_schedule(6), "sinks": [], "max_overhead": None, "strict": True}

MAKE: dict[str, Callable[[], BaseArm]] = {
    "prefetch": lambda: arms.Prefetch(forward=2, backward=2),
    "prefetch forward": lambda: arms.Prefetch(forward=1, backward=0),
    "prefetch none": lambda: arms.Prefetch(forward=0, backward=0),
    "shared reduce-scatter": arms.SharedReduceScatter,
    "no reshard": lambda: arms.Reshard(False),
    "reshard": lambda: arms.Reshard(True),
    "native": arms.Native,
    "native of fsdp1": arms.Native,
    "bucket": lambda: arms.ZeroPrefetchBucket(4 * 16 * 16),
    "live": lambda: arms.ZeroLiveParameters(10**6),
    "tf32": arms.AllowTF32,
    "no tf32": lambda: arms.AllowTF32(False),
    "carve-out": lambda: arms.SmCarveout(8),
}


def job_for(name: str | None) -> Callable[[int], Job]:
    """A job in which the arm changes something. Weights are the same in those of FSDP2."""
    made = {
        "reshard": jobs.fsdp2_kept,
        "native of fsdp1": jobs.fsdp1,
        "prefetch none": jobs.fsdp2_prefetching,
        "shared reduce-scatter": jobs.fsdp2_two_groups,
    }
    return made.get(name or "", jobs.fsdp2)


def train_fsdp(rank: int, name: str | None, make: Callable[[int], Job] | None = None) -> dict[str, Any]:
    training = Training(rank, make or job_for(name))
    training.step()
    before = belongings(training.job), fsdp_options(training.job.models[0])
    monitor = None if name is None else training.attach(arms=[MAKE[name]()], **OPTIONS)
    turned = set()
    for _ in range(STEPS - 1):
        training.step()
        if monitor is not None and monitor.arm is not None:  # of the step that has begun
            turned.add(fsdp_options(training.job.models[0]) != before[1])
    if monitor is not None:
        monitor.close()
    same = belongings(training.job).keys() == before[0].keys() and fsdp_options(training.job.models[0]) == before[1]
    return {"digest": training.digest(), "turned": turned, "same": same}


@pytest.fixture(scope="module")
def without() -> list[str]:
    return [rank["digest"] for rank in run_ranks(train_fsdp, 2, None)]


@pytest.mark.parametrize(
    "name",
    ["prefetch", "prefetch forward", "prefetch none", "no reshard", "reshard", "shared reduce-scatter", "native"],
)
def test_an_arm_of_fsdp2_leaves_weights_and_the_model_as_they_are(name: str, without: list[str]) -> None:
    ranks = run_ranks(train_fsdp, 2, name)
    assert [rank["digest"] for rank in ranks] == without
    for rank in ranks:
        assert rank["same"]
        assert rank["turned"] == {True}


def test_the_native_arm_of_fsdp1_leaves_weights_and_the_model_as_they_are() -> None:
    plain, turned = run_ranks(train_fsdp, 2, None, jobs.fsdp1), run_ranks(train_fsdp, 2, "native of fsdp1")
    assert [rank["digest"] for rank in turned] == [rank["digest"] for rank in plain]
    for rank in turned:
        assert rank["same"]
        assert rank["turned"] == {True}


def end_fsdp(rank: int, name: str, how: str) -> dict[str, Any]:
    """End a monitor while its arm is turned."""
    training = Training(rank, job_for(name))
    training.step()
    before = fsdp_options(training.job.models[0])
    monitor: OverlapMonitor = training.attach(arms=[MAKE[name]()], **OPTIONS)
    found = False
    for _ in range(STEPS):
        training.step()
        if monitor.arm is not None:
            found = fsdp_options(training.job.models[0]) != before
            break
    _end(monitor, how)  # within the step that has begun
    training.step()
    same = fsdp_options(training.job.models[0]) == before
    monitor.close()
    return {"turned": found, "same": same}


def end_fsdp_in_each_way(rank: int, name: str) -> dict[str, dict[str, Any]]:
    return {how: end_fsdp(rank, name, how) for how in ENDINGS}


@pytest.mark.parametrize(
    "name", ["prefetch", "no reshard", "reshard", "shared reduce-scatter", "native", "native of fsdp1"]
)
def test_an_arm_of_fsdp_is_put_back_however_its_window_ends(name: str) -> None:
    for rank in run_ranks(end_fsdp_in_each_way, 2, name):
        assert rank == {how: {"turned": True, "same": True} for how in ENDINGS}


def set_anew(rank: int) -> tuple[bool, bool]:
    """The user sets what a module prefetches while the arm is turned: whether that stays, and all else is put back."""
    from overlap_callbacks.integrations._pytorch_fsdp import PrefetchSwitch

    training = Training(rank, jobs.fsdp2)
    training.step()
    model = training.job.models[0]
    first, _, third, *_ = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    before, state = fsdp_options(model), first._get_fsdp_state()
    switch = PrefetchSwitch([model], arms.Prefetch(1, 1))
    switch.apply()
    first.set_modules_to_forward_prefetch([third])
    switch.restore()
    stays = state._states_to_forward_prefetch == [third._get_fsdp_state()]
    state._states_to_forward_prefetch = []
    return stays, fsdp_options(model) == before


def test_what_the_user_sets_while_prefetching_is_turned_stays() -> None:
    assert run_ranks(set_anew, 2) == [(True, True)] * 2


def count_ddp_waits(rank: int, how: str | None) -> dict[str, Any]:
    """Train with the native arm of DDP; in how many buckets a step waited, with the arm and without."""
    from overlap_callbacks.integrations import _pytorch_ddp

    training, waits = Training(rank, jobs.ddp), [0]
    wait = _pytorch_ddp.WaitingGroup.allreduce

    def counted(group: Any, *args: Any) -> Any:
        waits[0] += 1
        return wait(group, *args)

    _pytorch_ddp.WaitingGroup.allreduce = counted  # type: ignore[method-assign]
    training.step()
    monitor = None if how is None else training.attach(arms=[MAKE["native"]()], **OPTIONS)
    with_arm, without_arm, after = set(), set(), set()
    for _ in range(STEPS - 1):
        waits[0] = 0
        turned = monitor is not None and monitor.arm is not None  # for the step that begins now
        training.step()
        (with_arm if turned else without_arm).add(waits[0])
        if turned and monitor is not None and monitor.arm is not None and how != "whole":
            _end(monitor, how)
            break
    training.step()  # has begun: a mode that is forced holds from the next one on
    for _ in range(2):
        waits[0] = 0
        training.step()
        after.add(waits[0])
    if monitor is not None:
        monitor.close()
    return {"digest": training.digest(), "with": with_arm, "without": without_arm, "after": after}


def _end(monitor: OverlapMonitor, how: str | None) -> None:
    """End a monitor within a step."""
    if how == "close":
        monitor.close()
    elif how == "force":
        monitor.force(Mode.OVERLAPPED)
    else:
        monitor.abort_step()  # what an exception in ``with monitor.step()`` does


def test_the_native_arm_of_ddp_leaves_weights_and_ddp_as_they_are() -> None:
    plain, turned = run_ranks(count_ddp_waits, 2, None), run_ranks(count_ddp_waits, 2, "whole")
    assert [rank["digest"] for rank in turned] == [rank["digest"] for rank in plain]
    for rank in turned:
        assert (rank["with"], rank["without"]) == ({2}, {0})  # two buckets


@pytest.mark.parametrize("how", ["close", "force", "exception"])
def test_the_native_arm_of_ddp_is_put_back_however_its_window_ends(how: str) -> None:
    for rank in run_ranks(count_ddp_waits, 2, how):
        assert rank["with"] == {2}
        assert rank["after"] == {0}


def train_zero(rank: int, stage: int, name: str | None, how: str = "whole") -> dict[str, Any]:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs

    deepspeed_jobs.set_up(rank)
    training = deepspeed_jobs.Training(rank, deepspeed_jobs.config(stage))
    training.step()
    before = deepspeed_jobs.limits_of(training.engine)
    monitor = None if name is None else attach(training.engine, arms=[MAKE[name]()], **OPTIONS)
    seen = set()
    for _ in range(STEPS):
        training.step()
        seen.add(deepspeed_jobs.limits_of(training.engine))  # it stays turned until the next step begins
        if how != "whole" and monitor is not None and deepspeed_jobs.limits_of(training.engine) != before:
            _end(monitor, how)
            training.step()
            break
    now = deepspeed_jobs.limits_of(training.engine)
    if monitor is not None:
        monitor.close()
    after = deepspeed_jobs.limits_of(training.engine)
    return {"digest": training.digest(), "seen": seen, "before": before, "now": now, "after": after}


@functools.cache
def zero_without_arms(train: Callable[..., Any], stage: int) -> list[str]:
    return [rank["digest"] for rank in run_ranks(train, 2, stage, None, timeout_s=120)]


@pytest.mark.parametrize(
    ("stage", "name", "turned"),
    [
        (3, "bucket", (4 * 16 * 16, LIVE)),
        (3, "live", (BUCKET, 10**6)),
        pytest.param(3, "native", (0, LIVE), marks=pytest.mark.nightly),
        pytest.param(2, "native", False, marks=pytest.mark.nightly),
        (1, "native", False),
    ],
)
def test_an_arm_of_zero_leaves_weights_and_the_engine_as_they_are(stage: int, name: str, turned: object) -> None:
    measured = run_ranks(train_zero, 2, stage, name, timeout_s=120)
    assert [rank["digest"] for rank in measured] == zero_without_arms(train_zero, stage)
    for rank in measured:
        assert rank["seen"] == {rank["before"], turned}
        assert rank["after"] == rank["before"]


@pytest.mark.parametrize(
    ("stage", "name", "how"),
    [
        (3, "bucket", "close"),
        (3, "native", "force"),
        (2, "native", "close"),
        *(
            pytest.param(stage, name, how, marks=pytest.mark.nightly)
            for stage, name, how in (
                (3, "bucket", "force"), (3, "native", "close"), (2, "native", "force"), (1, "native", "close"),
                (1, "native", "force"),
            )
        ),
    ],
)  # fmt: skip
def test_an_arm_of_zero_is_put_back_however_its_window_ends(stage: int, name: str, how: str) -> None:
    for rank in run_ranks(train_zero, 2, stage, name, how, timeout_s=120):
        assert len(rank["seen"]) == 2
        assert rank["now"] == rank["before"]


def train_zero_with_exceptions(rank: int, stage: int, name: str | None) -> dict[str, Any]:
    """The second micro-batch of every step raises once and is tried again, as after a lack of memory."""
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs

    deepspeed_jobs.set_up(rank)
    training = deepspeed_jobs.Training(rank, deepspeed_jobs.config(stage, micro_batches=2))
    training.step()
    before = deepspeed_jobs.switch_of(training.engine)
    monitor = None if name is None else attach(training.engine, arms=[MAKE[name]()], **OPTIONS)
    failing, within, at_the_end = [False], [], set()

    def fail(*_: Any) -> None:
        if failing[0]:
            raise MemoryError("planted")

    training.engine.module.register_forward_pre_hook(fail, prepend=True)
    for _ in range(STEPS):
        training.micro_step()
        turned, failing[0] = deepspeed_jobs.switch_of(training.engine), True
        with pytest.raises(MemoryError, match="planted"):
            training.micro_step()
        failing[0] = False
        within.append((turned, deepspeed_jobs.switch_of(training.engine)))
        training.micro_step()
        at_the_end.add(deepspeed_jobs.switch_of(training.engine))
    if monitor is not None:
        monitor.close()
    after = deepspeed_jobs.switch_of(training.engine)
    return {"digest": training.digest(), "seen": at_the_end, "within": within, "before": before, "after": after}


@pytest.mark.parametrize(
    ("stage", "name"),
    at_night([(3, "bucket"), (3, "native"), (2, "native"), (1, "native")], [(2, "native"), (1, "native")]),
)
def test_an_arm_of_zero_is_not_put_back_in_the_middle_of_a_step_that_raised_and_goes_on(stage: int, name: str) -> None:
    """ZeRO-1 and 2 would lose the gradients that they have accumulated so far."""
    measured = run_ranks(train_zero_with_exceptions, 2, stage, name, timeout_s=120)
    assert [rank["digest"] for rank in measured] == zero_without_arms(train_zero_with_exceptions, stage)
    for rank in measured:
        assert all(raised == until for until, raised in rank["within"])
        assert len(rank["seen"]) == 2
        assert rank["after"] == rank["before"]


def torch_switches() -> tuple[object, ...]:
    """What the arms of torch turn. Without a device they can be turned too; a job there does not feel it."""
    return (
        torch._C._get_sm_carveout_experimental(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )


def train_torch_arm(rank: int, name: str | None, how: str) -> dict[str, Any]:
    with (
        mock.patch("overlap_callbacks.gate.arms._expect_cuda"),
        mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)),
    ):
        torch.set_float32_matmul_precision("medium" if name == "no tf32" else "highest")
        training = Training(rank, jobs.ddp)
        training.step()
        before = torch_switches()
        monitor = None if name is None else training.attach(arms=[MAKE[name]()], **OPTIONS)
        seen = set()
        for _ in range(STEPS - 1):
            training.step()
            seen.add(torch_switches())
            if how != "whole" and monitor is not None and torch_switches() != before:
                _end(monitor, how)
                training.step()
                break
        now = torch_switches()
        if monitor is not None:
            monitor.close()
    return {"digest": training.digest(), "seen": seen, "before": before, "now": now, "after": torch_switches()}


@pytest.fixture(scope="module")
def plain_ddp() -> list[str]:
    return [rank["digest"] for rank in run_ranks(train_torch_arm, 2, None, "whole")]


def train_torch_arm_in_each_way(rank: int, name: str) -> dict[str, dict[str, Any]]:
    return {how: train_torch_arm(rank, name, how) for how in ("whole", *ENDINGS)}


@pytest.mark.parametrize(
    ("name", "turned"),
    [("tf32", (None, "high", True)), ("no tf32", (None, "highest", False)), ("carve-out", (8, "highest", True))],
)
def test_an_arm_of_torch_is_turned_and_put_back_however_its_window_ends(
    name: str, turned: tuple[object, ...], plain_ddp: list[str]
) -> None:
    ranks = run_ranks(train_torch_arm_in_each_way, 2, name)
    for rank in ranks:
        for how, found in rank.items():
            assert found["before"] == (None, "medium" if name == "no tf32" else "highest", True)
            assert found["seen"] == {found["before"], turned}
            assert found["after"] == found["before"]
            assert how == "whole" or found["now"] == found["before"]
    assert [rank["whole"]["digest"] for rank in ranks] == plain_ddp


def refused(rank: int) -> dict[str, str]:
    """Why this job cannot have these arms."""
    made = {
        "prefetch of ddp": (jobs.ddp, MAKE["prefetch"]()),
        "bucket of ddp": (jobs.ddp, MAKE["bucket"]()),
        "reshard of a job that does": (jobs.fsdp2, arms.Reshard(True)),
        "no prefetch of a job without": (jobs.fsdp2, arms.Prefetch(0, 0)),
        "one group of a job with one": (jobs.fsdp2, arms.SharedReduceScatter()),
        "tf32": (jobs.ddp, arms.AllowTF32()),
        "carve-out": (jobs.ddp, arms.SmCarveout(8)),
    }
    found = {}
    for name, (make, arm) in made.items():
        training = Training(rank, make)
        with captured_log() as lines:
            monitor = training.attach(arms=[arm], **{**OPTIONS, "strict": False})
            for _ in range(12):
                training.step()
            assert monitor.active
            monitor.close()
        found[name] = "\n".join(lines)
    return found


def test_an_arm_that_the_job_cannot_have_is_left_out_with_one_sentence() -> None:
    found, _ = run_ranks(refused, 2)
    for name, words in {
        "prefetch of ddp": "the model has no module that fully_shard has sharded",
        "no prefetch of a job without": "no module prefetches others already: nothing would change",
        "one group of a job with one": "the job has not called set_separate_reduce_scatter_group",
        "bucket of ddp": "attach to a DeepSpeed engine of ZeRO stage 3",
        "tf32": "changes nothing without a CUDA device",
        "carve-out": "changes nothing without a CUDA device",
    }.items():
        assert found[name].count("is left out") == 1, found[name]
        assert words in found[name]


def test_settings_of_one_switch_are_a_family() -> None:
    for arm, family, setting in (
        (arms.Prefetch(2, 2), "prefetch", 2),
        (arms.Prefetch(0, 0), "prefetch", 0),
        (arms.Prefetch(2, 0), "prefetch_forward", 2),
        (arms.Prefetch(0, 1), "prefetch_backward", 1),
        (arms.Prefetch(2, 1), "", None),
        (arms.ZeroPrefetchBucket(100), "zero_prefetch_bucket", 100),
        (arms.SmCarveout(8), "sm_carveout", 8),
        (arms.PowerCap(350.5), "power_cap", 350.5),
        (arms.Arm("ctas_8", bool, bool, equal_results=True, family="ctas", setting=8), "ctas", 8),
        (arms.Reshard(True), "", None),
    ):
        assert (arm.facts.family, arm.facts.setting) == (family, setting)


@pytest.mark.parametrize(
    ("hip", "lines"),
    [
        (None, ["nvidia-smi -pl 350", "nvidia-smi -pl 350.5"]),
        ("7.0.2", ["amd-smi set --gpu all --power-cap 350", "amd-smi set --gpu all --power-cap 350"]),
    ],
)
def test_the_line_of_a_power_cap_is_the_vendors_command(
    hip: str | None, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert [arms.PowerCap(power_w).line for power_w in (350, 350.5)] == lines


def test_counts_and_flags_of_arms_are_checked() -> None:
    for make, words in (
        (lambda: arms.Prefetch(-1, 0), "forward must be at least 0"),
        (lambda: arms.ZeroLiveParameters(True), "elements must be a whole number"),
        (lambda: arms.PowerCap(0), "power_w must be a positive, finite number"),
        (lambda: arms.Arm("a", bool, bool, equal_results=True, family="c tas", setting=8), "family must be 1 to 60"),
        (lambda: arms.Arm("a", bool, bool, equal_results=True, family="ctas"), "give family and setting together"),
        (lambda: arms.Arm("a", bool, bool, equal_results=True, setting=8), "give family and setting together"),
        (
            lambda: arms.Arm("a", bool, bool, equal_results=True, family="ctas", setting=float("nan")),
            "setting must be a finite number",
        ),
        (lambda: arms.Reshard(1), "after_forward must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: arms.SmCarveout(0), "num_sms must be at least 1"),
        (lambda: arms.ZeroPrefetchBucket(-1), "elements must be at least 0"),
    ):
        with contextlib.ExitStack() as stack:
            error = stack.enter_context(pytest.raises((TypeError, ValueError)))
            make()
        assert words in str(error.value)
