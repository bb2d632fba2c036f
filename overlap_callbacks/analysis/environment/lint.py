"""Known traps in a job's environment: settings that cost performance, or that change the meaning of figures.

Each rule cites a public document. A rule stays silent if it lacks a fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple, Union

import msgspec

from overlap_callbacks.analysis.environment.job import WITHIN, is_on
from overlap_callbacks.analysis.formatting import short_kernel_name, shortened
from overlap_callbacks.analysis.results.environment import Finding, JobEnvironment, Severity
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.sums import distinct, struct_sum

NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_CUDA_DOCS = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
TORCH_NCCL_DOCS = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
TORCH_DISTRIBUTED_DOCS = "https://docs.pytorch.org/docs/stable/distributed.html"
HIP_DOCS = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
MEGATRON_ARGUMENTS = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py"
MEGATRON_FSDP_DOCS = "https://github.com/NVIDIA/Megatron-LM/blob/main/docs/user-guide/features/megatron_fsdp.md"
TORCH_ISSUE_TIMING = "https://github.com/pytorch/pytorch/issues/143890"
TORCH_RUN = "https://github.com/pytorch/pytorch/blob/main/torch/distributed/run.py"

# Minimum share of the device's SMs for a finding on the blocks of a communication kernel. Our judgement.
MIN_SM_SHARE = 0.25

_BLACKWELL = 10  # major compute capability

_QUEUES, _DEFAULT_QUEUES = "GPU_MAX_HW_QUEUES", 4

# Maximum launches kept over many ranks: rules only use the first.
_MAX_GRIDS = 8
_MAX_DIMENSIONS = 32


class Grid(NamedTuple):
    """The largest launch of an NCCL or RCCL kernel; ``num_sms`` of the device is 0 if unknown."""

    kernel: str
    num_blocks: int
    num_sms: int

    @property
    def limited(self) -> bool:
        """Whether NCCL's block limits apply to it. Sends, NVLink SHARP and symmetric kernels have others."""
        return not any(part in self.kernel for part in ("SendRecv", "NVLS", "Symk"))

    @property
    def short_name(self) -> str:
        """The kernel's name without its arguments."""
        return shortened(short_kernel_name(self.kernel).partition("(")[0], 80)


class Traits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts from ranks' windows that rules use.

    Dimensions served by groups of several ranks, NCCL's largest launches, and the streams that run kernels in a step.
    """

    dimensions: Annotated[tuple[str, ...], _dimensions]
    uses_nccl: Annotated[bool, any]
    grids: Annotated[tuple[Grid, ...], _largest]
    num_streams: Annotated[int, max] = 0


def _largest(parts: Sequence[Sequence[Grid]]) -> tuple[Grid, ...]:
    grids = sorted(set().union(*parts), key=lambda grid: (-grid.num_blocks, grid.kernel))
    by_share = sorted([grid for grid in grids if grid.num_sms], key=lambda grid: -grid.num_blocks / grid.num_sms)
    limited = [grid for grid in grids if grid.limited]
    return tuple(dict.fromkeys([*limited[:_MAX_GRIDS], *by_share[:_MAX_GRIDS]]))


def _dimensions(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return distinct(parts)[:_MAX_DIMENSIONS]


add_traits = struct_sum(Traits)


def traits_of(window: RankWindow) -> Traits:
    """From one rank's window."""
    grids = [
        Grid(kernel.name, kernel.num_blocks, window.num_sms)
        for kernel in window.kernels
        if kernel.communication and kernel.num_blocks and "nccl" in kernel.name
    ]
    dimensions = [row.dimension for row in window.collectives if row.dimension and row.group_size > 1]
    return Traits(_dimensions([dimensions]), "nccl" in window.backend, _largest([grids]), window.num_streams)


_Limited = tuple[Union[Grid, None], str, int]


class JobFacts:
    """Facts available to rules, from the job and from its ranks' windows."""

    def __init__(self, environment: JobEnvironment, traits: Traits) -> None:
        self.environment = environment
        self.own = environment.lowest_rank
        self.on_cpu = self.own.device == "cpu"
        self.on_amd = bool(self.own.hip)
        self.dimensions = set(traits.dimensions)
        self.uses_nccl = traits.uses_nccl
        self.num_streams = traits.num_streams
        self.grids = sorted(traits.grids, key=lambda grid: (-grid.num_blocks, grid.kernel))
        # The largest launch that NCCL's limits apply to.
        self.largest = next((grid for grid in self.grids if grid.limited), None)

    def values(self, name: str) -> Iterator[tuple[str, str]]:
        """The values of a variable, and the ranks that have each; empty text if all have it."""
        for difference in self.environment.differing:
            if difference.name == name:
                for value in difference.values:
                    if value.value is not None:
                        yield value.value, f" on {value.ranks}"
                return
        if name in self.own.variables:
            yield self.own.variables[name], ""

    def setting(self, patterns: str) -> str:
        """The first of some settings that is made, e.g. ``NCCL_DEBUG=INFO on rank 3``; empty without one.

        A pattern in capitals follows ``=``; a variable without a pattern must be on, as in ``NCCL_IB_DISABLE=1``.
        """
        for name, _, pattern in [setting.partition("=") for setting in patterns.split()]:
            for value, ranks in self.values(name):
                if fnmatchcase(value.strip().upper(), pattern) if pattern else is_on(value):
                    return f"{name}={value}{ranks}"
        return ""

    def number(self, name: str) -> tuple[str, int] | None:
        """A variable that is a positive number on all ranks."""
        values = list(self.values(name))
        if len(values) == 1 and not values[0][1] and values[0][0].isdigit() and int(values[0][0]) > 0:
            return name, int(values[0][0])
        return None


class Rule(NamedTuple):
    """A trap: ``check`` returns the finding as a sentence, or None; ``action`` says what to do."""

    code: str
    name: str
    severity: Severity
    check: Callable[[JobFacts], str | None]
    action: str
    source: str


def lint_job(environment: JobEnvironment, traits: Traits) -> tuple[Finding, ...]:
    """The findings of a window, most serious first."""
    facts = JobFacts(environment, traits)
    found = [
        Finding(rule.name, rule.severity, f"{message} [{rule.code}]", rule.action, rule.source)
        for rule in RULES
        if (message := rule.check(facts)) is not None
    ]
    return tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity)))


# -- the rules


def _setting(
    says: str, patterns: str, where: Callable[[JobFacts], bool] = lambda facts: True
) -> Callable[[JobFacts], str | None]:
    """A check for settings (see ``JobFacts.setting``) whose effect it describes, in some jobs."""

    def check(facts: JobFacts) -> str | None:
        setting = facts.setting(patterns) if where(facts) else ""
        return f"{setting}: {says}" if setting else None

    return check


def _uses_nccl(facts: JobFacts) -> bool:
    return facts.uses_nccl


def _on_cuda(facts: JobFacts) -> bool:
    return not (facts.on_cpu or facts.on_amd)


def _on_amd(facts: JobFacts) -> bool:
    return facts.on_amd


def _shares_hosts(facts: JobFacts) -> bool:
    return facts.uses_nccl and any(transport.between == WITHIN for transport in facts.environment.transports)


def _one_connection_needed(facts: JobFacts) -> str | None:
    connections = facts.setting("CUDA_DEVICE_MAX_CONNECTIONS=*")
    if not _needs_one_connection(facts) or connections == "CUDA_DEVICE_MAX_CONNECTIONS=1":
        return None
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS is not 1: Megatron relies on it, before Blackwell, to launch the communication "
        "of tensor and context parallelism before the compute that is to hide it."
    )


def _needs_one_connection(facts: JobFacts) -> bool:
    if not _on_cuda(facts) or not facts.own.framework.lower().startswith("megatron"):
        return False
    major = facts.own.compute_capability.partition(".")[0]
    return major.isdigit() and int(major) < _BLACKWELL and bool(facts.dimensions & {"tensor", "context"})


def _timing_on_one_connection(facts: JobFacts) -> str | None:
    timing = facts.setting("TORCH_NCCL_ENABLE_TIMING NCCL_ENABLE_TIMING TORCH_NCCL_DESYNC_DEBUG NCCL_DESYNC_DEBUG")
    connections = facts.setting("CUDA_DEVICE_MAX_CONNECTIONS=1")
    if not (timing and connections and _on_cuda(facts) and facts.uses_nccl):
        return None
    return (
        f"{timing} with {connections}: events with timing around each collective keep the next kernel back on the one "
        "connection, so collectives of tensor parallelism do not overlap with matrix products."
    )


def _too_few_queues(facts: JobFacts) -> str | None:
    values = [(value, ranks) for value, ranks in facts.values(_QUEUES) if value.strip().isdigit() and int(value) > 0]
    queues, ranks = min(((int(value), ranks) for value, ranks in values), default=(_DEFAULT_QUEUES, ""))
    if not facts.on_amd or facts.num_streams <= queues or queues == 1:  # for 1, another rule applies
        return None
    setting = f"{_QUEUES}={queues}{ranks}" if values else f"{_QUEUES} is not set, and HIP's default is {queues}"
    return f"{setting}: a step ran kernels on {facts.num_streams} streams, and those that share a queue take turns."


def _too_many_blocks(facts: JobFacts) -> str | None:
    grid, limit, number = _largest_and_limit(facts, min, "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
    if grid is None or grid.num_blocks <= number:
        return None
    return f"{grid.short_name} ran with {grid.num_blocks} blocks, though {limit}={number}."


def _minimum_not_reached(facts: JobFacts) -> str | None:
    grid, limit, number = _largest_and_limit(facts, max, "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")
    if grid is None or grid.num_blocks >= number:
        return None
    return f"No kernel of NCCL ran with more than {grid.num_blocks} blocks, though {limit}={number}."


def _minimum_binds(facts: JobFacts) -> str | None:
    grid, limit, number = _largest_and_limit(facts, max, "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")
    if grid is None or number == 1 or grid.num_blocks != number:
        return None
    return (
        f"{grid.short_name} ran with just as many blocks as {limit}={number} asks for at least: NCCL's own estimate "
        f"of what it needs may be lower."
    )


def _largest_and_limit(facts: JobFacts, choose: Callable[..., tuple[str, int]], *names: str) -> _Limited:
    """The largest launch, and the effective one of two variables for one limit: NCCL takes the more restrictive.

    The launch is None if there is none, or no limit.
    """
    limits = [limit for name in names if (limit := facts.number(name)) is not None]
    if not limits or facts.largest is None:
        return None, "", 0
    return facts.largest, *choose(limits, key=lambda limit: limit[1])


def _many_sms(facts: JobFacts) -> str | None:
    grid = max(
        (grid for grid in facts.grids if grid.num_sms),
        key=lambda grid: grid.num_blocks / grid.num_sms,
        default=None,
    )
    if grid is None or grid.num_blocks < MIN_SM_SHARE * grid.num_sms:
        return None
    share = min(100, round(100 * grid.num_blocks / grid.num_sms))
    return f"{grid.short_name} ran with {grid.num_blocks} blocks on {grid.num_sms} SMs: up to {share}% of the device."


def _crowded(facts: JobFacts) -> str | None:
    return _too_few_cpus(facts) if facts.own.num_threads != 1 else None


def _more_ranks_than_cpus(facts: JobFacts) -> str | None:
    return _too_few_cpus(facts) if facts.own.num_threads == 1 else None


def _too_few_cpus(facts: JobFacts) -> str | None:
    crowded = facts.environment.crowded_host if facts.on_cpu else ""
    return f"{crowded}: they take turns, and kernel times contain the waiting." if crowded else None


def _differing(facts: JobFacts) -> str | None:
    names = [difference.name for difference in facts.environment.differing if difference.name not in _MAY_DIFFER]
    if not names:
        return None
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"The ranks' environments differ in {shown}."


# Variables that name parts of a host, whose names may differ on another.
_MAY_DIFFER = frozenset(
    {
        "GLOO_SOCKET_IFNAME", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE",
        "NCCL_GRAPH_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES",
    }
)  # fmt: skip

RULES = (
    Rule(
        "OC501", "cuda-launch-blocking", Severity.SERIOUS,
        _setting("the host waits for each kernel, so nothing overlaps.", "CUDA_LAUNCH_BLOCKING", _on_cuda),
        "Unset it, but to find an error.", f"{TORCH_CUDA_DOCS}#asynchronous-execution",
    ),
    Rule(
        "OC502", "hip-serialised-kernels", Severity.SERIOUS,
        _setting(
            "kernels run one after the other, so nothing overlaps.", "HIP_LAUNCH_BLOCKING AMD_SERIALIZE_KERNEL",
            _on_amd,
        ),
        "Unset it, but to find an error.", HIP_DOCS,
    ),
    Rule(
        "OC503", "hip-one-queue", Severity.SERIOUS,
        _setting("all streams of a device share one hardware queue.", "GPU_MAX_HW_QUEUES=1", _on_amd),
        "Unset it (the default is 4), or set it to 2 or more.", HIP_DOCS,
    ),
    Rule(
        "OC504", "hip-few-queues", Severity.WARNING, _too_few_queues,
        "Set it to the number of streams or more on all ranks, and measure again: up to all that ran on a shared queue "
        "may then overlap.",
        HIP_DOCS,
    ),
    Rule(
        "OC505", "nccl-timing-one-connection", Severity.WARNING, _timing_on_one_connection,
        "Unset the timing (and TORCH_NCCL_DESYNC_DEBUG, which turns it on), but to find an error.", TORCH_ISSUE_TIMING,
    ),
    Rule(
        "OC506", "nccl-blocking-wait", Severity.SERIOUS,
        _setting(
            "waiting for a collective blocks the host, so sequential steps starve the device and overlap looks better "
            "than it is.",
            "TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT", _uses_nccl,
        ),
        "Unset it: torch notices failed collectives without it (TORCH_NCCL_ASYNC_ERROR_HANDLING).", TORCH_NCCL_DOCS,
    ),
    Rule(
        "OC507", "torch-distributed-debug", Severity.WARNING,
        _setting("all ranks meet for a check before each collective, in both modes.", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        "Unset it, or use INFO, but to find a hang.", f"{TORCH_DISTRIBUTED_DOCS}#torch-distributed-debug",
    ),
    Rule(
        "OC508", "max-connections-not-one", Severity.WARNING, _one_connection_needed,
        "Set it to 1 before the job starts, unless the job uses FSDP or overlaps its expert all-to-all.",
        MEGATRON_ARGUMENTS,
    ),
    Rule(
        "OC509", "max-connections-one", Severity.WARNING,
        _setting(
            "streams are not independent, so communication may wait for compute.", "CUDA_DEVICE_MAX_CONNECTIONS=1",
            lambda facts: _on_cuda(facts) and not _needs_one_connection(facts),
        ),
        "Unset it, unless tensor or context parallelism of Megatron needs it (on Hopper and before).",
        MEGATRON_FSDP_DOCS,
    ),
    Rule(
        "OC510", "no-memory-caching", Severity.WARNING,
        _setting(
            "memory is given back to the driver at once, which synchronises the device.",
            "PYTORCH_NO_CUDA_MEMORY_CACHING", lambda facts: not facts.on_cpu,
        ),
        "Unset it, but to find an error.", f"{TORCH_CUDA_DOCS}#memory-management",
    ),
    Rule(
        "OC511", "nccl-p2p-off", Severity.WARNING,
        _setting(
            "GPUs of one host do not reach each other directly, by NVLink or PCIe.",
            "NCCL_P2P_DISABLE NCCL_P2P_LEVEL=LOC NCCL_P2P_LEVEL=0", _shares_hosts,
        ),
        "Unset it; if NCCL hangs or fails without it, the fault lies in the machine's set-up.",
        f"{NCCL_DOCS}#nccl-p2p-disable",
    ),
    Rule(
        "OC512", "nccl-shm-off", Severity.WARNING,
        _setting(
            "GPUs of one host that cannot reach each other directly communicate over the network.",
            "NCCL_SHM_DISABLE", _uses_nccl,
        ),
        "Unset it; a container may need more shared memory instead.", f"{NCCL_DOCS}#nccl-shm-disable",
    ),
    Rule(
        "OC513", "nccl-ib-off", Severity.WARNING,
        _setting(
            "hosts do not communicate over InfiniBand or RoCE.", "NCCL_IB_DISABLE",
            lambda facts: facts.uses_nccl and facts.environment.num_hosts > 1,
        ),
        "Unset it where the hosts have InfiniBand or RoCE.", f"{NCCL_DOCS}#nccl-ib-disable",
    ),
    Rule(
        "OC514", "nccl-protocol", Severity.WARNING,
        _setting("NCCL may not choose its protocol by itself.", "NCCL_PROTO=?*", _uses_nccl),
        "Unset it: NCCL's documentation discourages it, but to avoid a bug of one protocol.", f"{NCCL_DOCS}#nccl-proto",
    ),
    Rule(
        "OC515", "nccl-max-ctas-exceeded", Severity.WARNING, _too_many_blocks,
        "Set it before the first process group is made, and on all ranks.", f"{NCCL_DOCS}#nccl-max-ctas",
    ),
    Rule(
        "OC516", "nccl-min-ctas-not-reached", Severity.NOTE, _minimum_not_reached,
        "Small messages take fewer; for large ones, set it before the first process group is made.",
        f"{NCCL_DOCS}#nccl-min-ctas",
    ),
    Rule(
        "OC517", "nccl-min-ctas-binds", Severity.NOTE, _minimum_binds,
        "Measure once without it: more blocks than needed take SMs from compute.", f"{NCCL_DOCS}#nccl-min-ctas",
    ),
    Rule(
        "OC518", "nccl-many-sms", Severity.NOTE, _many_sms,
        "Measure once with a smaller NCCL_MAX_CTAS: NCCL prefers its own throughput to SMs left for compute.",
        f"{NCCL_DOCS}#nccl-max-ctas",
    ),
    Rule(
        "OC519", "nccl-argument-checks", Severity.NOTE,
        _setting(
            "NCCL checks the arguments of each collective, which adds latency.",
            "NCCL_CHECK_POINTERS NCCL_CHECK_MODE=DEBUG*", _uses_nccl,
        ),
        "Unset it, but to find an error.", f"{NCCL_DOCS}#nccl-check-pointers",
    ),
    Rule(
        "OC520", "nccl-trace-log", Severity.NOTE,
        _setting("NCCL may print a line for each call.", "NCCL_DEBUG=TRACE", _uses_nccl),
        "Unset it, or use WARN, but to find an error.", f"{NCCL_DOCS}#nccl-debug",
    ),
    Rule(
        "OC521", "crowded-cpus", Severity.WARNING, _crowded,
        "Set OMP_NUM_THREADS to the CPUs per rank, or start the ranks with torchrun, which sets it to 1.", TORCH_RUN,
    ),
    Rule(
        "OC522", "more-ranks-than-cpus", Severity.WARNING, _more_ranks_than_cpus,
        "Start fewer ranks on the host: each has one thread already.", TORCH_RUN,
    ),
    Rule(
        "OC523", "ranks-differ", Severity.WARNING, _differing,
        "Start all ranks with the same software and variables.", f"{NCCL_DOCS}#environment-variables",
    ),
)  # fmt: skip
