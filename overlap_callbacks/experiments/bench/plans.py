"""Makes a benchmark's plan from the user's options and this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlap_callbacks import _validation
from overlap_callbacks.analysis.bench import powers_of_two
from overlap_callbacks.analysis.results.bench import COLLECTIVES, GEMM, GLOO, LOOPBACK, NCCL, Plan
from overlap_callbacks.experiments.bench.gemm_bench import DTYPES, message_dtype, refusal, usable
from overlap_callbacks.experiments.bench.results import KINDS, ranks_of
from overlap_callbacks.experiments.capping import refuse_on_cpu
from overlap_callbacks.experiments.machine import cores, free_bytes
from overlap_callbacks.experiments.sweep import chosen

_MIB, _GIB = 2**20, 2**30
_MAX_N, _MAX_RANKS, _MAX_CTAS = 131_072, 1024, 1024
# Default bandwidth of a loopback link.
_LOOPBACK_GB_S = {"cuda": 40.0, "cpu": 0.5}
# Maximum share of free memory that a benchmark may need.
_MEMORY_SHARE = 0.8
# Operators of the loopback link, which has no sends and receives.
_LOOPBACK_KINDS = tuple([kind for kind in KINDS if kind != "send_recv"])


def make_plan(bench: str, asked: Mapping[str, Any], *, quick: bool = True, world_size: int | None = None) -> Plan:
    """The plan of a benchmark.

    Args:
        bench: ``GEMM`` or ``COLLECTIVES``.
        asked: the user's options: fields of ``Plan``; for collectives also ``max_bytes``, the largest message if
            ``message_bytes`` is not given.
        quick: whether the defaults are those of a few minutes.
        world_size: ranks started by a launcher; None without a launcher.

    Raises:
        ValueError: this machine cannot run it as asked.
    """
    found = chosen(asked)
    device = _device(found)
    link = _link(found, device, world_size)
    _check_link(found, link, device)
    if device == "cpu":
        refuse_on_cpu(found)
    ranks = _ranks(found, link, world_size)
    largest = found.pop("max_bytes", None)
    plan = Plan(
        **{
            "threads": max(1, cores() // ranks) if device == "cpu" and link != LOOPBACK else 0,
            "link_gb_s": _LOOPBACK_GB_S[device] if link == LOOPBACK else None,
            **(_gemm_sweep(link, device, quick) if bench == GEMM else _collectives_sweep(link, device, quick, largest)),
            **found,
            **{"bench": bench, "link": link, "device": device, "ranks": ranks},
        }
    )
    _check(plan)
    return plan


def _device(asked: Mapping[str, Any]) -> str:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device: str = asked.get("device") or ("cpu" if asked.get("link") == GLOO else found)
    if device == "cuda" and found != "cuda":
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none: leave it out, or say cpu")
    return device


def _link(asked: Mapping[str, Any], device: str, world_size: int | None) -> str:
    if "link" in asked:
        return str(asked["link"])
    if device == "cpu":
        return GLOO
    return NCCL if world_size is not None or torch.cuda.device_count() > 1 else LOOPBACK


def _ranks(asked: Mapping[str, Any], link: str, world_size: int | None) -> int:
    wanted: int | None = asked.get("ranks")
    if link == LOOPBACK:
        if wanted not in (None, 2) or world_size not in (None, 1):
            raise ValueError("--link loopback has 2 ranks in one process: leave out --ranks, and torchrun")
        return 2
    if world_size is not None:
        if wanted not in (None, world_size):
            raise ValueError(f"--ranks must be the {world_size} ranks that the launcher has started, got {wanted}")
        found = world_size
    else:
        gpus = torch.cuda.device_count() if link == NCCL else 0
        found = wanted or (gpus if link == NCCL else 2)
        if link == NCCL and found > gpus:
            raise ValueError(f"--ranks must be at most the {gpus} GPUs of this host, one a rank, got {found}")
    if not 2 <= found <= _MAX_RANKS:
        raise ValueError(f"--ranks must be from 2 to {_MAX_RANKS}, got {found}: one rank has nobody to talk to")
    return found


def _check_link(asked: Mapping[str, Any], link: str, device: str) -> None:
    if link == NCCL and device == "cpu":
        raise ValueError("--link nccl needs GPUs: on a CPU say gloo or loopback")
    if link == GLOO and device == "cuda":
        raise ValueError("--link gloo is for CPUs here: with GPUs say nccl or loopback")
    if "link_gb_s" in asked:
        if link != LOOPBACK:
            raise ValueError(f"--link-gb-s is the speed of a loopback link: leave it out with {link}")
        _validation.positive("--link-gb-s", asked["link_gb_s"])
    # In earlier versions, kernels in Python cannot read a collective's reduction.
    if link == LOOPBACK and torch.__version__ < "2.9":
        raise ValueError(f"--link loopback needs torch 2.9 or newer, got {torch.__version__}")
    if link == LOOPBACK and device == "cuda":
        from overlap_callbacks.experiments.loopback.device_link import available

        if not available():
            raise ValueError(
                "--link loopback needs nvcc, or its compiled kernels in LOOPBACK_LIBRARY: this host has neither"
            )
    if device == "cpu" and any(asked.get("ctas", ())):
        raise ValueError("--ctas are thread blocks of a GPU's collectives: leave it out on a CPU")


def _gemm_sweep(link: str, device: str, quick: bool) -> dict[str, Any]:
    """Defaults of ``gemm-allreduce``."""
    if device == "cuda":
        types = usable(device)
        return {
            "sizes": (1024, 2048, 4096, 8192) if quick else (512, 1024, 2048, 4096, 8192, 16384),
            "message_bytes": (16 * _MIB, _GIB) if quick else (_MIB, 16 * _MIB, 256 * _MIB, _GIB),
            "dtypes": (next(name for name in ("bf16", "fp16", "fp32") if name in types),) if quick else types,
            "ctas": (0,) if link != LOOPBACK else (24,) if quick else (8, 24, 66),
            "rounds": 3 if quick else 6,
            "block_s": 0.5 if quick else 1.0,
        }
    return {
        "sizes": (256, 512, 1024) if quick else (128, 256, 512, 1024, 2048),
        "message_bytes": (_MIB, 16 * _MIB) if quick else (64 * 2**10, _MIB, 16 * _MIB, 64 * _MIB),
        "dtypes": ("fp32",) if quick else ("fp32", "bf16"),
        "rounds": 3 if quick else 6,
        "block_s": 0.2 if quick else 1.0,
    }


def _collectives_sweep(link: str, device: str, quick: bool, largest: int | None) -> dict[str, Any]:
    """Defaults of ``collectives``, with messages up to ``largest`` bytes."""
    own = (_GIB if quick else 4 * _GIB) if device == "cuda" else (32 if quick else 256) * _MIB
    return {
        "message_bytes": powers_of_two(8, largest or own),
        "kinds": _LOOPBACK_KINDS if link == LOOPBACK else KINDS,
        "groups": ("world",),
        "rounds": 5 if quick else 10,
        "block_s": 0.03 if quick else 0.2,
    }


def _check(plan: Plan) -> None:
    _validation.count("--rounds", plan.rounds, minimum=1, maximum=1000)
    _validation.seconds("--block-s", plan.block_s)
    _validation.count("--threads", plan.threads, minimum=0, maximum=4096)
    for ctas in plan.ctas:
        _validation.count("--ctas", ctas, minimum=0, maximum=_MAX_CTAS)
    if plan.bench == COLLECTIVES:
        _check_collectives(plan)
    else:
        _check_gemm(plan)


def _check_gemm(plan: Plan) -> None:
    for n in plan.sizes:
        _validation.count("--n", n, minimum=1, maximum=_MAX_N)
    for dtype in plan.dtypes:
        _validation.one_of("--dtype", dtype, DTYPES)
        reason = refusal(dtype, plan.device)
        if reason:
            raise ValueError(reason)
        width = message_dtype(dtype).itemsize
        odd = next((size for size in plan.message_bytes if size % width), None)
        if odd is not None:
            raise ValueError(f"--message must be whole numbers of {width} bytes with {dtype}, got {odd} bytes")
        if dtype == "fp8" and any(n % 16 for n in plan.sizes):
            raise ValueError(f"--n must be multiples of 16 with fp8, got {', '.join(map(str, plan.sizes))}")
    # Matrices are created in 32 bit.
    _check_memory(plan, 12 * max(plan.sizes) ** 2 + max(plan.message_bytes))


def _check_collectives(plan: Plan) -> None:
    allowed = _LOOPBACK_KINDS if plan.link == LOOPBACK else KINDS
    for kind in plan.kinds:
        _validation.one_of("--kind", kind, allowed)
    for group in plan.groups:
        ranks_of(group, plan.ranks)  # raises if the text is invalid
    if plan.link == LOOPBACK and plan.groups != ("world",):
        raise ValueError("--groups must be world on a loopback link: it has 2 ranks")
    _check_memory(plan, 3 * max(plan.message_bytes))


def _check_memory(plan: Plan, rank_bytes: int) -> None:
    """Reject what exceeds the host's memory. On a GPU, a point that does not fit is skipped when it is tried."""
    if plan.device != "cpu":
        return
    free = free_bytes()
    if free is not None and plan.ranks * rank_bytes > _MEMORY_SHARE * free:
        raise ValueError(
            f"the largest point needs {plan.ranks * rank_bytes / _GIB:,.1f} GiB on {plan.ranks} ranks of this host, "
            f"{free / _GIB:,.1f} GiB are free: choose smaller sizes"
        )
