"""``overlap predict``: what a job should send, and how long its step should take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from overlap_callbacks.cli import ExitCode
from overlap_callbacks.cli._options import (
    MATRIX_PARAMETERS,
    GroupedCommand,
    is_given,
    json_option,
    matrix_options,
    with_options,
)
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
from overlap_callbacks.cli.predict_rates import RATES, check_hardware, hardware_of, hardware_options, windows_of

if TYPE_CHECKING:
    from overlap_callbacks.analysis.communication.job_shape import JobShape
    from overlap_callbacks.analysis.communication.model_shape import ModelShape
    from overlap_callbacks.report.views.predict import Prediction
    from overlap_callbacks.report.views.traffic import Mapping

_GIB = 2**30
_MEGATRON_LM = "megatron-lm"
# Options are named like the fields of ModelShape and JobShape, except these.
_SIZES = {"pp": "p", "tp": "t", "dp": "d"}
_model_options = with_options(
    click.option("--model", "model_name", metavar="NAME",
                 help="A model that is known by name, e.g. gpt3-6.7b; the same names as overlap study."),
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
    heading="Model",
)  # fmt: skip
_job_options = with_options(
    click.option("--layout", default="megatron", show_default=True,
                 help="megatron (Megatron-core), megatron-lm, ddp, fsdp2, hsdp, zero1, zero2 or zero3."),
    click.option("--pp", type=int, default=1, help="Pipeline stages."),
    click.option("--tp", type=int, default=1, help="Tensor-parallel ranks."),
    click.option("--dp", type=int, default=1, help="Data-parallel ranks."),
    click.option("--ep", type=int, default=1, help="Ranks, of --dp, over which experts are split."),
    click.option("--micro-batch", type=int, default=1, help="Sequences of a micro-batch."),
    click.option("--global-batch", type=int, help="Sequences of a step; by default one micro-batch a rank, in a "
                 "pipeline four for each stage."),
    click.option("--stages", default="", metavar="N,N,...",
                 help="Layers of each pipeline stage, where they differ."),
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
                 help="zero3 keeps parameters of at most this many elements whole."),
    heading="Job",
)  # fmt: skip


_message_options = with_options(
    click.option("--messages", is_flag=True, help="Show what is sent, message by message, and the traffic matrix."),
    click.option("--all-ranks", is_flag=True, help="Messages of all ranks, not of one of each kind."),
    heading="Messages",
)

# The job where none is given, and the ranks where no size of the layout is.
_MODEL, _RANKS = "gpt3-6.7b", 8

# What a ledger takes, and how many runs of a folder, the newest.
_OF_LEDGER = ("ledger", "runs", "as_json")
_MOST_RUNS = 100

# Options that do not affect a job's messages.
_NOT_CHECKED = (
    "what_if", "messages", "all_ranks", *RATES, "latency", "utilisation", "memory", *MATRIX_PARAMETERS,
)  # fmt: skip


@click.command("predict", cls=GroupedCommand)
@_model_options
@_job_options
@hardware_options
@click.option("--what-if", is_flag=True, help="All pp, tp and dp on as many ranks, by predicted step time.")
@_message_options
@matrix_options
@click.option(
    "--check", type=click.Path(path_type=Path), metavar="RUN",
    help="Compare the messages of RUN; the exit code is 1 if they differ.",
)  # fmt: skip
@click.option("--ledger", is_flag=True, help="How often the predictions of RUNS' advice held, where they were tried.")
@json_option
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUNS...]")
def command(check: Path | None, ledger: bool, runs: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """How long a step of a training job should take, what memory it needs, and what it should send.

    Rates are those of a GPU and a network by name, given as numbers, or from a record.

    With --ledger: RUNS are runs, folders of runs, and folders of overlap tune.
    """
    import msgspec

    from overlap_callbacks.report.run_json import mappings_as_json
    from overlap_callbacks.report.views.predict import check_document, prediction_document
    from overlap_callbacks.report.views.traffic import predicted_blocks

    context = click.get_current_context()
    if ledger or runs:
        _print_ledger(context, ledger, runs, as_json)
    if check is not None:
        _refuse_beside_check(context)
    if given["png"] is not None:
        require("matplotlib", "plots")
    try:
        check_hardware(given)
        assumed = [] if check is not None else _assume(given)
        job, notes = _job(given)
        notes[:0] = assumed
        if check is not None:
            rows = _checked(job, check)
            if as_json:
                print_json([msgspec.structs.asdict(row) | {"equal": row.equal} for row in rows])
            else:
                print_document(check_document(rows))
            raise SystemExit(ExitCode.DONE if all([row.equal for row in rows]) else ExitCode.BROKEN)
        found = _predict(job, notes, given)
        mappings = _traffic(job, given)
    except (TypeError, ValueError) as error:
        raise click.ClickException(one_line(_with_options(str(error), context))) from None
    if given["sources"] and any([one.saves_ms for one in found.what_if]):
        found = msgspec.structs.replace(found, notes=(*found.notes, *_kept(job, found, given["sources"])))
    drawn = draw_matrix(mappings[-1].view, given["svg"], given["png"])
    if as_json:
        print_json(msgspec.structs.asdict(found) | {"traffic": mappings_as_json(mappings)})
    else:
        shown = ("messages", "all_ranks", *[name for name in MATRIX_PARAMETERS if name != "ranks_per_host"])
        traffic = None
        if any(map(is_given, shown)):
            traffic = predicted_blocks(mappings, drawn) if found.messages else []
        print_document(prediction_document(found, traffic))


def _print_ledger(context: click.Context, ledger: bool, runs: Sequence[Path], as_json: bool) -> NoReturn:
    """Print how often predictions held, and exit."""
    from overlap_callbacks.experiments import ledger as ledgers
    from overlap_callbacks.experiments.sweep import ResultsError
    from overlap_callbacks.experiments.tune.sweep import Tune

    if not ledger or not runs:
        raise click.UsageError("--ledger: give runs" if ledger else f"{runs[0]}: runs are for --ledger")
    beside = [option for name, option in _options_of(context).items() if name not in _OF_LEDGER and is_given(name)]
    if beside:
        raise click.UsageError(f"--ledger takes runs, and nothing else: leave out {' and '.join(beside)}")
    tunes = [path for path in runs if path.name == Tune.FILE_NAME or (path / Tune.FILE_NAME).exists()]
    with refusing(ResultsError):
        read_tunes = [Tune.read(path) for path in tunes]
    records = {one.resolve(): one for path in runs if path not in tunes for one in _runs_of(path)}
    entries = ledgers.ledger([read_record(one) for one in records.values()], read_tunes)
    found, failed = ledgers.tally(entries), ledgers.keep_outcomes(entries)
    if as_json:
        print_json(ledgers.as_data(entries))
    else:
        print_document(ledgers.document(entries, failed))
    raise SystemExit(ExitCode.DONE if found.tried else ExitCode.INCONCLUSIVE)


def _runs_of(path: Path) -> Sequence[Path]:
    """A run, or the newest of a folder of runs."""
    from overlap_callbacks.analysis.results.run import FILE_NAME
    from overlap_callbacks.report.record import runs_in

    return [path] if not path.is_dir() or (path / FILE_NAME).exists() else runs_in(path)[-_MOST_RUNS:] or [path]


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
            message = re.sub(rf"(?<![\w'-]){name}\b(?!['-])", option, message)
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

    hardware = hardware_of(job, given, notes)
    memory = given["memory"]
    device_bytes = None if memory is None else memory * _GIB
    need = step_time.memory_bytes(job)
    return Prediction(
        parameters=count_parameters(job.model),
        world_size=job.world_size,
        micro_batches=job.micro_batches,
        dtype=job.dtype,
        gradient_dtype=job.gradient_dtype,
        memory_bytes=need,
        device_bytes=device_bytes,
        expected_bubble_ratio=equations.expected_bubble_ratio(p=job.p, m=job.micro_batches, chunks=job.chunks),
        messages=sent_rows(job, all_ranks=given["all_ranks"]),
        step=step_time.exact_step(job, hardware) if hardware else None,
        paper_step=step_time.paper_step(job, hardware) if hardware else None,
        what_if=step_time.what_if(job, hardware, device_bytes) if given["what_if"] else (),
        notes=tuple(notes),
    )


def _kept(job: JobShape, found: Prediction, sources: Sequence[Path]) -> list[str]:
    """Write what other layouts save beside the record of each run that is the job, and say so."""
    import msgspec

    from overlap_callbacks.experiments import what_if

    notes = []
    for run in map(newest_run, sources):
        said = what_if.layouts(read_record(run), job, found.what_if)
        if said is None:
            why = "has another job, or no step time (--check compares messages)"
            notes.append(one_line(f"not kept for --ledger: {run} {why}"))
        else:
            file = what_if.file_beside(run)
            failed = what_if.keep(file, [{"record": "prediction", **msgspec.to_builtins(one)} for one in said])
            notes.append(one_line(failed or f"kept for --ledger in {file}"))
    return notes


def _model(given: dict[str, Any]) -> ModelShape:
    import msgspec

    from overlap_callbacks.analysis.communication.model_shape import PRESETS, ModelShape, preset
    from overlap_callbacks.experiments.study.models import MODELS

    sizes = {name: given[name] for name in ModelShape.__struct_fields__ if given.get(name) is not None}
    if sizes.get("experts"):
        sizes["biases"] = False
    if given["model_name"] in MODELS.keys() - PRESETS.keys():
        raise ValueError(
            f"{given['model_name']} is a network for images, and predict knows transformers: overlap study"
        )
    if given["model_name"] is not None:
        return msgspec.structs.replace(preset(given["model_name"]), **sizes)
    missing = [f"--{name}" for name in ("layers", "hidden", "sequence", "vocabulary") if name not in sizes]
    if missing:
        raise ValueError(
            f"give --model, or all its sizes: {', '.join(missing)} missing. Known models: {', '.join(PRESETS)}"
        )
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


def _assume(given: dict[str, Any]) -> list[str]:
    """Choose a model and a layout where the user gave neither name nor size, and say what was chosen."""
    from overlap_callbacks.analysis.communication import step_time
    from overlap_callbacks.analysis.communication.model_shape import ModelShape

    assumed = []
    if not any([given.get(name) is not None for name in ("model_name", *ModelShape.__struct_fields__)]):
        given["model_name"] = _MODEL
        assumed.append(f"assumed, as no model is given: {_MODEL} (--model)")
    if not any(map(is_given, ("pp", "tp", "dp", "ep", "replicas", "stages", "chunks"))):
        sizes = (1, 2, 4, 8) if given["layout"] in ("megatron", _MEGATRON_LM) else (1,)
        for tp in sizes:  # the fewest tensor-parallel ranks whose device has memory enough
            given |= {"tp": tp, "dp": _RANKS // tp}
            if step_time.memory_bytes(_job(given)[0]) <= (given["memory"] or 80) * _GIB:
                break
        assumed.append(f"assumed, as no layout is given: {_RANKS} ranks, TP {given['tp']} x DP {given['dp']}")
    return assumed


def _job(given: dict[str, Any]) -> tuple[JobShape, list[str]]:
    from overlap_callbacks.analysis.communication.job_shape import JobShape

    options = {name: given[name] for name in JobShape.__struct_fields__ if name in given}
    options |= {field: given[name] for name, field in _SIZES.items()}
    options |= _layout_and_widths(given["layout"], given["dtype"], given["gradient_dtype"])
    batch = given["global_batch"]
    a_rank = 4 * given["pp"] if given["pp"] > 1 else 1
    options["global_batch"] = given["micro_batch"] * given["dp"] * a_rank if batch is None else batch
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


def _checked(job: JobShape, run: Path) -> list[Any]:
    from overlap_callbacks.analysis.communication.predicted import check_window

    window = windows_of(run)[-1]
    if window.world_size != job.world_size:
        raise ValueError(f"pp x tp x dp must be the {window.world_size} ranks of {run}, got {job.world_size}")
    return check_window(job, window)
