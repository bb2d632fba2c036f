"""The bytes of a job's gradients, and the bucket sizes that are worth a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_callbacks.analysis.results.run import Setting

# Data-parallel messages below the first size lack bandwidth on most links, and above the second they start late: DDP's
# default bucket has 25 MB.
SHORT_MESSAGE_BYTES, LONG_MESSAGE_BYTES = 4e6, 100e6
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Bucket sizes to try, in MiB; the least ratio of two; the number of buckets that lets some overlap; what makes a size
# another.
_LARGER_MB, _SMALLER_MB = (25.0, 50.0), (5.0, 25.0)
_APART, _LEAST_BUCKETS, _OTHER_SIZE = 1.5, 2, 1.1


def gradient_bytes_of(configuration: Mapping[str, Setting]) -> float:
    """Bytes of reducing all gradients once; 0 if unknown."""
    size = bytes_of_a_gradient(configuration)
    number = configuration.get("trained_parameters", configuration.get("parameters"))
    return 0.0 if size is None or isinstance(number, str) or not number else float(number) * size


def bytes_of_a_gradient(configuration: Mapping[str, Setting]) -> int | None:
    """Bytes of an element as reduced; None if unknown."""
    hook = str(configuration.get("ddp_comm_hook", "none"))
    if hook not in ("none", "allreduce_hook"):
        return 2 if "fp16_compress" in hook or "bf16_compress" in hook else None
    if configuration.get("ddp_grad_reduce_in_fp32") is True:
        return 4
    types = [
        str(configuration.get(name, "None")).removeprefix("torch.")
        for name in ("fsdp_reduce_dtype", "fsdp_param_dtype", "parameter_types")
    ]
    return _BYTES.get(next((known for known in types if known != "None"), ""))


def bucket_sizes(all_bytes: float, cap: Setting | None, *, larger: bool) -> list[str]:
    """Sizes in MiB to try that are larger than the present one, or smaller; of two or more buckets for all gradients.

    With one bucket nothing overlaps.
    """
    now_mb, most_mb = _in_mib(cap), all_bytes / 2**20 / _LEAST_BUCKETS
    low_mb, high_mb = _LARGER_MB if larger else _SMALLER_MB
    sizes = [low_mb, min(high_mb, most_mb)] if _APART * low_mb <= most_mb else [most_mb / 2, most_mb]
    kept = [mb for mb in sizes if not now_mb or (mb > now_mb * _OTHER_SIZE if larger else mb < now_mb / _OTHER_SIZE)]
    return [f"{mb:.0f}" if mb >= 10 else f"{mb:.2g}" for mb in kept]


def try_sizes(cap: Setting | None, sizes: Sequence[str]) -> str:
    """The present size first if it is known."""
    now = [f"{_in_mib(cap):.3g}"] if _in_mib(cap) else []
    return "--arg bucket-mb=" + ",".join(dict.fromkeys([*now, *sizes]))


def _in_mib(cap: Setting | None) -> float:
    """0 if unknown or without limit."""
    return cap / 2**20 if isinstance(cap, (int, float)) and 0 < cap < 2**40 else 0.0
