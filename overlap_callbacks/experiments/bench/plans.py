"""Makes the plan of a benchmark from what a user asked for and what this machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap_callbacks import _validation
from overlap_callbacks.analysis.bench import powers_of_two
from overlap_callbacks.analysis.results.bench import COLLECTIVES, GEMM, GLOO, LOOPBACK, NCCL, Plan
from overlap_callbacks.experiments.bench.gemm_bench import DTYPES, message_dtype, refusal, usable
from overlap_callbacks.experiments.bench.results import KINDS, ranks_of
from overlap_callbacks.experiments.capping import refuse_on_cpu
from overlap_callbacks.experiments.machine import cores, free_bytes

_MIB, _GIB = 2**20, 2**30
_MAX_N, _MAX_RANKS, _MAX_CTAS = 131_072, 1024, 1024
# Speed of a loopback link, unless one is asked for.
_LOOPBACK_GB_S = {"cuda": 40.0, "cpu": 0.5}
# Share of the free memory that a benchmark may need.
_MEMORY_SHARE = 0.8
# The loopback link's operators; it has no sends and receives.
_LOOPBACK_KINDS = tuple([kind for kind in KINDS if kind != "send_recv"])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asked for; None, or empty, where nothing was said.

    Attributes:
        bench: ``GEMM`` or ``COLLECTIVES``.
        quick: whether the defaults are those of a few minutes.
        link, device, ranks, threads, rounds, block_s, link_gb_s: as in ``Plan``.
        sizes, message_bytes, dtypes, ctas, kinds, groups: as in ``Plan``.
        max_bytes: of collectives, the largest message, where ``message_bytes`` says nothing.
        power_caps_w, clock_caps_mhz: as in ``Plan``.
    """

    bench: str
    quick: bool = True
    link: str | None = None
    device: str | None = None
    ranks: int | None = None
    threads: int | None = None
    rounds: int | None = None
    block_s: float | None = None
    link_gb_s: float | None = None
    sizes: Sequence[int] = ()
    message_bytes: Sequence[int] = ()
    dtypes: Sequence[str] = ()
    ctas: Sequence[int] = ()
    kinds: Sequence[str] = ()
    groups: Sequence[str] = ()
    max_bytes: int | None = None
    power_caps_w: Sequence[float | None] = ()
    clock_caps_mhz: Sequence[float | None] = ()


def make_plan(asked: Asked, world_size: int | None = None) -> Plan:
    """The plan of a benchmark.

    Args:
        asked: what the user asked for.
        world_size: ranks that a launcher has started; None without a launcher.

    Raises:
        ValueError: this machine cannot do what was asked for.
    """
    device = _device(asked)
    link = _link(asked, device, world_size)
    _check_link(asked, link, device)
    if device == "cpu":
        refuse_on_cpu(asked.power_caps_w, asked.clock_caps_mhz)
    ranks = _ranks(asked, link, world_size)
    threads = asked.threads
    if threads is None:
        threads = max(1, cores() // ranks) if device == "cpu" and link != LOOPBACK else 0
    plan = Plan(
        bench=asked.bench, link=link, device=device, ranks=ranks, threads=threads,
        link_gb_s=_link_gb_s(asked, link, device), **_sweep(asked, link, device, ranks),
    )  # fmt: skip
    _check(plan)
    return plan


def _device(asked: Asked) -> str:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = asked.device or ("cpu" if asked.link == GLOO else found)
    if device == "cuda" and found != "cuda":
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none: leave it out, or say cpu")
    return device


def _link(asked: Asked, device: str, world_size: int | None) -> str:
    if asked.link is not None:
        return asked.link
    if device == "cpu":
        return GLOO
    return NCCL if world_size is not None or torch.cuda.device_count() > 1 else LOOPBACK


def _ranks(asked: Asked, link: str, world_size: int | None) -> int:
    if link == LOOPBACK:
        if asked.ranks not in (None, 2) or world_size not in (None, 1):
            raise ValueError("--link loopback has 2 ranks in one process: leave out --ranks, and torchrun")
        return 2
    if world_size is not None:
        if asked.ranks not in (None, world_size):
            raise ValueError(f"--ranks must be the {world_size} ranks that the launcher has started, got {asked.ranks}")
        found = world_size
    else:
        gpus = torch.cuda.device_count() if link == NCCL else 0
        found = asked.ranks or (gpus if link == NCCL else 2)
        if link == NCCL and found > gpus:
            raise ValueError(f"--ranks must be at most the {gpus} GPUs of this host, one a rank, got {found}")
    if not 2 <= found <= _MAX_RANKS:
        raise ValueError(f"--ranks must be from 2 to {_MAX_RANKS}, got {found}: one rank has nobody to talk to")
    return found


def _link_gb_s(asked: Asked, link: str, device: str) -> float | None:
    return asked.link_gb_s if asked.link_gb_s is not None or link != LOOPBACK else _LOOPBACK_GB_S[device]


def _check_link(asked: Asked, link: str, device: str) -> None:
    if link == NCCL and device == "cpu":
        raise ValueError("--link nccl needs GPUs: on a CPU say gloo or loopback")
    if link == GLOO and device == "cuda":
        raise ValueError("--link gloo is for CPUs here: with GPUs say nccl or loopback")
    if asked.link_gb_s is not None:
        if link != LOOPBACK:
            raise ValueError(f"--link-gb-s is the speed of a loopback link: leave it out with {link}")
        _validation.positive("--link-gb-s", asked.link_gb_s)
    # Kernels in Python cannot ask earlier versions which reduction a collective is to do.
    if link == LOOPBACK and torch.__version__ < "2.9":
        raise ValueError(f"--link loopback needs torch 2.9 or newer, got {torch.__version__}")
    if link == LOOPBACK and device == "cuda":
        from overlap_callbacks.experiments.loopback.device_link import available

        if not available():
            raise ValueError(
                "--link loopback needs nvcc, or its compiled kernels in LOOPBACK_LIBRARY: this host has neither"
            )
    if any(asked.ctas) and device == "cpu":
        raise ValueError("--ctas are thread blocks of a GPU's collectives: leave it out on a CPU")


def _sweep(asked: Asked, link: str, device: str, ranks: int) -> dict[str, Any]:
    found = _gemm_sweep(asked, link, device) if asked.bench == GEMM else _collectives_sweep(asked, link, device, ranks)
    if asked.rounds is not None:
        found["rounds"] = asked.rounds
    if asked.block_s is not None:
        found["block_s"] = asked.block_s
    return found


def _gemm_sweep(asked: Asked, link: str, device: str) -> dict[str, Any]:
    quick, cuda = asked.quick, device == "cuda"
    sizes: tuple[int, ...]
    messages: tuple[int, ...]
    if cuda:
        sizes = (1024, 2048, 4096, 8192) if quick else (512, 1024, 2048, 4096, 8192, 16384)
        messages = (16 * _MIB, _GIB) if quick else (_MIB, 16 * _MIB, 256 * _MIB, _GIB)
        dtypes = usable(device)
        if quick:
            dtypes = (next(name for name in ("bf16", "fp16", "fp32") if name in dtypes),)
    else:
        sizes = (256, 512, 1024) if quick else (128, 256, 512, 1024, 2048)
        messages = (_MIB, 16 * _MIB) if quick else (64 * 2**10, _MIB, 16 * _MIB, 64 * _MIB)
        dtypes = ("fp32",) if quick else ("fp32", "bf16")
    own_ctas: tuple[int, ...] = (0,)
    if link == LOOPBACK and cuda:
        own_ctas = (24,) if quick else (8, 24, 66)
    return {
        "sizes": _distinct(asked.sizes) or sizes,
        "message_bytes": _distinct(asked.message_bytes) or messages,
        "dtypes": _distinct(asked.dtypes) or dtypes,
        "ctas": _distinct(asked.ctas) or own_ctas,
        "power_caps_w": _distinct(asked.power_caps_w) or (None,),
        "clock_caps_mhz": _distinct(asked.clock_caps_mhz) or (None,),
        "rounds": 3 if quick else 6,
        "block_s": (0.5 if cuda else 0.2) if quick else 1.0,
    }


def _collectives_sweep(asked: Asked, link: str, device: str, ranks: int) -> dict[str, Any]:
    quick, cuda = asked.quick, device == "cuda"
    most = asked.max_bytes or ((_GIB if cuda else 32 * _MIB) if quick else (4 * _GIB if cuda else 256 * _MIB))
    return {
        "message_bytes": _distinct(asked.message_bytes) or powers_of_two(8, most),
        "kinds": _distinct(asked.kinds) or (_LOOPBACK_KINDS if link == LOOPBACK else KINDS),
        "groups": _distinct(asked.groups) or ("world",),
        "rounds": 5 if quick else 10,
        "block_s": 0.03 if quick else 0.2,
    }


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


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
    # Matrices are made in 32 bit.
    _check_memory(plan, 12 * max(plan.sizes) ** 2 + max(plan.message_bytes))


def _check_collectives(plan: Plan) -> None:
    allowed = _LOOPBACK_KINDS if plan.link == LOOPBACK else KINDS
    for kind in plan.kinds:
        _validation.one_of("--kind", kind, allowed)
    for group in plan.groups:
        ranks_of(group, plan.ranks)  # refuses a text that means none
    if plan.link == LOOPBACK and plan.groups != ("world",):
        raise ValueError("--groups must be world on a loopback link: it has 2 ranks")
    _check_memory(plan, 3 * max(plan.message_bytes))


def _check_memory(plan: Plan, rank_bytes: int) -> None:
    """Refuse what the host has no memory for. On a GPU, a point that does not fit is left out when it is tried."""
    if plan.device != "cpu":
        return
    free = free_bytes()
    if free is not None and plan.ranks * rank_bytes > _MEMORY_SHARE * free:
        raise ValueError(
            f"the largest point needs {plan.ranks * rank_bytes / _GIB:,.1f} GiB on {plan.ranks} ranks of this host, "
            f"{free / _GIB:,.1f} GiB are free: choose smaller sizes"
        )
