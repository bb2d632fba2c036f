"""Advice on what bounds the steps of a run.

Each piece of advice names the measured condition and its possible gain. It is omitted where the job already follows it,
or cannot: the adapter and the environment describe the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.buckets import (
    LONG_MESSAGE_BYTES,
    SHORT_MESSAGE_BYTES,
    bucket_sizes,
    bytes_of_a_gradient,
    gradient_bytes_of,
    try_sizes,
)
from overlap_callbacks.analysis.dimension_rules import UNKNOWN, WORLD
from overlap_callbacks.analysis.exposure import collectives_in_words, first_by_name, name_in_words
from overlap_callbacks.analysis.formatting import PLAIN, bytes_in_words, listed
from overlap_callbacks.analysis.gains import EXPOSED, IN_A_STEP, Gain, JobFacts
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.environment import Severity
from overlap_callbacks.analysis.results.kernel_times import CLOCK, SMS
from overlap_callbacks.analysis.results.prediction import RISES, SETTINGS, Prediction
from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.analysis.results.step_parts import Bound, LateRank
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.stragglers import Straggler

DOCS = "docs/bottlenecks.md"
# A loss of at least this fraction of a step is worth advice.
WORTH = 0.03
# With this few blocks, a communication kernel leaves compute nearly all SMs.
_FEW_BLOCKS = 4
# Padding, and small reductions of other tensors, keep a step's bytes from being an exact multiple of the gradients'.
_TOLERANCE, _NEAR = 0.05, 0.2
_MOST_NAMED = 3
# How the names of kernels show that a job has a way to faster or fewer kernels already.
_SHOWN_BY = {
    "torch.compile": r"^triton_(poi|red|per)_fused_",
    "fused optimizers": r"FusedOptimizer|FusedAdam|_fused_(adam|sgd)",
}
_REDUCTIONS = ("all_reduce", "reduce_scatter")


class Advice(NamedTuple):
    """What to try and why, as sentences; ``topic`` is the section of the docs.

    ``won`` is what it could win, in words: how much of which time; empty if that is not known. ``tries``: the options
    with which ``overlap tune`` tries it. ``prediction`` is the same as ``won``, for programs. ``held`` says how often
    such predictions have held in the user's runs, if that is seldom.
    """

    topic: str
    what: str
    why: str
    won: str = ""
    tries: str = ""
    prediction: Prediction | None = None
    held: str = ""

    @property
    def short(self) -> str:
        """What to try, what it could win, and the command. A short screen cuts the end, never a bad ledger."""
        held = f"({self.held}) " if self.held else ""
        won = f": {self.won.partition(IN_A_STEP)[0]} a step" if self.won else ""
        command = f"overlap tune {self.tries} -- COMMAND" if self.tries else "overlap report THIS_RUN THE_NEXT"
        return f"{held}{self.what.rstrip('.')}{won}. {'Try' if self.tries else 'Then compare'}: {command}"

    @property
    def link(self) -> str:
        return f"{DOCS}#{self.topic}"


def _advice(
    topic: str, what: str, why: str, gain: Gain | None = None, tries: str = "", rises: bool | None = None
) -> Advice:
    if gain is None:
        return Advice(topic, what, why)
    _, low_ms, high_ms, step_ms, assumes = gain
    rises = RISES.get(topic) if rises is None else rises
    found = Prediction(
        topic=topic, settings=SETTINGS.get(topic, ()), rises=rises, tries=tries.rpartition(" ")[2],
        step_ms=step_ms, low_ms=low_ms, high_ms=high_ms, assumes=assumes,
    )  # fmt: skip
    return Advice(topic, what, why, gain.words, tries, found)


def advice_for(
    bound: Bound, job: JobFacts, late: LateRank | None = None, stragglers: Sequence[Straggler] = ()
) -> Iterator[Advice]:
    """Advice, the most promising first."""
    # Such a setting takes overlap away, or keeps the device waiting for the host: it costs compute nothing.
    most = job.up_to(max(0.0, job.parts.total_ms - job.parts.compute_ms), "time without compute")
    for finding in job.detailed.findings:
        if finding.severity is Severity.SERIOUS:
            yield _advice("settings", finding.action, f"{finding.message} That could win {most}.", most)
    yield from _deferring(job)
    contention = list(_against_contention(job))
    if bound is Bound.COMMUNICATION:
        yield from _against_communication(job)
    elif bound is Bound.STRAGGLER:
        yield from _against_straggler(job, late, stragglers)
    elif bound is Bound.LAUNCH:
        yield from _against_launching(job)
    elif bound is Bound.BUBBLE:
        yield from _against_bubble(job)
    elif bound is Bound.HOST_COMMUNICATION:
        yield _against_waiting_for_the_host(job)
    elif not contention:
        yield _against_compute(job)
    yield from contention


# -- gradients that are reduced in each micro-batch


class Reductions(NamedTuple):
    """How often a step reduces each gradient, and the bytes of reducing all of them once."""

    times: int
    gradient_bytes: float
    step_bytes: float


def reductions_of(job: JobFacts) -> Reductions | None:
    """How often a step reduces each gradient: bytes reduced over bytes of the model's gradients.

    None if unknown: no wrapper reduces gradients, a hook changes their size, they have several types, or the ratio is
    not an integer.
    """
    rows, gradient_bytes = _of_gradients(job), gradient_bytes_of(job.configuration)
    if not rows or not gradient_bytes:
        return None
    scattered = [row for row in rows if collective_of(row.operator) == "reduce_scatter"]
    step_bytes = sum(row.size_bytes for row in scattered or rows)
    times, messages = round(step_bytes / gradient_bytes), sum(row.messages for row in scattered or rows)
    if not 1 <= times <= messages or abs(step_bytes / (times * gradient_bytes) - 1) > _TOLERANCE:
        return None
    # Nearly any number is close to some large multiple, so the calls must be a multiple as well.
    if abs(step_bytes / gradient_bytes - times) > _NEAR and messages % times:
        return None
    return Reductions(times, gradient_bytes, step_bytes)


def _of_gradients(job: JobFacts) -> list[CollectiveTime]:
    """The data-parallel reductions, if a known wrapper reduces gradients."""
    if not any(name.startswith(("ddp_", "fsdp_", "zero_")) for name in job.configuration):
        return []
    return [
        row
        for row in job.detailed.collectives
        if row.messages
        and collective_of(row.operator) in _REDUCTIONS
        and (row.dimension == WORLD or "data" in row.dimension)
    ]


def _deferring(job: JobFacts) -> Iterator[Advice]:
    found = reductions_of(job)
    if found is None or found.times < 2:
        return
    share = (found.times - 1) / found.times * _share_of_reductions(job)
    exposed_ms = job.parts.transfer_ms + job.parts.waiting_ms
    contention_ms = max(0.0, job.parts.contention_ms)
    saved_ms = share * (exposed_ms + contention_ms)
    if saved_ms < WORTH * job.parts.total_ms:
        return
    # Micro-batches are alike, so each exposes as much; what compute loses may come back, and the host issues fewer.
    most = job.up_to(
        saved_ms,
        "exposed and lost time" if contention_ms else EXPOSED,
        least_ms=share * exposed_ms,
        more_ms=share * job.parts.idle_ms,
    )
    how = how_to_defer(job.configuration)
    yield _advice(
        "defer-reductions",
        f"Each gradient is reduced {found.times} times a step: defer it{how}.",
        f"A step reduces {bytes_in_words(found.step_bytes)} for {bytes_in_words(found.gradient_bytes)} of gradients. "
        f"Reducing them once could save {most}.",
        most,
    )


def how_to_defer(configuration: Mapping[str, Setting]) -> str:
    stage = configuration.get("zero_stage")
    if isinstance(stage, int) and stage >= 2:
        return f", which ZeRO does up to stage 1 (this is stage {stage}), or use fewer, larger micro-batches"
    if "fsdp_sharding" in configuration:
        return " to the last micro-batch (FSDP's no_sync), where memory holds whole gradients"
    if "fsdp_units" in configuration:
        before = "set_requires_gradient_sync(False) before the others"
        return f" to the last micro-batch ({before}), where memory holds whole gradients"
    if "ddp_bucket_cap_bytes" in configuration:
        return " to the last micro-batch (DDP's no_sync around the others)"
    return " to the last micro-batch"


def _share_of_reductions(job: JobFacts) -> float:
    """The fraction of all collectives' time that gradient reductions take; by bytes where times are missing."""
    mine, rows = _of_gradients(job), job.detailed.collectives
    by_time = [(row, row.isolated_ms) for row in rows]
    if any(ms is None for _, ms in by_time):
        by_time = [(row, float(row.size_bytes)) for row in rows]
    total = sum(time or 0.0 for _, time in by_time)
    return sum(time or 0.0 for row, time in by_time if row in mine) / total if total else 0.0


# -- by what bounds the step


def not_in_use(ways: Sequence[str], kernels: Sequence[str]) -> list[str]:
    """The ways to faster or fewer kernels that the names of a job's kernels do not show."""
    return [way for way in ways if way not in _SHOWN_BY or not any(re.search(_SHOWN_BY[way], name) for name in kernels)]


def _against_compute(job: JobFacts) -> Advice:
    parts = job.parts
    types = [job.precision, *[str(job.configuration.get(name)) for name in ("fsdp_param_dtype", "parameter_types")]]
    is_short = any(bits in of for of in types for bits in ("16", "8"))
    ways = [*([] if is_short else ["lower precision"]), "fused kernels", "torch.compile"]
    ways = not_in_use(ways, [row.name for row in job.detailed.kernels])
    return Advice(
        "faster-compute",
        f"Make compute itself faster: {', '.join(ways)}.",
        f"Compute takes {job.ms(parts.compute_ms)}: less communication could win "
        f"{job.up_to(parts.transfer_ms + parts.waiting_ms)}.",
    )


def _against_launching(job: JobFacts) -> Iterator[Advice]:
    idle = f"The device is idle for {job.ms(job.parts.idle_ms)} a step."
    most = job.up_to(job.parts.idle_ms, "idle time")
    won = f"{idle} That could win {most}."
    graphs = [] if job.on_cpu else ["CUDA graphs"]
    ways = not_in_use(["torch.compile", *graphs, "fused optimizers"], [row.name for row in job.detailed.kernels])
    yield _advice("cuda-graphs", f"Launch less: {', '.join(ways)}.", won, most)
    yield _advice(
        "micro-batch", "Give each launch more to do: a larger micro-batch.", won, most, "--arg micro-batch=1,2,4"
    )
    configuration = job.configuration
    if configuration.get("ddp_find_unused_parameters") is True and configuration.get("ddp_static_graph") is not True:
        yield _advice(
            "find-unused-parameters",
            "Leave DDP's find_unused_parameters off, or static_graph on, where that holds.",
            f"It is on, and walks the whole graph on the host in each step. {won}",
            most,
        )


def _against_waiting_for_the_host(job: JobFacts) -> Advice:
    return _advice(
        "on-host",
        "Issue collectives of the host earlier and wait for them later (async_op=True), or communicate on the device.",
        f"The device runs nothing for {job.ms(job.parts.on_host_ms)} a step while the host waits for them. That could "
        f"win {job.up_to(job.parts.on_host_ms)}.",
        job.up_to(job.parts.on_host_ms),
    )


def _against_bubble(job: JobFacts) -> Iterator[Advice]:
    bubble_ms, pipeline = job.parts.bubble_ms, job.detailed.pipeline
    waiting = f"Stages are idle or wait for {job.ms(bubble_ms)} a step."
    if pipeline is None or pipeline.micro_batches is None:
        most, tries = job.up_to(bubble_ms, "bubble"), ""
        because = f"{waiting} The share falls as (p-1)/(p-1+m). That could win {most}."
    else:
        stages, number = pipeline.num_stages - 1, pipeline.chunks * pipeline.micro_batches
        left = (stages + number) / (stages + 2 * number)
        most = job.up_to(bubble_ms * (1 - left), "bubble", more_ms=bubble_ms * left)
        because = (
            f"{waiting} By (p-1)/(p-1+m), {pipeline.num_stages} stages with {pipeline.micro_batches} micro-batches "
            f"wait for {PLAIN.percent(stages / (stages + number))} of it, with twice as many for "
            f"{PLAIN.percent(stages / (stages + 2 * number))}: that could win {most}."
        )
        number = pipeline.micro_batches
        tries = f"--arg micro-batches={number},{2 * number}"
    yield _advice("micro-batches", "Use more micro-batches in a step.", because, most, tries)
    if pipeline is None or pipeline.chunks == 1:
        most = job.up_to(bubble_ms / 2, "bubble", more_ms=bubble_ms / 2)
        because = f"{waiting} With two chunks it is about half: that could win {most}."
        yield _advice("interleaving", "Interleave: several model chunks on each stage.", because, most)


def _against_contention(job: JobFacts) -> Iterator[Advice]:
    parts, shares, backend = job.parts, job.shares, job.detailed.backend
    if parts.contention_ms < WORTH * parts.total_ms:
        return
    lost = f"Compute loses {job.ms(parts.contention_ms)} a step during communication."
    by_clock = (shares.of(CLOCK) or 0.0) / shares.slowdown if shares is not None and shares.slowdown > 0 else 0.0
    if by_clock > 0.5 and not job.on_cpu:
        most = job.up_to(min(1.0, by_clock) * parts.contention_ms, "lost time")
        why = f"{lost} The lower clock explains most of it: {most}."
        yield _advice("power-cap", f"{_power_cap(job)}: the clock is lower with overlap.", why, most)
    if backend == "nccl":
        by_sms = None if shares is None else shares.of(SMS)
        blocks = max((row.num_blocks for row in job.detailed.kernels if row.communication), default=0)
        if (by_sms is not None and by_sms <= 0) or 0 < blocks <= _FEW_BLOCKS:
            return
        limit = job.variable("NCCL_MAX_CTAS")
        held = f"NCCL's kernels hold {f'up to {blocks} ' if blocks else ''}SMs meanwhile"
        held += f" (NCCL_MAX_CTAS={limit})" if limit else ""
        most = job.up_to(parts.contention_ms * (1 - min(1.0, by_clock)), "lost time")
        yield _advice(
            "ctas",
            "Give NCCL fewer SMs: lower NCCL_MAX_CTAS.",
            f"{lost} {held}: {most}.",
            most,
            "--env NCCL_MAX_CTAS=4,8,16",
        )
    elif backend == "gloo" and (job.own is None or job.own.num_threads != 1):
        most = job.up_to(parts.contention_ms, "lost time")
        what = "Leave Gloo's threads cores of their own: fewer threads for torch's operators."
        yield _advice("ctas", what, f"{lost} That could win {most}.", most, "--env OMP_NUM_THREADS=1,2,4")


def _power_cap(job: JobFacts) -> str:
    source = None if job.detailed.power is None else job.detailed.power.source
    limit_w, most_w = (None, None) if source is None else (source.limit_w, source.tdp_w)
    if limit_w and most_w:
        if limit_w >= most_w:
            return f"Cool better (the power cap of {limit_w:.0f} W is the device's own)"
        return f"Raise the power cap from {limit_w:.0f} W (the device's own is {most_w:.0f} W), or cool better"
    return "Raise the power cap, or cool better"


def _against_communication(job: JobFacts) -> Iterator[Advice]:
    detailed, configuration = job.detailed, job.configuration
    exposed = max(detailed.dimensions, key=lambda row: row.exposed_ms, default=None)
    # It is not known what the group of all ranks serves.
    name = exposed.dimension if exposed is not None and exposed.dimension not in (WORLD, UNKNOWN) else ""
    exposed_ms = job.parts.transfer_ms + job.parts.waiting_ms
    most_won = job.up_to(exposed_ms)
    won = f"That could win {most_won}."
    if "tensor" in name or "expert" in name or "context" in name:
        yield _mapping(job, name, most_won)
        return
    most = f"Most of the exposed communication is {name}-parallel."
    most = most if name else "What compute does not hide, a step waits for."
    kinds = {collective_of(row.operator) for row in detailed.collectives}
    stage = configuration.get("zero_stage")
    gathers = stage == 3 or "fsdp_units" in configuration or not configuration
    gathers = gathers and _may_win(job, _exposed_share(job, ("all_gather",)))
    if gathers and "all_gather" in kinds and "reduce_scatter" in kinds:
        what = "Prefetch parameters earlier: one more layer ahead in FSDP, a larger prefetch bucket in ZeRO-3."
        why = most if name else "Parameters are gathered in the step, and compute waits for them."
        yield _advice("prefetch", what, f"{why} {won}", most_won, "--arg prefetch=1,2,3")
    rows = [row for row in detailed.collectives if row.messages and collective_of(row.operator) in _REDUCTIONS]
    if not rows:
        return
    share = _exposed_share(job, _REDUCTIONS)
    if not _may_win(job, share):
        return
    of_reductions_ms = exposed_ms * (_share_of(rows, detailed.collectives) if share is None else share)
    yield from _buckets(job, rows, of_reductions_ms)
    found = reductions_of(job)
    again = found is not None and found.times > 1
    short = bytes_of_a_gradient(configuration) == 2
    ways = [
        *([] if again else ["accumulate gradients over more micro-batches"]),
        *([] if short else ["reduce them in 16 bits" if not again else "reduce gradients in 16 bits"]),
    ]
    if ways:
        most_won = job.up_to(of_reductions_ms / 2)
        what = f"Send less: {', or '.join(ways)}."
        yield _advice("fewer-bytes", what, f"{most} Half the bytes could win {most_won}.", most_won)


def _mapping(job: JobFacts, name: str, won: Gain) -> Advice:
    most = f"Most of the exposed communication is {name}-parallel."
    rows = [] if job.detailed.traffic is None else job.detailed.traffic.dimensions
    crossing = next((row.between_hosts_bytes for row in rows if row.dimension == name), None)
    if crossing == 0 or (job.environment is not None and job.environment.num_hosts == 1):
        what = f"Use fewer ranks in each {name}-parallel group, or overlap its collectives with matrix products."
        return _advice("mapping", what, f"{most} Its groups lie within a node already. That could win {won}.", won)
    between = f" {bytes_in_words(crossing)} a step cross between hosts." if crossing else ""
    what = f"Keep each {name}-parallel group within a node, on its fastest links."
    return _advice("mapping", what, f"{most}{between} That could win {won}.", won)


def _exposed_share(job: JobFacts, kinds: Sequence[str]) -> float | None:
    """The part of the exposed time that some kinds of collectives have; None where that was not measured."""
    found = job.detailed.exposure
    if found is None or not found.exposed_ms > 0:
        return None
    return sum([row.exposed_ms for row in found.rows if row.collective in kinds]) / found.exposed_ms


def _may_win(job: JobFacts, share: float | None) -> bool:
    """Whether so large a part of the exposed time is worth advice; it may be, if it is not known."""
    exposed_ms = job.parts.transfer_ms + job.parts.waiting_ms
    return share is None or share * exposed_ms >= WORTH * job.parts.total_ms


def _share_of(rows: Sequence[CollectiveTime], of: Sequence[CollectiveTime]) -> float:
    """The part of the bytes of some collectives that are of these."""
    total = sum(row.size_bytes for row in of)
    return sum(row.size_bytes for row in rows) / total if total else 0.0


def _buckets(job: JobFacts, rows: Sequence[CollectiveTime], exposed_ms: float) -> Iterator[Advice]:
    """Larger buckets for short messages, smaller ones for long messages, if buckets decide their size."""
    messages = sum(row.messages for row in rows)
    mean_bytes = sum(row.size_bytes for row in rows) / messages
    size = f"A reduction has {bytes_in_words(mean_bytes)} on average"
    most = job.up_to(exposed_ms)
    won = f"That could win {most}."
    exposure = job.detailed.exposure
    reductions = [row for row in (exposure.rows if exposure else ()) if row.collective in _REDUCTIONS]
    if exposure is not None and reductions and reductions[0].exposed_ms > 0:
        named = first_by_name(exposure, _REDUCTIONS)
        size += (
            f", and most exposed is {collectives_in_words(reductions[0], exposure)}" if named is None
            else f", and {name_in_words(named)} holds steps up most"
        )  # fmt: skip
    found, cap = reductions_of(job), job.configuration.get("ddp_bucket_cap_bytes")
    # One bucket has room for all gradients, or there is one message for all of them.
    whole = found is not None and (
        (isinstance(cap, (int, float)) and cap >= found.gradient_bytes) or messages <= found.times
    )
    all_bytes = sum(row.size_bytes for row in rows) if found is None else found.gradient_bytes
    if mean_bytes < SHORT_MESSAGE_BYTES and messages > 1 and not whole:
        because = f"{size}: short messages do not fill a link. {won}"
        most = job.up_to(exposed_ms, more_ms=job.parts.idle_ms)
        if "fsdp_units" in job.configuration:
            yield _advice("buckets", "Wrap more layers in each FSDP unit.", because, most, rises=False)
        elif sizes := bucket_sizes(all_bytes, cap, larger=True):
            yield _advice("buckets", "Raise the bucket size.", because, most, try_sizes(cap, sizes), rises=True)
    elif (
        mean_bytes > LONG_MESSAGE_BYTES
        or (messages == 1 and mean_bytes > 2 * SHORT_MESSAGE_BYTES)
        or (whole and all_bytes > 2 * SHORT_MESSAGE_BYTES)
    ):
        because = f"{size}: a long message begins late in the backward pass. {won}"
        if sizes := bucket_sizes(all_bytes, cap, larger=False):
            yield _advice("buckets", "Lower the bucket size.", because, most, try_sizes(cap, sizes), rises=False)


def _against_straggler(job: JobFacts, late: LateRank | None, stragglers: Sequence[Straggler]) -> Iterator[Advice]:
    sure = [row for row in stragglers if row.sure]
    hosts, ranks = ([row for row in sure if (row.rank < 0) is host] for host in (True, False))
    most = job.up_to(job.parts.waiting_ms, "waiting")
    won = f"The others wait: that could win {most}."
    if hosts:
        what = f"Look at {_listed(hosts)} first: clocks, temperature, network, other programs."
        yield _advice("straggler", what, f"{won} Of its ranks one comes last: {hosts[0].how_sure()}.", most)
    if late is not None and late.busy:
        what = f"Look at rank {late.rank}: its clock, its temperature, its share of the work."
        because = f"It computes for longer than the other ranks. {won}"
    elif late is not None:
        what = f"Look at the host of rank {late.rank}: its data loader, its CPUs, other programs."
        because = f"It is idle for longer than the other ranks. {won}"
    elif ranks:
        what = f"Look at {_listed(ranks)}: clock, temperature, share of the work, data loader."
        because = f"{won} Of {ranks[0].name}: {ranks[0].how_sure()}."
    else:
        what = "Measure more windows, to find out which rank comes last."
        because = f"It differs between windows, and no rank comes last more often than by chance for certain. {won}"
    yield _advice("straggler", what, because, most)


def _listed(rows: Sequence[Straggler]) -> str:
    return listed([row.name for row in rows[:_MOST_NAMED]])
