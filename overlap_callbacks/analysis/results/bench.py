"""Measurements of ``overlap bench``: plain data, the lines of its result file.

The first line is a ``Start``, each further one a point measured in one round, so that a crash costs at most one point.
"""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.environment import RankEnvironment

# File name in the results folder.
FILE_NAME = "bench.jsonl"
SCHEMA = 1

# The two benchmarks.
GEMM, COLLECTIVES = "gemm-allreduce", "collectives"
# What connects the ranks.
GLOO, NCCL, LOOPBACK = "gloo", "nccl", "loopback"
# What runs in a block.
COMPUTE, COMMUNICATION, BOTH = "compute", "communication", "both"
# The blocks of a point in one round. Linear drift affects all conditions equally.
CONDITIONS = (COMPUTE, COMMUNICATION, BOTH, BOTH, COMMUNICATION, COMPUTE)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark measures, and on what.

    Attributes:
        link: ``gloo``, ``nccl``, or ``loopback``: one process whose second rank is a phantom.
        device: ``cpu`` or ``cuda``.
        threads: threads of each rank's matrix products on a CPU; 0 for torch's own number.
        rounds: number of measurements of each point.
        block_s: minimum length of a block.
        sizes, dtypes: of ``gemm-allreduce``, its N x N matrices.
        ctas: thread blocks of its all-reduces; 0 for the link's default.
        link_gb_s: of a loopback link, its bandwidth in 10^9 bytes a second.
        kinds: of ``collectives``, e.g. ``all_reduce``.
        groups: of ``collectives``: ``world``, ``N`` for groups of N neighbours, ``N:S`` for N ranks that are S apart.
        power_caps_w, clock_caps_mhz: of ``gemm-allreduce``, limits of each device; None for its own.
    """

    bench: str
    link: str
    device: str
    ranks: int
    threads: int
    rounds: int
    block_s: float
    message_bytes: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    ctas: tuple[int, ...] = (0,)
    link_gb_s: float | None = None
    kinds: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    power_caps_w: tuple[float | None, ...] = (None,)
    clock_caps_mhz: tuple[float | None, ...] = (None,)


class GemmPoint(msgspec.Struct, frozen=True):
    """Matrix products of one size, N x N, during all-reduces of one size; see ``Plan``."""

    dtype: str
    ctas: int
    message_bytes: int
    n: int
    power_cap_w: float | None = None
    clock_cap_mhz: float | None = None

    @property
    def cap_in_words(self) -> str:
        """E.g. ``300 W, 1,200 MHz``; empty without a cap."""
        parts = [] if self.power_cap_w is None else [f"{self.power_cap_w:g} W"]
        parts += [] if self.clock_cap_mhz is None else [f"{self.clock_cap_mhz:,.0f} MHz"]
        return ", ".join(parts)


class TransferPoint(msgspec.Struct, frozen=True, order=True):
    """One kind of collective with messages of one size; ``group`` is one of ``Plan.groups``.

    Attributes:
        kind: e.g. ``all_reduce``; ``send_recv`` is a send of one rank to the next.
        message_bytes: the larger of what a call reads and writes on a rank.
    """

    kind: str
    group: str
    message_bytes: int


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a point: mean times over its calls and ranks; None if not measured.

    Attributes:
        condition: ``compute``, ``communication`` or ``both``.
        gemm_ms: geometric mean time of a matrix product; in ``both``, of those that began in the first half of the
            communication and ended within it.
        gemms: number of these products, on all ranks.
        covered: in ``both``, these as a share of the products that began in the first half of the communication.
        all_reduce_ms: geometric mean time of an all-reduce, on the rank that waited least.
        power_w, sm_clock_mhz: means of a device.
    """

    condition: str
    gemm_ms: float | None = None
    gemms: int = 0
    covered: float | None = None
    all_reduce_ms: float | None = None
    all_reduces: int = 0
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    length_s: float = 0.0


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="line"):
    """The first line: what is measured, with which options, on which machine.

    ``device_name`` and ``environment`` are rank 0's. ``power_missing``: why there is no power; empty if there is.
    """

    schema: int
    plan: Plan
    command: str
    started_at: str
    library_version: str
    torch_version: str
    python_version: str
    device_name: str
    power_source: str = ""
    power_missing: str = ""
    environment: RankEnvironment | None = None
    units: dict[str, str] = {}


class GemmRound(msgspec.Struct, frozen=True, kw_only=True, tag="gemm", tag_field="line"):
    """One point of ``gemm-allreduce`` in one round, counted from 0.

    Attributes:
        flop: floating-point operations of a product, 2 N^3.
        gemms_per_call: products timed together, so that the clock is precise enough.
        all_reduces_per_trial: consecutive all-reduces.
        blocks: in the order in which they ran.
    """

    point: GemmPoint
    round: int
    flop: int
    gemms_per_call: int
    all_reduces_per_trial: int
    blocks: tuple[Block, ...]


class TransferRound(msgspec.Struct, frozen=True, kw_only=True, tag="collective", tag_field="line"):
    """One point of ``collectives`` in one round: mean time of ``calls`` consecutive calls."""

    point: TransferPoint
    round: int
    group_size: int
    time_ms: float
    calls: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="line"):
    """A point that cannot be measured here, and why; later rounds skip it."""

    gemm: GemmPoint | None = None
    transfer: TransferPoint | None = None
    reason: str = ""


class Resumed(msgspec.Struct, frozen=True, kw_only=True, tag="resumed", tag_field="line"):
    """The benchmark was resumed, on this machine and with these versions."""

    at: str
    library_version: str
    torch_version: str
    device_name: str
