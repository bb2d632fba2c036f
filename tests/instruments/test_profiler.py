from __future__ import annotations

import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.instruments import profiler
from overlap_callbacks.instruments.profiler import Profile


def test_the_real_profiler_finds_operators_in_the_step_that_ran_them():
    a = torch.ones(16, 16)
    profile = Profile(on_cuda=False)
    profile.start()
    profile.begin_step()
    a @ a
    profile.end_step()
    torch.sigmoid(a)  # between the steps
    profile.begin_step()
    torch.cos(a)
    elsewhere = threading.Thread(target=torch.sin, args=(a,))
    elsewhere.start()
    elsewhere.join()
    profile.end_step()
    profile.stop()
    found = profile.kernels()

    step_of = {found.names[name]: step for name, step in zip(found.name, found.step.tolist(), strict=True)}
    assert step_of["aten::mm"] == 0
    assert step_of["aten::sigmoid"] == -1
    assert step_of["aten::cos"] == 1
    assert "aten::sin" not in step_of
    assert set(found.kind.tolist()) == {Kind.COMPUTE}
    calls = {found.names[name]: found.call[found.name == name] for name in found.name}
    assert [len(np.unique(calls[name])) for name in ("aten::mm", "aten::cos")] == [1, 1]


@pytest.mark.parametrize("wait", [True, False])
def test_a_profile_waits_for_the_device_only_if_it_may(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a rank is gone, a collective hangs on the device, and torch would wait for it.
    waits: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(True))
    profile = Profile(on_cuda=False)
    profile.start()
    profile.session.profiler.use_device = "cuda"
    assert profile.stop(wait=wait)
    assert waits == [True] * wait


def test_the_profiler_s_clock_agrees_with_the_host_s():
    # Steps are found again by ``time.time_ns``: were the clocks apart, kernels would land in the wrong step.
    profile = Profile(on_cuda=False)
    profile.start()
    bounds = []
    for name in ("first", "second"):
        profile.begin_step()
        before = time.time_ns()
        with torch.profiler.record_function(name):
            time.sleep(0.002)
        bounds.append((before, time.time_ns()))
        profile.end_step()
    profile.stop()
    events = {event.name(): event for event in profile.session.profiler.kineto_results.events()}
    # Kineto converts its clock by a measured rate; a tenth of the marker's length is ample for that.
    slack_ns = 200_000
    for name, (before, after) in zip(("first", "second"), bounds, strict=True):
        assert before - slack_ns <= events[name].start_ns() <= events[name].end_ns() <= after + slack_ns
        assert events[name].duration_ns() >= 2_000_000 - slack_ns
    for (low, high), (before, after) in zip(profile.bounds, bounds, strict=True):
        assert low <= before <= after <= high


def operators_of(profile):
    found = profile.kernels()
    return {(found.names[name], step) for name, step in zip(found.name, found.step.tolist(), strict=True)}


def test_a_step_that_is_not_wanted_leaves_no_operators_and_no_bounds():
    weight = torch.ones(4, requires_grad=True)
    profile = Profile(on_cuda=False)
    profile.start()
    indices = []
    for function, record in ((torch.cos, True), (torch.exp, False), (torch.sin, True)):
        profile.begin_step(record=record)
        function(weight).sum().backward()
        indices.append(profile.end_step(quiet=True))
    profile.stop()
    assert indices == [0, -1, 1]
    assert len(profile.bounds) == 2
    found = operators_of(profile)
    assert {("aten::cos", 0), ("aten::sin", 1)} <= found
    assert not any(name in ("aten::exp", "ExpBackward0") for name, _ in found)


def test_a_session_that_ends_within_an_unwanted_step_leaves_nothing_switched_off():
    def theirs():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            torch.cos(torch.ones(4))
        return {event.name for event in theirs.events()}

    stopped = Profile(on_cuda=False)
    stopped.start()
    stopped.begin_step(record=False)
    stopped.stop()
    assert "aten::cos" in theirs()
    in_the_way = Profile(on_cuda=False)
    in_the_way.start()
    in_the_way.begin_step(record=False)
    assert "aten::cos" in theirs()  # ours gives way at once
    assert in_the_way.stop() is False


def test_a_profile_of_a_device_leaves_no_step_out():
    profile = Profile(on_cuda=True)
    profile.begin_step(record=False)
    assert profile.end_step() == 0


def test_operators_are_distinguished_from_user_ranges_and_other_threads():
    profile = Profile(on_cuda=False)
    profile.start()
    profile.begin_step()
    with torch.profiler.record_function("by hand"):
        torch.cos(torch.ones(4, requires_grad=True)).sum().backward()
    other = threading.Thread(target=torch.tan, args=(torch.ones(4),))
    other.start()
    other.join()
    profile.end_step()
    profile.stop()
    found = {name for name, _ in operators_of(profile)}
    assert {"aten::cos", "CosBackward0"} <= found  # one told by its name, one by what torch says of it
    assert found.isdisjoint({"by hand", "aten::tan"})


def test_other_threads_run_between_short_bursts_of_events(monkeypatch):
    profile = Profile(on_cuda=False)
    profile.start()
    profile.begin_step()
    for _ in range(2000):
        torch.cos(torch.ones(4))
    profile.end_step()
    profile.stop()
    taken, turns, over = [], [], threading.Event()
    take = profiler._HostOperators.take

    def take_noted(operators, burst):
        taken.append(burst)
        return take(operators, burst)

    monkeypatch.setattr(profiler._HostOperators, "take", take_noted)

    def train():
        while not over.wait(1e-5):
            turns.append(len(taken))

    # A thread that does not give the interpreter away by itself keeps it for so long.
    interval_s = sys.getswitchinterval()
    training = threading.Thread(target=train)
    training.start()
    sys.setswitchinterval(2.0)
    try:
        found = profile.kernels()
    finally:
        sys.setswitchinterval(interval_s)
        over.set()
    training.join()
    assert len(found.intervals) >= 2000
    assert max(map(len, taken)) <= 600  # some two microseconds each
    assert len(set(turns)) > len(taken) / 2  # it had its turn between most of them


def test_only_one_profiler_runs_at_a_time_and_that_can_be_asked():
    assert Profile.available()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not Profile.available()
    profile = Profile(on_cuda=False)
    profile.start()
    assert not Profile.available()
    profile.stop()
    assert Profile.available()


def test_a_users_profiler_that_starts_during_the_librarys_keeps_its_session():
    enable = torch.autograd.profiler._enable_profiler
    ours = Profile(on_cuda=False)
    ours.start()
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    theirs.start()
    assert ours.stop() is False
    assert not Profile.available()  # theirs runs on
    torch.cos(torch.ones(4))
    theirs.stop()
    assert "aten::cos" in {event.name for event in theirs.events()}
    assert torch.autograd.profiler._enable_profiler is enable  # torch is as it was


def test_stopping_twice_or_without_a_start_is_harmless():
    Profile(on_cuda=False).stop()
    profile = Profile(on_cuda=False)
    profile.start()
    assert profile.stop() is True
    assert profile.stop() is True
    assert len(profile.kernels().intervals) == 0


def test_the_events_of_a_profile_have_metadata():
    # Launch shapes are in there. Without being asked, Kineto leaves it empty, on a CPU too.
    profile = Profile(on_cuda=False)
    profile.start()
    torch.cos(torch.ones(4))
    profile.stop()
    events = profile.session.profiler.kineto_results.events()
    if hasattr(events[0], "metadata_json"):
        assert all(event.metadata_json() for event in events if event.name().startswith("aten::"))


def test_a_torch_without_metadata_is_profiled_without_it(monkeypatch):
    make = torch._C._profiler._ExperimentalConfig

    def older(*, profile_all_threads):
        return make(profile_all_threads=profile_all_threads)

    monkeypatch.setattr(torch._C._profiler, "_ExperimentalConfig", older)
    profile = Profile(on_cuda=False)
    profile.start()
    profile.begin_step()
    torch.cos(torch.ones(4))
    profile.end_step()
    profile.stop()
    assert "aten::cos" in profile.kernels().names


def test_whether_kineto_stopped_early_can_be_asked_where_torch_knows_it(monkeypatch):
    assert not profiler._kineto_stopped()
    monkeypatch.setattr(torch.autograd, "_is_kineto_stopped", lambda: True, raising=False)
    assert profiler._kineto_stopped()
    monkeypatch.delattr(torch.autograd, "_is_kineto_stopped")
    assert not profiler._kineto_stopped()


@pytest.mark.parametrize(
    ("torch_version", "cuda_version", "may"),
    [("2.13.0+cu126", "12.6", True), ("2.13.0+cu130", "13.0", False), ("2.13.1+cu129", "12.9", False),
     ("2.12.1+cu126", "12.6", False), ("2.13.0+rocm6.4", None, False), ("2.14.0a0", "12.8", True)],
)  # fmt: skip
def test_where_a_profile_at_kinetos_limit_may_end_the_process(torch_version, cuda_version, may):
    assert profiler.may_end_the_process(torch_version, cuda_version) is may


def test_a_session_there_records_one_step_of_each_mode_first_and_then_what_stays_below_half_of_the_limit():
    bound = profiler.RecordBound(applies=True)
    assert bound.steps == profiler.FIRST_STEPS
    bound.learn(num_records=40_000, num_steps=4)
    assert bound.steps == 33  # of 10,000 records of 200 bytes, in 64 MiB
    bound.learn(num_records=4, num_steps=4)  # of a window that was cut short
    assert bound.steps == 33
    assert profiler.RecordBound(applies=False).steps == math.inf
