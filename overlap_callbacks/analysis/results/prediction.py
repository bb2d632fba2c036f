"""What advice and ``overlap predict --what-if`` predict: plain data."""

from __future__ import annotations

from typing import Any

import msgspec


class Prediction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By how much a change shortens a step, in ms.

    Attributes:
        topic: of the advice; the kind of the prediction.
        settings: words in the names of settings and arms that make the change; empty if no setting shows it.
        rises: whether the change raises the setting; None if either way, or it is no number.
        tries: values of a setting that the advice names, such as ``bucket-mb=1,4``; empty if none.
        step_ms: a step before the change.
        low_ms, high_ms: bounds of what the change saves.
        assumes: what they rest on.
        at: when it was predicted, ISO 8601 with time zone; empty if along with the run.
        job: of ``--what-if``: the fields of the ``JobShape`` of the job in the other layout; empty if of advice.
    """

    topic: str
    settings: tuple[str, ...] = ()
    rises: bool | None = None
    tries: str = ""
    step_ms: float
    low_ms: float
    high_ms: float
    assumes: str = ""
    at: str = ""
    job: dict[str, Any] = {}


# Words in the names of settings and arms, in lower case with ``_`` for ``-``, by the topic of the advice that they are
# about. The first that fits counts.
SETTINGS: dict[str, tuple[str, ...]] = {
    "prefetch": ("prefetch",),
    "buckets": ("bucket_cap", "bucket_mb", "bucket_size", "fsdp_units"),
    "defer-reductions": ("defer", "no_sync", "gradient_sync"),
    "ctas": ("max_ctas", "num_threads"),
    "find-unused-parameters": ("find_unused_parameters",),
    "micro-batches": ("micro_batches", "accumulation"),
    "micro-batch": ("micro_batch",),
    "interleaving": ("chunks", "virtual_pipeline"),
    "fewer-bytes": ("reduce_dtype", "comm_hook", "reduce_in_fp32"),
    "cuda-graphs": ("compile", "cuda_graph", "fused"),
    "power-cap": ("power_cap", "power_limit"),
}
# Changes that raise their settings; False for those that lower them.
RISES = {
    "prefetch": True, "ctas": False, "find-unused-parameters": False, "micro-batches": True, "micro-batch": True,
    "interleaving": True, "power-cap": True,
}  # fmt: skip


def topic_of(name: str) -> str:
    """The topic of the advice that a setting, or an arm, is about; empty if none is."""
    return word_in(name)[0]


def word_in(name: str) -> tuple[str, str]:
    """The topic that a setting's name, or an arm's, is about, and the word that says so; both empty if none does."""
    name = name.lower().replace("-", "_")
    found = [(topic, word) for topic, words in SETTINGS.items() for word in words if word in name]
    return found[0] if found else ("", "")
