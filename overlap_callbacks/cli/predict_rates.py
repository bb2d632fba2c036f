"""Rates of hardware for ``overlap predict``: by name, as numbers, from a record or from a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks import _validation
from overlap_callbacks.cli import InconclusiveError
from overlap_callbacks.cli._options import with_options
from overlap_callbacks.cli._output import newest_run, one_line, read_record, refusing

if TYPE_CHECKING:
    from overlap_callbacks.analysis.communication.bandwidths import Link, RecordedRates
    from overlap_callbacks.analysis.communication.job_shape import JobShape
    from overlap_callbacks.analysis.communication.step_time import Hardware
    from overlap_callbacks.analysis.results.report import OverlapReport

_GB, _TERA, _GIB, _US_PER_S = 1e9, 1e12, 2**30, 1e6
_DIMENSIONS = ("tensor", "pipeline", "data")
_BANDWIDTHS = ("bandwidth", *[f"{name}_bandwidth" for name in _DIMENSIONS])
# Rates come from a record's newest windows: the machine may have changed.
_WINDOWS_OF_RATES = 16
# The share of a named link's peak that messages are taken to reach.
_LINK_SHARE = 0.8
_RANKS_PER_HOST = 8
# Options by name, with their values where no rate at all is given; and all options of rates.
_NAMED = {"gpu": "h100", "network": "ib-ndr"}
RATES = (*_NAMED, *_BANDWIDTHS, "bandwidths", "sources", "peak")
# Rates outside these bounds are typing errors, and give meaningless times.
_LEAST, _MOST = 1e-6, 1e6


class RateType(click.ParamType):  # type: ignore[type-arg]
    """A number, or the name of what is known to have it."""

    name = "rate"

    def __init__(self, names: Callable[[], Collection[str]]) -> None:
        self._names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        try:
            return float(value)
        except ValueError:
            names = self._names()
            if str(value).lower() not in names:
                self.fail(f"{value!r} is neither a number nor one of {', '.join(names)}", param, ctx)
            return str(value).lower()


def _links() -> Collection[str]:
    from overlap_callbacks.analysis.communication.link_peaks import LINKS

    return [link.name for link in LINKS]


def _gpus() -> Collection[str]:
    from overlap_callbacks.analysis.communication.link_peaks import GPUS

    return GPUS


def _bandwidth_option(name: str, help_text: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", type=RateType(_links), metavar="GB/S|NAME", help=help_text)


hardware_options = with_options(
    click.option("--gpu", metavar="NAME",
                 help="Peak, memory and link within a host by name, e.g. a100.  [default without rates: h100]"),
    click.option("--network", type=RateType(_links), metavar="GB/S|NAME",
                 help="Between hosts, for each device, e.g. ethernet-100.  [default without rates: ib-ndr]"),
    _bandwidth_option("bandwidth", "Effective bandwidth of a rank's link, or of 80% of a link by name, e.g. nvlink4."),
    _bandwidth_option("tensor-bandwidth", "Of tensor-parallel messages."),
    _bandwidth_option("pipeline-bandwidth", "Of pipeline messages."),
    _bandwidth_option("data-bandwidth", "Of gradients and parameters."),
    click.option("--latency", type=float, metavar="US",
                 help="Of each step of a ring, in microseconds; by default 0, or that of --from."),
    click.option("--from", "sources", type=click.Path(path_type=Path), metavar="RUN", multiple=True,
                 help="Take rates that are not given from the record of RUN; a further RUN adds what the others lack."),
    click.option("--bandwidths", type=click.Path(path_type=Path, exists=True), metavar="FOLDER",
                 help="Those that are not given by the times of overlap bench collectives, before --from."),
    click.option("--peak", type=RateType(_gpus), metavar="TFLOP/S|NAME",
                 help="Peak of one device in the job's precision, or of a GPU by name."),
    click.option("--utilisation", type=float, default=0.4, show_default=True,
                 help="Share of --peak that is reached."),
    click.option("--memory", type=float, metavar="GIB", help="Of one device: layouts that need more are infeasible."),
    heading="Hardware",
)  # fmt: skip


def check_hardware(given: dict[str, Any]) -> None:
    """Reject figures that no machine has, whether a step time needs them or not."""
    units = {**dict.fromkeys((*_BANDWIDTHS, "network"), "GB/s"), "peak": "TFLOP/s", "memory": "GiB"}
    for name, unit in units.items():
        value = given[name]
        if isinstance(value, str):
            continue
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name.replace('_', ' ')} must be a positive, finite number of {unit}, got {value:g}")
        if value is not None and not _LEAST <= value <= _MOST:
            raise ValueError(f"{name.replace('_', ' ')} must be from {_LEAST:g} to {_MOST:,.0f} {unit}, got {value:g}")
    latency_us = given["latency"]
    if latency_us is not None and not 0 <= latency_us <= _MOST:
        raise ValueError(f"latency must be from 0 to {_MOST:,.0f} us, got {latency_us:g}")
    _validation.fraction("utilisation", given["utilisation"])
    if given["utilisation"] < _LEAST:
        raise ValueError(f"utilisation must be at least {_LEAST:g}, got {given['utilisation']:g}")


def hardware_of(job: JobShape, given: dict[str, Any], notes: list[str]) -> Hardware | None:
    import msgspec

    from overlap_callbacks.analysis.communication.bandwidths import Link
    from overlap_callbacks.analysis.communication.step_time import Hardware

    why_named = _name_hardware(given)
    rates = _recorded_rates(given["sources"])
    links, rate = dict(rates.links), rates.compute_flop_per_s
    if given["bandwidths"] is not None:
        links |= {name: Link(rate_of) for name, rate_of in _measured(job, given["bandwidths"], notes).items()}
    latency_s = None if given["latency"] is None else given["latency"] / _US_PER_S
    for name in _DIMENSIONS:
        chosen = given["bandwidth"] if given[f"{name}_bandwidth"] is None else given[f"{name}_bandwidth"]
        if chosen is not None:
            links[name] = Link(_effective_gb_s(chosen) * _GB)
        if name in links and latency_s is not None:
            links[name] = Link(links[name].bytes_per_s, latency_s)
    host, network = [
        None if rate is None else Link(_effective_gb_s(rate) * _GB, latency_s or 0.0)
        for rate in (given["host_link"], given["network"])
    ]
    peak = _peak(given, "peak") or (None if rate is not None else _peak(given, "gpu"))
    if peak is not None:
        rate = given["utilisation"] * peak
    if why_named:
        notes += _named_rates(why_named, given, with_gpu=peak is not None and given["peak"] is None)
    known = Hardware(
        links=links, peak_flop_per_s=1.0, utilisation=1.0, within=host, between=network,
        ranks_per_host=given["ranks_per_host"] or _RANKS_PER_HOST,
    )  # fmt: skip
    links_of_job = known.links_of(job)
    # A dimension of one rank sends nothing, whatever its bandwidth; but another layout may need it.
    sizes = zip(_DIMENSIONS, (job.t, job.p, job.d), strict=True)
    needed = [name for name, size in sizes if size > 1 or (given["what_if"] and job.layout == "megatron")]
    missing = [name for name in needed if name not in links_of_job]
    if rate is None or missing:
        notes.append(_missing_rates(missing, given["sources"], with_rate=rate is not None))
        return None
    used = {name: links_of_job[name] for name in needed}
    every = list(used.values()) or [Link(_GB)]
    # The gradient norm's few bytes count with the gradients, even in a job that reduces none.
    worst = Link(min([link.bytes_per_s for link in every]), max([link.latency_s for link in every]))
    hardware = msgspec.structs.replace(
        known,
        links=links | {name: worst for name in _DIMENSIONS if name not in links_of_job},
        peak_flop_per_s=rate if peak is None else peak,
        utilisation=1.0 if peak is None else given["utilisation"],
    )
    hardware.check()
    if given["sources"]:
        notes.append(_assumed_rates(hardware, used))
    return hardware


def _name_hardware(given: dict[str, Any]) -> str:
    """Complete the options by what ``--gpu`` and ``--network`` name; without any rates, by those of a usual machine.

    Returns why, for a note; empty if others are given.
    """
    from overlap_callbacks.analysis.communication.link_peaks import GPUS

    given["host_link"] = None
    if any([given[name] for name in RATES if name not in _NAMED]) and not any([given[name] for name in _NAMED]):
        return ""
    is_assumed = not any([given[name] for name in RATES])
    for name, usual in _NAMED.items():
        given[name] = given[name] or usual
    given["gpu"] = given["gpu"].lower()
    if given["gpu"] not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, got {given['gpu']!r}")
    gpu = GPUS[given["gpu"]]
    given["host_link"] = None if gpu.link is None else gpu.link.name
    given["memory"] = given["memory"] or gpu.memory_gib
    return "assumed, as no rates are given" if is_assumed else "rates by name"


def _named_rates(why: str, given: dict[str, Any], *, with_gpu: bool) -> list[str]:
    """What ``--gpu`` (if its peak is used) and ``--network`` stand for."""
    parts = [f"{given['gpu']} at {given['utilisation']:.0%} of its peak"] if with_gpu else []
    if given["bandwidth"] is None:
        network = given["network"] if isinstance(given["network"], str) else f"{given['network']:g} GB/s"
        hosts = f"hosts of {given['ranks_per_host'] or _RANKS_PER_HOST} ranks"
        share = f"links by name at {_LINK_SHARE:.0%} of their peaks"
        parts.append(f"{given['host_link']} within {hosts} and {network} between them, {share}")
    return [f"{why}: {'; '.join(parts)} (--gpu, --network, --utilisation, --ranks-per-host)"] if parts else []


def _effective_gb_s(rate: float | str) -> float:
    """A bandwidth that is given, or the share of a named link's peak that messages are taken to reach."""
    from overlap_callbacks.analysis.communication.link_peaks import link_of

    return _LINK_SHARE * link_of(rate, "bandwidth").gb_s if isinstance(rate, str) else rate


def _peak(given: dict[str, Any], name: str) -> float | None:
    """FLOP a second by ``--peak`` or ``--gpu``, a number of TFLOP/s or a name; None without."""
    from overlap_callbacks.analysis.communication.link_peaks import GPUS
    from overlap_callbacks.analysis.throughput import peak_of

    value = given[name]
    if not isinstance(value, str):
        return None if value is None else value * _TERA
    # Autocast computes in 16 bit, whatever the width of parameters.
    precision = given["dtype"] or "bf16"
    found = peak_of(GPUS[value].device, precision)
    if found is None:
        raise ValueError(
            f"the peak of {value} in {precision} is not known: give --peak as a number, or another --dtype"
        )
    return found[0]


def _recorded_rates(sources: Sequence[Path]) -> RecordedRates:
    from overlap_callbacks.analysis.communication.bandwidths import RecordedRates, recorded_rates

    rates = RecordedRates()
    for source in sources:
        rates = rates.completed_by(recorded_rates(windows_of(source)[-_WINDOWS_OF_RATES:]))
    return rates


def _missing_rates(missing: Sequence[str], sources: Sequence[Path], *, with_rate: bool) -> str:
    wanted = ([] if with_rate else ["--peak"]) + [f"--{name}-bandwidth" for name in missing]
    hint = " (--bandwidth sets all of them)" if len(missing) > 1 else ""
    if sources:
        records = "records of" if len(sources) > 1 else "record of"
        lacks = [] if with_rate else ["no FLOP of a step with its sequential time"]
        lacks += [f"no timed messages of {' and '.join(missing)} parallelism"] if missing else []
        hint += f": the {records} {' and '.join(map(str, sources))} has {' and '.join(lacks)}"
    return f"no step time without {' and '.join(wanted)}{hint}"


def _assumed_rates(hardware: Hardware, links: dict[str, Link]) -> str:
    """The rates assumed for a prediction, if the user did not give them all."""
    rates = [f"{hardware.utilisation * hardware.peak_flop_per_s / _TERA:,.4g} TFLOP/s of compute"]
    for name, link in links.items():
        bandwidth, latency_us = link.bytes_per_s / _GB, link.latency_s * _US_PER_S
        with_latency = f" and {latency_us:,.4g} us a step of the ring" if latency_us else ""
        rates.append(f"{bandwidth:,.4g} GB/s{with_latency} of {name} parallelism")
    return f"step times are of {'; '.join(rates)}"


def _measured(job: JobShape, folder: Path, notes: list[str]) -> dict[str, float]:
    """Bandwidths of the job's messages, from the times measured by ``overlap bench collectives``."""
    from overlap_callbacks.analysis.communication.bandwidths import curves_of, measured_bandwidths
    from overlap_callbacks.experiments.bench.results import Bench
    from overlap_callbacks.experiments.sweep import ResultsError

    with refusing(ResultsError):
        bench = Bench.read(folder)
    curves = curves_of(bench.transfers)
    if not curves:
        raise ValueError(f"{folder} has no times of collectives: overlap bench collectives makes them")
    found = measured_bandwidths(job, curves)
    rates = ", ".join(f"{name} {rate / _GB:.3g} GB/s" for name, rate in found.bytes_per_s.items())
    if rates:
        notes.append(f"bandwidths of this job's messages, measured over {bench.link_in_words}: {rates}")
    notes.extend(found.notes)
    return found.bytes_per_s


def windows_of(run: Path) -> list[OverlapReport]:
    """The complete windows of a run that have collectives, newest last; at least one."""
    found = [window for window in read_record(newest_run(run), details=True).windows if window.collectives]
    if not found:
        raise InconclusiveError(one_line(f"the record of {run} has no window with collectives"))
    return found
