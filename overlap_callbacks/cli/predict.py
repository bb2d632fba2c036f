"""``overlap predict``: what a job should send, and how long its step should take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks import _validation
from overlap_callbacks.cli import InconclusiveError
from overlap_callbacks.cli._options import MATRIX_PARAMETERS, is_given, json_option, matrix_options, with_options
from overlap_callbacks.cli._output import (
    draw_matrix,
    newest_run,
    one_line,
    print_document,
    print_json,
    read_record,
    refusing,
    require,
)

if TYPE_CHECKING:
    from overlap_callbacks.analysis.communication.bandwidths import RecordedRates
    from overlap_callbacks.analysis.communication.job_shape import JobShape
    from overlap_callbacks.analysis.communication.model_shape import ModelShape
    from overlap_callbacks.analysis.communication.step_time import Hardware
    from overlap_callbacks.analysis.results.report import OverlapReport
    from overlap_callbacks.report.views.predict import Prediction
    from overlap_callbacks.report.views.traffic import Mapping

_GB, _TERA, _GIB, _US_PER_S = 1e9, 1e12, 2**30, 1e6
_DIMENSIONS = ("tensor", "pipeline", "data")
_BANDWIDTHS = ("bandwidth", *[f"{name}_bandwidth" for name in _DIMENSIONS])
_MEGATRON_LM = "megatron-lm"
# Rates come from a record's newest windows: the machine may have changed.
_WINDOWS_OF_RATES = 16
# Options are named like the fields of ModelShape and JobShape, except these.
_SIZES = {"pp": "p", "tp": "t", "dp": "d"}
# Rates outside these bounds are typing errors, and give meaningless times.
_LEAST, _MOST = 1e-6, 1e6

_model_options = with_options(
    click.option("--model", "model_name", metavar="NAME", help="A model that is known by name, e.g. gpt3-6.7b."),
    click.option("--layers", type=int, help="Layers; this and the next replace sizes of --model."),
    click.option("--hidden", type=int, help="Width of a token."),
    click.option("--heads", type=int, help="Heads of attention; by default of a width near 64, a multiple of --tp."),
    click.option("--kv-heads", type=int, help="Heads of keys and values, if they are fewer."),
    click.option("--ffn", type=int, help="Width within the MLP; by default 4 times --hidden."),
    click.option("--sequence", type=int, help="Tokens of a sequence."),
    click.option("--vocabulary", type=int, help="Words, before padding."),
    click.option("--experts", type=int, help="Experts of each layer; without biases."),
    click.option("--experts-per-token", type=int, help="Experts that a token passes."),
    click.option("--tied/--untied", default=None, help="Whether the output layer shares the word embeddings."),
)
_job_options = with_options(
    click.option("--layout", default="megatron", show_default=True,
                 help="megatron (Megatron-core), megatron-lm, ddp, fsdp2, hsdp, zero1, zero2 or zero3."),
    click.option("--pp", type=int, default=1, help="Pipeline stages."),
    click.option("--tp", type=int, default=1, help="Tensor-parallel ranks."),
    click.option("--dp", type=int, default=1, help="Data-parallel ranks."),
    click.option("--ep", type=int, default=1, help="Ranks, of --dp, over which experts are split."),
    click.option("--micro-batch", type=int, default=1, help="Sequences of a micro-batch."),
    click.option("--global-batch", type=int, help="Sequences of a step; by default one micro-batch a rank."),
    click.option("--stages", default="", metavar="N,N,...",
                 help="Layers of each pipeline stage, where they are not alike."),
    click.option("--chunks", type=int, default=1, help="Model chunks of a rank in the interleaved schedule."),
    click.option("--sequence-parallel", is_flag=True, help="Megatron's sequence parallelism."),
    click.option("--distributed-optimizer", is_flag=True, help="Megatron's distributed optimizer."),
    click.option("--recompute", default="none", show_default=True, help="none, selective or full."),
    click.option("--dtype", help="Of parameters and activations: bf16, fp16 or fp32; by default fp32 for ddp, whose "
                                 "parameters autocast leaves as they are, else bf16."),
    click.option("--gradient-dtype", help="Of gradients; by default as --dtype, but fp32 for megatron-lm in bf16."),
    click.option("--bucket", type=int, default=0,
                 help="Of gradients: parameters (megatron, zero) or bytes (ddp); by default the framework's."),
    click.option("--vocabulary-multiple", type=int, default=128, show_default=True,
                 help="What Megatron pads the words of each tensor-parallel rank to."),
    click.option("--overlap-grad-reduce/--no-overlap-grad-reduce", default=False, show_default=True,
                 help="Whether Megatron reduces gradients bucket by bucket, or all at once."),
    click.option("--replicas", type=int, default=1, help="Of the sharded model, in hsdp."),
    click.option("--persistence", type=int, default=100_000, show_default=True,
                 help="zero3 keeps parameters of at most so many elements whole."),
)  # fmt: skip
_hardware_options = with_options(
    click.option("--bandwidth", type=float, metavar="GB/S", help="Effective bandwidth of a rank's link."),
    click.option("--tensor-bandwidth", type=float, metavar="GB/S", help="Of tensor-parallel messages."),
    click.option("--pipeline-bandwidth", type=float, metavar="GB/S", help="Of pipeline messages."),
    click.option("--data-bandwidth", type=float, metavar="GB/S", help="Of gradients and parameters."),
    click.option("--latency", type=float, metavar="US",
                 help="Of each step of a ring, in microseconds; by default 0, or that of --from."),
    click.option("--from", "sources", type=click.Path(path_type=Path), metavar="RUN", multiple=True,
                 help="Take rates that are not given from the record of RUN; a further RUN adds what the others lack."),
    click.option("--bandwidths", type=click.Path(path_type=Path, exists=True), metavar="FOLDER",
                 help="Those that are not given by the times of overlap bench collectives, before --from."),
    click.option("--peak", type=float, metavar="TFLOP/S", help="Peak of one device in the job's precision."),
    click.option("--utilisation", type=float, default=0.4, show_default=True,
                 help="Share of --peak that is reached."),
    click.option("--memory", type=float, metavar="GIB", help="Of one device: layouts that need more are infeasible."),
)  # fmt: skip

# Options that do not affect a job's messages.
_NOT_CHECKED = (
    "what_if", "all_ranks", "sources", "bandwidths", "latency", *_BANDWIDTHS, "peak", "utilisation", "memory",
    *MATRIX_PARAMETERS,
)  # fmt: skip


@click.command("predict")
@_model_options
@_job_options
@_hardware_options
@click.option("--what-if", is_flag=True, help="All pp, tp and dp on as many ranks, by predicted step time.")
@click.option("--all-ranks", is_flag=True, help="Messages of all ranks, not of one of each kind.")
@matrix_options
@click.option("--check", type=click.Path(path_type=Path), metavar="RUN", help="Hold the record of RUN against it.")
@json_option
def command(check: Path | None, as_json: bool, **given: Any) -> None:
    """What a training job should send, message by message, and how long its step should take.

    Step times need the rate of compute and bandwidths, given or from a record.
    """
    import msgspec

    from overlap_callbacks.report.run_json import mappings_as_json
    from overlap_callbacks.report.views.predict import check_document, prediction_document
    from overlap_callbacks.report.views.traffic import predicted_blocks

    context = click.get_current_context()
    if check is not None:
        _refuse_beside_check(context)
    if given["png"] is not None:
        require("matplotlib", "plots")
    try:
        _check_hardware(given)
        job, notes = _job(given)
        if check is not None:
            rows = _checked(job, check)
            if as_json:
                print_json([msgspec.structs.asdict(row) | {"equal": row.equal} for row in rows])
            else:
                print_document(check_document(rows))
            return
        found = _predict(job, notes, given)
        mappings = _traffic(job, given)
    except (TypeError, ValueError) as error:
        raise click.ClickException(one_line(_with_options(str(error), context))) from None
    drawn = draw_matrix(mappings[-1].view, given["svg"], given["png"])
    if as_json:
        print_json(msgspec.structs.asdict(found) | {"traffic": mappings_as_json(mappings)})
    else:
        traffic = predicted_blocks(mappings, drawn) if found.messages else []
        print_document(prediction_document(found, traffic))


def _refuse_beside_check(context: click.Context) -> None:
    """Reject options that do not affect the messages that a run is checked for."""
    names = _options_of(context)
    ignored = [names[name] for name in _NOT_CHECKED if is_given(name)]
    if ignored:
        raise click.ClickException(
            f"--check compares messages, and nothing else: leave out {' and '.join(ignored)}, or --check"
        )


def _options_of(context: click.Context) -> dict[str, str]:
    """Each parameter as the user writes it."""
    return {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name}


def _with_options(message: str, context: click.Context) -> str:
    """A message with parameters as the user writes them. Most of their names are ordinary words as well."""
    for name, option in _options_of(context).items():
        if "_" in name or name in _SIZES:
            message = re.sub(rf"(?<![\w-]){name}\b", option, message)
    return message


def _traffic(job: JobShape, given: dict[str, Any]) -> tuple[Mapping, ...]:
    from overlap_callbacks.analysis.communication.predicted import predicted_messages
    from overlap_callbacks.report.views.traffic import MatrixOptions, predicted_traffic

    shown = {name: given[name] for name in MATRIX_PARAMETERS if name not in ("svg", "png")}
    return predicted_traffic(predicted_messages(job), job.world_size, MatrixOptions(**shown))


def _predict(job: JobShape, notes: list[str], given: dict[str, Any]) -> Prediction:
    from overlap_callbacks.analysis.communication import equations, step_time
    from overlap_callbacks.analysis.communication.model_shape import count_parameters
    from overlap_callbacks.analysis.communication.predicted import sent_rows
    from overlap_callbacks.report.views.predict import Prediction

    memory = given["memory"]
    hardware = _hardware(job, given, notes)
    device_bytes = None if memory is None else memory * _GIB
    need = step_time.memory_bytes(job)
    if device_bytes is not None and need > device_bytes:
        notes.append(f"infeasible: it needs {need / _GIB:.1f} GiB, a device has {memory:.1f} GiB")
    return Prediction(
        parameters=count_parameters(job.model),
        world_size=job.world_size,
        micro_batches=job.micro_batches,
        dtype=job.dtype,
        gradient_dtype=job.gradient_dtype,
        memory_bytes=need,
        expected_bubble_ratio=equations.expected_bubble_ratio(p=job.p, m=job.micro_batches, chunks=job.chunks),
        messages=sent_rows(job, all_ranks=given["all_ranks"]),
        step=step_time.exact_step(job, hardware) if hardware else None,
        paper_step=step_time.paper_step(job, hardware) if hardware else None,
        what_if=step_time.what_if(job, hardware, device_bytes) if given["what_if"] else (),
        notes=tuple(notes),
    )


def _model(given: dict[str, Any]) -> ModelShape:
    import msgspec

    from overlap_callbacks.analysis.communication.model_shape import ModelShape, preset

    sizes = {name: given[name] for name in ModelShape.__struct_fields__ if given.get(name) is not None}
    if sizes.get("experts"):
        sizes["biases"] = False
    if given["model_name"] is not None:
        return msgspec.structs.replace(preset(given["model_name"]), **sizes)
    missing = [f"--{name}" for name in ("layers", "hidden", "sequence", "vocabulary") if name not in sizes]
    if missing:
        raise ValueError(f"give --model, or all its sizes: {', '.join(missing)} missing")
    if "heads" not in sizes:
        sizes["heads"] = _heads(sizes["hidden"], given["tp"])
    return ModelShape(**sizes)


def _heads(hidden: int, tp: int) -> int:
    """A number of heads if the user gave none. It determines attention memory, but no message size."""
    from overlap_callbacks.analysis.communication.model_shape import MAX_SIZE
    from overlap_callbacks.analysis.communication.step_time import divisors

    possible = tp > 0 and 0 < hidden <= MAX_SIZE
    allowed = [heads for heads in divisors(hidden) if heads % tp == 0] if possible else []
    return min(allowed, key=lambda heads: abs(hidden / heads - 64), default=1)


def _job(given: dict[str, Any]) -> tuple[JobShape, list[str]]:
    from overlap_callbacks.analysis.communication.job_shape import JobShape

    options = {name: given[name] for name in JobShape.__struct_fields__ if name in given}
    options |= {field: given[name] for name, field in _SIZES.items()}
    options |= _layout_and_widths(given["layout"], given["dtype"], given["gradient_dtype"])
    batch = given["global_batch"]
    options["global_batch"] = given["micro_batch"] * given["dp"] if batch is None else batch
    try:
        options["stages"] = tuple([int(number) for number in given["stages"].split(",")] if given["stages"] else ())
    except ValueError:
        raise ValueError(f"stages must be numbers with commas between them, got {given['stages']!r}") from None
    job = JobShape(model=_model(given), **options)
    job.check()
    notes = []
    if job.model.layers % job.p and not job.stages:
        split = ",".join(map(str, job.layers_of_stages))
        notes.append(
            f"{job.model.layers} layers do not divide over {job.p} stages: taken is {split}, --stages chooses another"
        )
    return job, notes


def _layout_and_widths(layout: str, dtype: str | None, gradient_dtype: str | None) -> dict[str, str]:
    """How the layout sets the width of messages. Megatron-LM sets Megatron-core's options by its own rule."""
    dtype = dtype or ("fp32" if layout == "ddp" else "bf16")
    if layout == _MEGATRON_LM:
        # Its --bf16 accumulates and reduces gradients in 32 bit; --fp16 does not.
        gradient_dtype = gradient_dtype or ("fp32" if dtype == "bf16" else dtype)
        layout = "megatron"
    return {"layout": layout, "dtype": dtype, "gradient_dtype": gradient_dtype or dtype}


def _check_hardware(given: dict[str, Any]) -> None:
    """Reject figures that no machine has, whether a step time needs them or not."""
    for name, unit in {**dict.fromkeys(_BANDWIDTHS, "GB/s"), "peak": "TFLOP/s", "memory": "GiB"}.items():
        value = given[name]
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


def _hardware(job: JobShape, given: dict[str, Any], notes: list[str]) -> Hardware | None:
    from overlap_callbacks.analysis.communication.bandwidths import Link
    from overlap_callbacks.analysis.communication.step_time import Hardware

    rates = _recorded_rates(given["sources"])
    links, rate = dict(rates.links), rates.compute_flop_per_s
    if given["bandwidths"] is not None:
        links |= {name: Link(rate_of) for name, rate_of in _measured(job, given["bandwidths"], notes).items()}
    latency_s = None if given["latency"] is None else given["latency"] / _US_PER_S
    for name in _DIMENSIONS:
        chosen = given["bandwidth"] if given[f"{name}_bandwidth"] is None else given[f"{name}_bandwidth"]
        if chosen is not None:
            links[name] = Link(chosen * _GB)
        if name in links and latency_s is not None:
            links[name] = Link(links[name].bytes_per_s, latency_s)
    if given["peak"] is not None:
        rate = given["utilisation"] * given["peak"] * _TERA
    # A dimension of one rank sends nothing, whatever its bandwidth; but another layout may need it.
    sizes = zip(_DIMENSIONS, (job.t, job.p, job.d), strict=True)
    needed = [name for name, size in sizes if size > 1 or (given["what_if"] and job.layout == "megatron")]
    missing = [name for name in needed if name not in links]
    if rate is None or missing:
        notes.append(_missing_rates(missing, given["sources"], with_rate=rate is not None))
        return None
    known = [links[name] for name in needed] or [Link(_GB)]
    # The gradient norm's few bytes count with the gradients, even in a job that reduces none.
    worst = Link(min([link.bytes_per_s for link in known]), max([link.latency_s for link in known]))
    hardware = Hardware(
        links={name: links.get(name, worst) for name in _DIMENSIONS},
        peak_flop_per_s=rate if given["peak"] is None else given["peak"] * _TERA,
        utilisation=1.0 if given["peak"] is None else given["utilisation"],
    )
    hardware.check()
    if given["sources"]:
        notes.append(_assumed_rates(hardware, needed))
    return hardware


def _recorded_rates(sources: Sequence[Path]) -> RecordedRates:
    from overlap_callbacks.analysis.communication.bandwidths import RecordedRates, recorded_rates

    rates = RecordedRates()
    for source in sources:
        rates = rates.completed_by(recorded_rates(_windows(source)[-_WINDOWS_OF_RATES:]))
    return rates


def _missing_rates(missing: Sequence[str], sources: Sequence[Path], *, with_rate: bool) -> str:
    wanted = ([] if with_rate else ["--peak"]) + [f"--{name}-bandwidth" for name in missing]
    hint = " (--bandwidth stands for all of them)" if len(missing) > 1 else ""
    if sources:
        records = "records of" if len(sources) > 1 else "record of"
        lacks = [] if with_rate else ["no FLOP of a step beside its sequential time"]
        lacks += [f"no timed messages of {' and '.join(missing)} parallelism"] if missing else []
        hint += f": the {records} {' and '.join(map(str, sources))} has {' and '.join(lacks)}"
    return f"no step time without {' and '.join(wanted)}{hint}"


def _assumed_rates(hardware: Hardware, dimensions: Sequence[str]) -> str:
    """The rates assumed for a prediction, if the user did not give them all."""
    rates = [f"{hardware.utilisation * hardware.peak_flop_per_s / _TERA:,.4g} TFLOP/s of compute"]
    for name in dimensions:
        bandwidth = hardware.links[name].bytes_per_s / _GB
        latency_us = hardware.links[name].latency_s * _US_PER_S
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


def _checked(job: JobShape, run: Path) -> list[Any]:
    from overlap_callbacks.analysis.communication.predicted import check_rank

    window = _windows(run)[-1]
    if window.world_size != job.world_size:
        raise ValueError(f"pp x tp x dp must be the {window.world_size} ranks of {run}, got {job.world_size}")
    ranks = {sample.rank: sample.collectives for sample in window.samples if sample.collectives}
    if not ranks:
        ranks = {min(window.ranks, default=0): window.collectives}
    return [row for rank, collectives in sorted(ranks.items()) for row in check_rank(job, rank, collectives)]


def _windows(run: Path) -> list[OverlapReport]:
    """The complete windows of a run that have collectives, newest last; at least one."""
    found = [window for window in read_record(newest_run(run), details=True).windows if window.collectives]
    if not found:
        raise InconclusiveError(one_line(f"the record of {run} has no window with collectives"))
    return found
