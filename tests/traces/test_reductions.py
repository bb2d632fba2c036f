"""Gradients that are reduced at each micro-batch: said where the file proves it, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report.views.trace_verdict import verdict
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.reductions import RepeatedReductions
from tests import kineto
from tests.traces.events import MS, overlap

REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = kineto.ALL_GATHER
DDP, FSDP2, FSDP1 = "DistributedDataParallel.forward", "FSDP::root_pre_forward", "FullyShardedDataParallel.forward"
# Of each kind: the pass, the range in which it reduces, the kernel, and torch's name.
KINDS = {
    "ddp": (DDP, "", kineto.ALL_REDUCE, "allreduce"),
    "fsdp2": (FSDP2, "FSDP::post_backward_reduce (layers.0)", REDUCE_SCATTER, "_reduce_scatter_base"),
    "fsdp1": (FSDP1, "FullyShardedDataParallel._post_backward_hook", REDUCE_SCATTER, "_reduce_scatter_base"),
}  # fmt: skip
MAIN, AUTOGRAD = 100, 200
BUCKETS = (250_000, 500_000, 137_500)  # floats: 3.55 MB


def metadata(name: str, elements: int, group: str = "0") -> dict[str, Any]:
    return {
        **kineto.METADATA, "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements,
        "Process Group Name": group,
    }  # fmt: skip


class Job:
    """Events of a job. Each call takes a millisecond on the host and on the device."""

    def __init__(self, kind: str = "ddp", thread: int = AUTOGRAD) -> None:
        self.events: list[kineto.Event] = []
        self._pass, self._range, self._kernel, self._name = KINDS[kind]
        self._thread, self.now, self._numbers = thread, 0, itertools.count(1)
        self._step, self._begin = 0, 0

    def launch(self, name: str, stream: int = 7, thread: int = MAIN, **args: Any) -> None:
        number = next(self._numbers)
        self.events.append(kineto.launch(self.now + 10_000, number, thread=thread))
        self.events.append(kineto.kernel(name, self.now + 20_000, self.now + MS, number, stream=stream, **args))
        self.now += MS

    def mark(self, name: str, begin: int, thread: int = MAIN) -> None:
        self.events.append(kineto.host_range(name, begin, self.now, thread=thread))

    def forward(self, *inside: tuple[str, str, int, str]) -> None:
        begin = self.now
        self.launch(kineto.GEMM)
        for kernel, name, elements, group in inside:
            self.launch(kernel, 20, **metadata(name, elements, group))
        self.mark(self._pass, begin)

    def backward(self, buckets: Sequence[int] = BUCKETS, group: str = "0") -> None:
        for elements in buckets:
            self.launch(kineto.GEMM, thread=AUTOGRAD)
            self.reduce(self._kernel, self._name, elements, group, self._thread)
        self.launch(kineto.GEMM, thread=AUTOGRAD)

    def reduce(self, kernel: str, name: str, elements: int, group: str = "0", thread: int = MAIN) -> None:
        begin = self.now
        self.launch(kernel, 20, thread, **metadata(name, elements, group))
        if self._range:
            self.mark(self._range, begin, thread)

    def optimizer(self, name: str = "AdamW") -> None:
        begin = self.now
        self.launch(kineto.ADD)
        self.mark(f"Optimizer.step#{name}.step", begin)

    def step(self) -> None:
        self.events.append(kineto.step(self._step, self._begin, self.now))
        self._step, self._begin = self._step + 1, self.now

    def found(self, folder: Path) -> RepeatedReductions | None:
        path = kineto.write(folder / "rank0.json", self.events, **kineto.job())
        found = analyze([read_trace(path)])
        assert any("defer" in sentence for sentence in verdict(found)) == (found.traces[0].reductions is not None)
        return found.traces[0].reductions

    def times_and(self, field: str, folder: Path) -> tuple[int, float]:
        """How often each gradient is reduced, and another figure of what is found."""
        found = self.found(folder)
        assert found is not None
        return found.times, getattr(found, field)


def accumulating(job: Job, *, steps: int = 3, passes: int = 4, buckets: Sequence[int] = BUCKETS) -> Job:
    for _ in range(steps):
        job.mark("Optimizer.zero_grad#AdamW.zero_grad", job.now)
        for _ in range(passes):
            job.forward()
            job.backward(buckets)
        job.optimizer()
        job.step()
    return job


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_job_that_reduces_at_each_micro_batch_is_told_to_defer_it(tmp_path: Path, kind: str, steps: int) -> None:
    found = accumulating(Job(kind), steps=steps).found(tmp_path)
    # 12 reductions of 0.98 ms in a step, none of them hidden; 4 x 8 + 1 kernels of a millisecond.
    assert found == RepeatedReductions(
        times=4, messages=3, bytes=3_550_000, exposed_ms=pytest.approx(12 * 0.98), update_ms=33, wrapper=kind
    )
    how = {
        "ddp": "DDP's no_sync around the others", "fsdp1": "FSDP's no_sync",
        "fsdp2": "set_requires_gradient_sync(False) before the others",
    }[kind]  # fmt: skip
    said = " ".join(overlap("analyze", str(tmp_path / "rank0.json")).output.split())
    assert f"Each gradient is reduced 4 times a step: defer it to the last micro-batch ({how})" in said
    assert "The same 3 reductions of 3.39 MiB follow each of 4 forward passes" in said
    assert "could save up to 8.820 ms of exposed time in a step of 33.000 ms" in said


def test_steps_of_the_profiler_may_be_micro_batches(tmp_path: Path) -> None:
    job = Job()
    for _ in range(3):
        for place in range(4):
            job.forward()
            job.backward()
            if place == 3:
                job.optimizer()
            job.step()
    assert job.times_and("update_ms", tmp_path) == (4, 33)


def test_two_optimizers_are_one_step_and_layers_of_one_size_may_be_repeated(tmp_path: Path) -> None:
    job = Job("fsdp2")
    for _ in range(3):
        for _ in range(2):
            job.forward((ALL_GATHER, "_allgather_base", 1000, "0"))
            job.backward([1000, 1000, 1000, 1000])
        job.optimizer("Muon")
        job.optimizer("AdamW")
        job.step()
    assert job.times_and("messages", tmp_path) == (2, 4)


def test_what_is_logged_on_the_same_group_changes_nothing(tmp_path: Path) -> None:
    job = Job()
    for _ in range(3):
        for place in range(4):
            job.forward(("ncclDevKernel_Broadcast_RING_LL()", "broadcast", 100, "0"))
            job.reduce(kineto.ALL_REDUCE, "allreduce", 1 + place)
            job.backward()
        job.optimizer()
        job.step()
    assert job.times_and("messages", tmp_path) == (4, 3)


def test_a_file_of_one_thread_tells_by_the_order_alone(tmp_path: Path) -> None:
    job = accumulating(Job())
    for event in job.events:
        event["tid"] = MAIN if event["cat"] != "kernel" else event["tid"]
    assert job.found(tmp_path) is not None


def test_reductions_of_other_groups_do_not_hide_those_of_fsdp(tmp_path: Path) -> None:
    job = Job("fsdp2")
    for _ in range(3):
        for _ in range(4):
            job.forward((kineto.ALL_REDUCE, "allreduce", 9_000_000, "tp"))
            job.launch(kineto.ALL_REDUCE, 20, AUTOGRAD, **metadata("allreduce", 9_000_000, "tp"))
            job.backward()
        job.optimizer()
        job.step()
    assert job.times_and("bytes", tmp_path) == (4, 3_550_000)


@pytest.mark.parametrize("own", [1000, 0])
def test_activations_that_are_recomputed_are_no_micro_batches(tmp_path: Path, own: int) -> None:
    # Each unit is recomputed in the backward pass, and the root has parameters of its own.
    job = Job("fsdp1")
    for _ in range(3):
        for _ in range(4):
            job.forward()
            recomputing(job, 4)
            if own:
                job.backward([own])
        job.optimizer()
        job.step()
    assert job.times_and("messages", tmp_path) == (4, 5 if own else 4)


def recomputing(job: Job, units: int) -> None:
    for _ in range(units):
        begin = job.now
        job.launch(kineto.GEMM, thread=AUTOGRAD)
        job.mark(FSDP1, begin, AUTOGRAD)
        job.mark(FSDP2, begin, AUTOGRAD)
        job.backward([2000])


def no_sync(job: Job) -> Iterator[None]:
    for _ in range(3):
        job.forward()
        job.backward(())
    job.forward()
    job.backward()
    yield job.optimizer()


def equal_layers(job: Job) -> Iterator[None]:
    job.forward()
    job.backward([1000] * 8)
    yield job.optimizer()


def pipeline(job: Job) -> Iterator[None]:
    for _ in range(4):
        job.forward()
    job.backward([1000] * 4)
    yield job.optimizer()


def one_forward_one_backward(job: Job) -> Iterator[None]:
    job.forward()
    job.forward()
    for _ in range(3):
        job.backward(())
        job.forward()
    job.backward(())
    job.backward([1000, 1000])
    yield job.optimizer()


def optimizer_each_time(job: Job) -> Iterator[None]:
    for _ in range(4):
        job.forward()
        job.backward()
        job.optimizer()
    yield


def tensor_parallel(job: Job) -> Iterator[None]:
    for last in (False, True):
        job.forward((kineto.ALL_REDUCE, "allreduce", 9_000_000, "tp"))
        job.reduce(kineto.ALL_REDUCE, "allreduce", 9_000_000, "tp", AUTOGRAD)
        job.backward(BUCKETS if last else ())
    yield job.optimizer()


def logged_loss(job: Job) -> Iterator[None]:
    for last in (False, True):
        job.forward()
        job.reduce(kineto.ALL_REDUCE, "allreduce", 1)
        job.reduce(kineto.ALL_REDUCE, "allreduce", 1, "log")
        job.backward(BUCKETS if last else ())
    yield job.optimizer()


def metrics_alone(job: Job) -> Iterator[None]:
    for _ in range(4):
        job.forward()
        job.reduce(kineto.ALL_REDUCE, "allreduce", 1_000_000)
        job.backward(())
    yield job.optimizer()


def another_size_each_time(job: Job) -> Iterator[None]:
    for place in range(4):
        job.forward()
        job.backward([1000 + place, 500])
    yield job.optimizer()


def two_models(job: Job) -> Iterator[None]:
    for buckets in ([1000, 500], [700]):
        job.forward()
        job.backward(buckets)
    yield job.optimizer()


def no_optimizer(job: Job) -> Iterator[None]:
    for _ in range(4):
        job.forward()
        job.backward()
    yield


def no_sizes(job: Job) -> Iterator[None]:
    for _ in range(4):
        job.forward()
        job.launch(kineto.ALL_REDUCE, 20, AUTOGRAD)
    yield job.optimizer()


def recomputed_units(job: Job) -> Iterator[None]:
    job.forward()
    recomputing(job, 4)
    yield job.optimizer()


def closure_of_the_optimizer(job: Job) -> Iterator[None]:
    begin = job.now
    for _ in range(4):
        job.forward()
        job.backward()
    yield job.mark("Optimizer.step#LBFGS.step", begin)


def set_to_zero_in_between(job: Job) -> Iterator[None]:
    # Two models of one size, or the two passes of a step that looks for flat minima.
    for _ in range(2):
        begin = job.now
        job.launch(kineto.ADD)
        job.mark("Optimizer.zero_grad#SGD.zero_grad", begin)
        job.forward()
        job.backward()
    yield job.optimizer()


def turns_of_two_optimizers(job: Job) -> Iterator[None]:
    for buckets in ([1000, 500], [700]):
        for _ in range(2):
            job.forward()
            job.backward(buckets)
        job.optimizer()
    yield


WITHOUT = [
    no_sync, equal_layers, pipeline, one_forward_one_backward, optimizer_each_time, tensor_parallel, logged_loss,
    metrics_alone, another_size_each_time, two_models, no_optimizer, no_sizes,
    recomputed_units, closure_of_the_optimizer, set_to_zero_in_between, turns_of_two_optimizers,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("of_step", WITHOUT, ids=[of_step.__name__ for of_step in WITHOUT])
def test_nothing_is_said_where_it_can_be_something_else(tmp_path: Path, of_step: Any, kind: str) -> None:
    job = Job(kind)
    if kind == "fsdp2" and of_step in (tensor_parallel, logged_loss, metrics_alone):
        job._range = ""  # these are reduced outside FSDP's ranges
    for _ in range(3):
        list(of_step(job))
        job.step()
    assert job.found(tmp_path) is None


def test_a_step_that_a_scaler_left_out_does_not_make_two_of_one(tmp_path: Path) -> None:
    job = Job()
    for scaled in (False, True):
        job.forward()
        job.backward()
        if scaled:
            job.optimizer()
        job.step()
    assert job.found(tmp_path) is None


def test_what_the_file_began_and_ended_within_is_left_out(tmp_path: Path) -> None:
    job = Job()
    job.backward()
    job.optimizer()
    job.step()
    accumulating(job, steps=2)
    job.forward()
    job.backward()
    assert job.times_and("update_ms", tmp_path) == (4, 33)


def test_what_is_hidden_is_not_worth_a_sentence(tmp_path: Path) -> None:
    job = accumulating(Job())
    hidden = [kineto.kernel(kineto.GEMM, 0, 99 * MS, 9999, stream=9), kineto.launch(0, 9999)]
    path = kineto.write(tmp_path / "hidden.json", [*hidden, *job.events], **kineto.job())
    found = analyze([read_trace(path)])
    assert found.traces[0].reductions is not None
    assert not [sentence for sentence in verdict(found) if "defer" in sentence]
