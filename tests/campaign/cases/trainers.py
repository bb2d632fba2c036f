"""Training loops of others, from the package index. No fault is put in: nothing may differ.

The loops are those of ``tests/loops``. Each is run twice without the library, and the two must be equal: else a
difference to the runs with it would tell nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tests.campaign.case import CASES, Case
from tests.campaign.job import RUN_FOLDER, Rank
from tests.loops.watching import NUM_STEPS, OPTIONS, watched

GROUP = "Training loops of others"


def train_loop(rank: Rank) -> None:
    """Train as the loop does, and note each loss and all weights after each step of an optimizer."""
    module, _, function = rank.options["loop"].partition(":")
    options = None
    if rank.library:
        rank.keep_log()
        # As users run it: what fails in the library is said, and not raised.
        options = {**OPTIONS, "strict": False, "run_dir": str(rank.folder / RUN_FOLDER)}
    with watched() as watch:
        try:
            getattr(importlib.import_module(module), function)(options, *rank.options["arguments"])
        finally:
            for number, loss in enumerate(watch.losses):
                rank.note(f"loss-{number}", loss.hex())
            for number, weights in enumerate(watch.weights):
                rank.note(f"step-{number}", weights[:16])
    if not watch.losses or len(set(watch.weights)) <= NUM_STEPS // 2:
        raise AssertionError("the loop has no losses, or steps that do not train, so that comparing tells nothing")
    if not rank.library and "overlap_callbacks" in sys.modules:
        raise AssertionError("the reference has loaded the library")


def _enter(name: str, what: str, loop: str, packages: Sequence[str], *arguments: object) -> None:
    CASES[name] = Case(
        name,
        GROUP,
        what,
        train_loop,
        packages=tuple(packages),
        options={"loop": f"tests.loops.{loop}", "arguments": list(arguments)},
        server=True,
        runs=2,
        whole_window=True,
        bound_s=60.0,
        limit_s=300.0,
        nightly="loading the frameworks takes longer than all other cases; tests/loops has these loops",
    )


_enter("loop-trl-sft", "TRL's `SFTTrainer`, two micro-batches", "trl_loops:sft", ("trl", "datasets"), "out")
_enter("loop-trl-dpo", "TRL's `DPOTrainer`, two micro-batches", "trl_loops:dpo", ("trl", "datasets"), "out")
_enter("loop-torchtitan", "torchtitan's `Trainer` with FSDP2", "torchtitan_loop:train", ("torchtitan",), "out", 1)
_enter(
    "loop-torchtitan-twice", "torchtitan's `Trainer` with FSDP2, two micro-batches", "torchtitan_loop:train",
    ("torchtitan",), "out", 2,
)  # fmt: skip
_enter("loop-composer", "Composer's `Trainer`, two micro-batches", "composer_loop:train", ("mosaicml",), 4)
_enter(
    "loop-accelerate", "a loop of our own with Accelerate's `Accelerator`, two micro-batches", "accelerate_loop:train",
    ("accelerate",),
)  # fmt: skip
_enter("loop-lightning", "Lightning's `Trainer` with DDP", "lightning_loop:train", ("lightning",), "out", 1)
_enter(
    "loop-lightning-twice", "Lightning's `Trainer` with DDP, two micro-batches", "lightning_loop:train",
    ("lightning",), "out", 2,
)  # fmt: skip
