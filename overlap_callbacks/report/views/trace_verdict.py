"""The verdict on traces, in a few sentences: where the devices' time goes, what limits them, what could be gained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from overlap_callbacks.analysis.advice import WORTH, how_to_defer, not_in_use
from overlap_callbacks.analysis.exposure import exposure_sentence
from overlap_callbacks.analysis.formatting import PLAIN, Style, bytes_in_words, count, listed
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.analysis.safe_text import printable
from overlap_callbacks.traces.device_time import CriticalPath, DeviceTime
from overlap_callbacks.traces.figures import Analysis, CollectiveSkew, RankTime, SplitLoads, TraceFigures

# Minimum share of the time for a sentence.
_MATTERS = 0.05
# Smallest fraction not shown as 0.0 %.
_SHOWN = 0.0005
# The setting of each wrapper that reduces gradients, by which ``how_to_defer`` knows it.
_SETTINGS = {"ddp": "ddp_bucket_cap_bytes", "fsdp1": "fsdp_sharding", "fsdp2": "fsdp_units"}
# Minimum share of the waiting for which one rank is named as the cause.
_MOSTLY = 0.5
# Waiting times above this have one decimal.
_LONG_MS = 10
# Maximum files of different jobs that are described one by one.
_MAX_APART = 4
# Maximum rows on copies in one sentence.
_MAX_COPIES = 3
# Maximum files named in one note.
_MAX_FILES = 3


def verdict(analysis: Analysis, style: Style = PLAIN) -> tuple[str, ...]:
    """The sentences, most important first; empty if the files contain nothing."""
    timed = [trace for trace in analysis.traces if trace.time]
    traces = [trace for trace in timed if not trace.total.cut]
    sentences = list(_skew(analysis, style))
    if not traces:
        unknown = "What the devices do with their time is not known: kernels are missing."
        return (*sentences, *([unknown] if timed else []))
    if analysis.one_job:
        return (*sentences, *_of_job(traces, analysis.exposure, style), *_splits(analysis.splits, style))
    sentences.append("The files are not of one job, so each is analysed alone.")
    for name, trace in list(zip(names_of(traces), traces, strict=True))[:_MAX_APART]:
        sentences.append(f"{name}: {' '.join(_of_job([trace], trace.exposure, style))}")
    if len(traces) > _MAX_APART:
        sentences.append(f"The tables have the other {len(traces) - _MAX_APART}.")
    return tuple(sentences)


def _of_job(traces: Sequence[TraceFigures], exposure: Exposure | None, style: Style) -> Sequence[str]:
    """What the devices of one job do, and what limits them."""
    exposed = _exposed_share(traces)
    which = exposure_sentence(exposure, style) if exposure is not None and exposed >= _SHOWN else ""
    won = _without_communication(traces, style) if exposed >= _MATTERS else ""
    found = (
        _shares(traces, style), which, *_deferring(traces, style), *_on_host(traces, style), *_host(traces, style), won,
        *_copies(traces, style),
    )  # fmt: skip
    return tuple(filter(None, found))


def _skew(analysis: Analysis, style: Style) -> Sequence[str]:
    """Whether ranks wait for one another."""
    if not analysis.skew:
        return ()
    by_cycle, caused = caused_ms(analysis.skew), Counter[str]()
    for of_cycle in by_cycle.values():
        caused.update(of_cycle)
    waited = waiting_ms(analysis.skew)
    total_ms = sum(waited.values())
    mean_ms = total_ms / len(waited)
    span_ms = _mean([trace.time[0].span_ms for trace in analysis.traces if trace.time])
    share = mean_ms / span_ms if span_ms else 0.0
    words = f"Ranks wait {style.ms(mean_ms)} for one another on average, {style.percent(share)} of their time"
    if share < _MATTERS / 5:
        return (f"{words}: they arrive together.",)
    slowest = max(caused, key=lambda name: caused[name])
    most_ms = caused[slowest]
    if not most_ms:
        return (f"{words}: several come last together, so no rank is named.",)
    most, total = (style.number(ms, 1 if total_ms >= _LONG_MS else 3) for ms in (most_ms, total_ms))
    parts = f"{most} of {total}{style.space}ms"
    if most_ms > _MOSTLY * total_ms:
        return (f"{words}: rank {slowest} makes the others wait {parts}.",)
    return (f"{words}: several ranks come last in turn; rank {slowest} makes the others wait most, {parts}.",)


def rank_names(ranks: Sequence[RankTime]) -> list[str]:
    """Each rank's number, with its device's if any rank has several."""
    several = len({rank.rank for rank in ranks}) < len({(rank.rank, rank.device) for rank in ranks})
    return [f"{rank.rank}.{rank.device}" if several else str(rank.rank) for rank in ranks]


def caused_ms(skews: Sequence[CollectiveSkew]) -> dict[str, dict[str, float]]:
    """How long the others waited for each rank, by cycle and rank name."""
    rows = [(skew.cycle, rank) for skew in skews for rank in skew.ranks]
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, (cycle, rank) in zip(rank_names([rank for _, rank in rows]), rows, strict=True):
        found[cycle][name] += rank.caused_ms
    return found


def waiting_ms(skews: Sequence[CollectiveSkew]) -> dict[tuple[str, int | None, int], float]:
    """How long each rank and device waits in all collectives of each cycle."""
    waiting: dict[tuple[str, int | None, int], float] = defaultdict(float)
    for skew in skews:
        for rank in skew.ranks:
            waiting[skew.cycle, rank.rank, rank.device] += rank.waiting_ms
    return waiting


def _shares(traces: Sequence[TraceFigures], style: Style) -> str:
    """Where the devices' time goes."""
    whole = [trace.time[0] for trace in traces]

    def share(part: Callable[[DeviceTime], float | None]) -> float:
        return _mean([(part(time) or 0.0) / time.span_ms for time in whole if time.span_ms])

    what = "The training thread" if traces[0].on_host else "The device" if len(traces) == 1 else "The devices"
    verb = "computes" if len(traces) == 1 or traces[0].on_host else "compute"
    parts = [f"{style.percent(share(lambda time: time.exposed_comm_ms))} is exposed communication"]
    if not any([trace.total.comm_ms for trace in traces]):
        parts = ["nothing communicates"]
    on_host = share(lambda time: time.exposed_on_host_ms)
    if on_host >= _SHOWN:
        parts.append(f"{style.percent(on_host)} is waiting for communication on the host")
    if all(time.idle_host_ms is None for time in whole):
        parts.append(f"{style.percent(share(lambda time: time.idle_ms) - on_host)} is idle")
    else:
        host = share(lambda time: (time.idle_host_ms or 0.0) + (time.idle_launch_ms or 0.0))
        parts.append(f"{style.percent(host)} is waiting for the host")
        other = share(lambda time: time.idle_other_ms)
        parts += [f"{style.percent(other)} is idle for other causes"] if style.shows(other, "fraction") else []
    return f"{what} {verb} {style.percent(share(lambda time: time.compute_ms))} of the time; {', '.join(parts)}."


def _on_host(traces: Sequence[TraceFigures], style: Style) -> Sequence[str]:
    """Whether the devices wait for communication on the host."""
    whole = [trace.time[0] for trace in traces]
    if _mean([(time.exposed_on_host_ms or 0.0) / time.span_ms for time in whole if time.span_ms]) < _MATTERS:
        return ()
    kinds: Counter[str] = Counter()
    for trace in traces:
        for row in trace.on_host_collectives:
            kinds[row.name] += row.exposed_ms  # type: ignore[assignment]
    exposed_ms, in_flight_ms = (
        _mean([getattr(time, name) or 0.0 for time in whole]) for name in ("exposed_on_host_ms", "on_host_ms")
    )
    what = "The device waits" if len(traces) == 1 else "The devices wait"
    kind = collective_in_words(kinds.most_common(1)[0][0])
    return (
        f"{what} for communication on the host, mostly {kind}: {style.ms(exposed_ms)} of its "
        f"{style.ms(in_flight_ms)} are exposed. Issue it earlier and wait for it later, or communicate on the device.",
    )


def _host(traces: Sequence[TraceFigures], style: Style) -> Sequence[str]:
    """Whether the host limits the devices."""
    limits = [
        (trace.host_limit, name, trace)
        for trace, name in zip(traces, names_of(traces), strict=True)
        if trace.host_limit is not None
    ]
    if not limits:
        return ()
    limit, name, trace = max(limits, key=lambda item: item[0].idle_fraction)
    where = "" if len(traces) == 1 else f" ({name})"
    most = _at_most(traces, lambda path: path.at_most_host_ms)
    won = "" if most is None else f" The host holds up a step of {style.ms(most[1])} for up to {style.ms(most[0])}."
    if trace.recorded:
        won += f" Recording {listed(trace.recorded)} makes launches longer: leave that out, and profile again."
    if limit.launch_bound and limit.kernel_us is not None and limit.launch_interval_us is not None:
        ways = not_in_use(("CUDA graphs", "torch.compile", "fused optimizers"), [row.name for row in trace.kernels])
        return (
            f"Launch-bound{where}: a kernel takes {style.number(limit.kernel_us, 1)} us, and the host launches one "
            f"every {style.number(limit.launch_interval_us, 1)} us (medians). Fewer and longer kernels help: "
            f"{', '.join(ways)}.{won}",
        )
    if limit.idle_fraction >= _MATTERS:
        return (
            f"The host keeps the device waiting{where}, for {style.ms(limit.longest_gap_ms)} at the longest: it may "
            f"load data, wait for a result, or synchronise.{won}",
        )
    return ()


def _exposed_share(traces: Sequence[TraceFigures]) -> float:
    whole = [trace.time[0] for trace in traces]
    return _mean([time.exposed_comm_ms / time.span_ms for time in whole if time.span_ms])


def _without_communication(traces: Sequence[TraceFigures], style: Style) -> str:
    """What exposed communication costs at most; empty where that is not known."""
    most = _at_most(traces, lambda path: path.at_most_comm_ms)
    if most is None:
        return ""
    won = f"Communication holds up a step of {style.ms(most[1])} for up to {style.ms(most[0])}"
    return f"{won}: little to win there." if most[0] < _MATTERS * most[1] else f"{won}."


def _deferring(traces: Sequence[TraceFigures], style: Style) -> Sequence[str]:
    """That gradients are reduced at each micro-batch, and what it would save to defer that, as live."""
    found = [trace.reductions for trace in traces if trace.reductions is not None]
    most = max(found, key=lambda row: row.saved_ms, default=None)
    if most is None or most.saved_ms < WORTH * most.update_ms:
        return ()
    how = how_to_defer({_SETTINGS[most.wrapper]: most.messages})
    sent = f"{count(most.messages, 'reduction')} of {bytes_in_words(most.bytes)}"
    return (
        f"Each gradient is reduced {most.times} times a step: defer it{how}.",
        f"The same {sent} {'follows' if most.messages == 1 else 'follow'} each of {most.times} forward passes between "
        f"two steps of the optimizer (several models of one size look the same). Reducing them once could save up to "
        f"{style.ms(most.saved_ms)} of exposed time in a step of {style.ms(most.update_ms)}.",
    )


def _splits(loads: SplitLoads | None, style: Style) -> Sequence[str]:
    """How unevenly all-to-alls with split sizes load the ranks."""
    if loads is None or loads.load_max_over_mean < 1 + _MATTERS:
        return ()
    known = loads.senders == loads.group_size
    of = "" if known else f", by what {loads.senders} of {loads.group_size} ranks send"
    return (
        f"All-to-alls are uneven: the most that a rank receives in a step is "
        f"{style.number(loads.load_max_over_mean, 2)} times the mean{of}; rank {loads.highest_rank} receives most.",
    )


def _copies(traces: Sequence[TraceFigures], style: Style) -> Sequence[str]:
    """What kernels lose beside copies, and copies beside communication, on the device that loses most."""
    losses: list[tuple[str, list[PairTime]]] = []
    for name, trace in zip(names_of(traces), traces, strict=True):
        least_ms = _MATTERS / 5 * trace.time[0].span_ms
        losses.append((name, [pair for pair in trace.beside_copies if pair.lost_ms >= least_ms][:_MAX_COPIES]))
    name, found = max(losses, key=lambda of: sum([pair.lost_ms for pair in of[1]]))
    if not found:
        return ()
    where = "" if len(traces) == 1 else f" ({name})"
    words = []
    for pair in found:
        each, alone = (style.ms(ms / pair.calls) for ms in (pair.time_ms, pair.alone_ms))
        change = style.percent(pair.slowdown or 0.0, signed=True)
        words.append(f"{pair.kernel_family} {change} during {pair.concurrent_with} ({each} against {alone} alone)")
    return (f"Copies contend{where}: {'; '.join(words)}. That is an association.",)


def _at_most(
    traces: Sequence[TraceFigures], part: Callable[[CriticalPath], float | None]
) -> tuple[float, float] | None:
    """Maximum gain per step, and the step's length: means over the steps of the file where the gain is largest.

    None if no file has it.
    """
    found = []
    for trace in traces:
        most = [(won, path.length_ms) for path in trace.paths if (won := part(path)) is not None]
        if most:
            found.append((_mean([won for won, _ in most]), _mean([length_ms for _, length_ms in most])))
    return max(found, default=None)


def names_of(traces: Sequence[TraceFigures]) -> list[str]:
    """Name of each of several devices: its rank; the file if that is unknown or not unique.

    Several devices of one file are numbered, and files of several cycles have their cycle.
    """
    of_rank = Counter((rank, cycle) for _, rank, cycle in {(trace.file, trace.rank, trace.cycle) for trace in traces})
    of_file = Counter(trace.file for trace in traces)
    files = _distinct_names([trace.file for trace in traces])
    names = []
    for trace in traces:
        alone = trace.rank is not None and of_rank[trace.rank, trace.cycle] == 1
        name = f"rank {trace.rank}" if alone else printable(files[trace.file])
        if trace.cycle and alone:
            name = f"{name}, {printable(trace.cycle)}"
        names.append(f"{name}, device {trace.device}" if of_file[trace.file] > 1 else name)
    return names


def _distinct_names(files: Sequence[str]) -> dict[str, str]:
    """The name of each file, with as many of its folders as needed to distinguish equal names."""
    parts = {file: Path(file).parts for file in dict.fromkeys(files)}
    names = {}
    for file, own in parts.items():
        depth = 1
        while depth < len(own) and sum(other[-depth:] == own[-depth:] for other in parts.values()) > 1:
            depth += 1
        names[file] = str(Path(*own[-depth:])) if own else file
    return names


def problems_of(analysis: Analysis) -> list[str]:
    """Problems and doubts; with several files, each note names the files that it concerns."""
    warnings = by_file(analysis.traces, lambda trace: trace.warnings)
    return [*analysis.warnings, *warnings, *further_problems(analysis)]


def further_problems(analysis: Analysis) -> list[str]:
    """The problems that are not warnings."""
    of_all = [problem for problem in analysis.problems if problem not in analysis.warnings]
    of_files = by_file(analysis.traces, lambda trace: [p for p in trace.problems if p not in trace.warnings])
    return [*of_all, *of_files]


def by_file(traces: Sequence[TraceFigures], problems: Callable[[TraceFigures], Sequence[str]]) -> list[str]:
    """Each problem of the files once; with several files, preceded by their names."""
    files: dict[str, dict[str, None]] = {}
    for trace in traces:
        for problem in problems(trace):
            files.setdefault(problem, {})[Path(trace.file).name] = None
    if len({trace.file for trace in traces}) == 1:
        return list(files)
    return [f"{_listed([*names])}: {problem}" for problem, names in files.items()]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_FILES} more" if len(names) > _MAX_FILES else ""
    return f"{', '.join(names[:_MAX_FILES])}{more}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
