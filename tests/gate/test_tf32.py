"""TF32 on and off, in jobs that set torch's 32-bit precisions in each way that torch offers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from overlap_callbacks import arms
from overlap_callbacks.gate import tf32
from overlap_callbacks.gate.switches import RefusedError, SwitchState

PRODUCTS = ("highest", "high", "medium")
needs_operations = pytest.mark.skipif(
    not tf32._HAS_OPERATIONS, reason="torch before 2.9 has no precision per operation"
)

# What a job may write: first the older settings, then those of torch 2.9.
OLDER = [
    "; ".join(filter(None, lines))
    for lines in itertools.product(
        ("", *(f"torch.set_float32_matmul_precision({precision!r})" for precision in PRODUCTS)),
        ("", "torch.backends.cuda.matmul.allow_tf32 = True"),
        ("", "torch.backends.cudnn.allow_tf32 = False"),
    )
]
NEWER = [
    "",
    *(
        f"torch.backends.{holder}fp32_precision = {precision!r}"
        for holder in ("", "cuda.matmul.", "cudnn.", "cudnn.conv.", "cudnn.rnn.")
        for precision in ("ieee", "tf32")
    ),
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cudnn.fp32_precision = 'ieee'",
]
OPERATIONS = [
    ("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "all"), ("mkldnn", "matmul"),
]  # fmt: skip
GETTERS: dict[str, Callable[[], object]] = {
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
}
RAISES = "raises"


def begin(*lines: str) -> None:
    """Torch as it is imported, and then the job's lines."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    if tf32._HAS_OPERATIONS:
        for operation in OPERATIONS:
            torch._C._set_fp32_precision_setter(*operation, "tf32" if operation[1] in ("conv", "rnn") else "none")
    exec("; ".join(filter(None, lines)), {"torch": torch})


@pytest.fixture(autouse=True)
def as_imported() -> Iterator[None]:
    before = answers()
    begin()
    assert answers() == before
    yield
    begin()


def answers() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, getter in GETTERS.items():
        found[name] = RAISES
        with contextlib.suppress(RuntimeError):
            found[name] = getter()
    if tf32._HAS_OPERATIONS:
        found |= {"/".join(op): torch._C._get_fp32_precision_getter(*op) for op in OPERATIONS}
    return found


def all_answers() -> list[dict[str, object]]:
    """Also what getters tell after the job's next line: two settings may read alike, and part then."""
    found = [answers()]
    for line in (*NEWER[1:3], "torch.backends.cudnn.fp32_precision = 'ieee'"):
        exec(line, {"torch": torch})
        found.append(answers())
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    return [*found, answers()]


def switch(allowed: bool) -> tf32.TF32Switch | None:
    """None if this job has it so already."""
    with mock.patch("overlap_callbacks.gate.arms._expect_cuda"):
        made = None
        with contextlib.suppress(ValueError):
            made = arms.AllowTF32(allowed).switch({})
    assert made is None or isinstance(made, tf32.TF32Switch)
    return made


def assert_tf32(found: dict[str, object], allowed: bool) -> None:
    assert {found[f"cuda/{operation}"] == "tf32" for operation in ("matmul", "conv", "rnn")} == {allowed}


@needs_operations
@pytest.mark.parametrize("allowed", [True, False])
def test_torch_answers_while_the_arm_is_on_and_is_as_it_was_afterwards(allowed: bool) -> None:
    raised = 0
    for older, newer in itertools.product(OLDER, NEWER):
        for job in ((older, newer), (newer, older)):
            begin(*job)
            before, all_before = answers(), all_answers()
            begin(*job)
            turned = switch(allowed)
            assert answers() == before, job
            if turned is None:
                assert_tf32(before, allowed)
                continue
            turned.apply()
            on = answers()
            assert_tf32(on, allowed)
            assert RAISES not in on.values(), job
            turned.restore()
            assert answers() == before, job
            turned.restore()
            assert all_answers() == all_before, job
            begin(*job, arms.AllowTF32(allowed).line)
            assert answers() == on, job
            raised += RAISES in before.values()
    assert raised > 100  # jobs that mix old and new settings, which torch's older getters refuse


@pytest.mark.parametrize("allowed", [True, False])
def test_torch_without_precisions_of_operations(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for older in OLDER:
        begin(older)
        before = answers()
        if RAISES in before.values():  # only with the newer settings can the older ones disagree
            continue
        with monkeypatch.context() as patch:
            patch.setattr(tf32, "_HAS_OPERATIONS", False)
            turned = switch(allowed)
            if turned is None:
                continue
            turned.apply()
            assert [getter() for getter in GETTERS.values()] == ["high" if allowed else "highest", allowed, allowed]
            turned.restore()
        after = answers()
        assert {name: after[name] for name in GETTERS} == {name: before[name] for name in GETTERS}, older


def test_an_arm_that_could_not_be_restored_is_refused() -> None:
    torch.set_float32_matmul_precision("medium")
    before = answers()
    with (
        mock.patch("overlap_callbacks.gate.arms._expect_cuda"),
        mock.patch("torch.get_float32_matmul_precision", side_effect=RuntimeError("a mix of settings")),
        pytest.raises(ValueError, match="torch does not tell the 32-bit precisions to restore: a mix of settings"),
    ):
        arms.AllowTF32(False).switch({})
    assert answers() == before


def test_what_torch_did_not_take_is_said_and_restored() -> None:
    state = SwitchState()
    state.use(switch(True))
    before = answers()
    with (
        mock.patch("torch.set_float32_matmul_precision"),
        pytest.raises(RefusedError, match=r"torch did not take the 32-bit precision \[OC133\]"),
    ):
        state.turn(on=True)
    assert not state.is_turned
    assert answers() == before
