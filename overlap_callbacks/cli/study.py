"""``overlap study``: the training experiments of arXiv 2507.03114."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from overlap_callbacks.cli._options import (
    Amount,
    caps,
    clock_cap_option,
    is_given,
    json_option,
    power_cap_option,
    refuse_with_resume,
    whole_numbers,
    words,
)
from overlap_callbacks.cli._output import require
from overlap_callbacks.cli.experiment import (
    finish,
    limit_s,
    measure_all,
    new_folder,
    output_option,
    reporting_interrupts,
    resume_option,
    sentences,
    show,
)

if TYPE_CHECKING:
    from overlap_callbacks.experiments.machine import Machine
    from overlap_callbacks.experiments.study.sweep import Study

_COMMAND = "overlap study"
# Options allowed with --resume.
_WITH_RESUME = ("resume", "retry", "quick", "minutes", "timeout", "as_json")


@click.command("study")
@click.option(
    "--model", "models", metavar="NAME,...",
    help="gpt3-xl, gpt3-2.7b, gpt3-6.7b, gpt3-13b, llama2-13b (table II of the study); resnet50, resnet101, vgg16, and "
    "all models of overlap predict.  [default: gpt3-xl; --full: table II]",
)  # fmt: skip
@click.option(
    "--batch", "batches", metavar="N,...",
    help="Sequences or images of a micro-batch on each rank.  [default: 1,4; --full: 8,16,32,64, on a CPU 1,2,4,8]",
)  # fmt: skip
@click.option("--strategy", "strategies", metavar="NAME,...",
              help="ddp, fsdp2, zero3 (needs DeepSpeed), tp, pp.  [default: ddp,fsdp2,pp]")  # fmt: skip
@click.option("--precision", "precisions", metavar="NAME,...",
              help="fp32, tf32, fp16, bf16.  [default: bf16, on a CPU fp32]")  # fmt: skip
@power_cap_option
@clock_cap_option
@click.option("--ranks", type=int, help="Ranks of each job, on this host.  [default: one a GPU; without GPUs 2]")
@click.option(
    "--scale", type=float, metavar="F",
    help="Shrink every model: layers, heads, and with them the width, sequence and vocabulary are multiplied by F and "
    "rounded; of image networks the blocks, channels and image. 1 for the models as published.  [default: 1, on a CPU "
    "0.0625]",
)  # fmt: skip
@click.option("--steps", type=int, help="Measured steps of each mode, in fives.  [default: 10; --full: 25]")
@click.option(
    "--quick/--full", default=True,
    help="At most 5 minutes and 10 steps (the default), or the study's models, batches and 25 steps, and no limit.",
)  # fmt: skip
@click.option("--minutes", type=Amount(min=0.1), help="Start no job that would end later.")
@click.option(
    "--timeout", type=Amount(min=1),
    help="Seconds after which a job has failed.  [default: 600; --full: 3600]",
)  # fmt: skip
@output_option("overlap_study/TIME")
@resume_option()
@click.option("--retry", is_flag=True, help="With --resume: try again what failed.")
@json_option
def command(**given: Any) -> None:
    """Train models under every combination, and measure what overlap costs and saves in each.

    The training experiments of "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
    Learning" (arXiv 2507.03114) on this machine: model x batch x strategy x precision x cap. One job for each, with
    the library attached. On GPUs the ranks use NCCL, without two of them the CPU and Gloo.

    A combination that fails (out of memory, say) is a row with its reason. Ctrl-C keeps what was measured.
    """
    require("jinja2", "report")
    began_s = time.monotonic()
    with reporting_interrupts(_COMMAND) as folder_is:
        from overlap_callbacks.experiments.capping import check_may_cap
        from overlap_callbacks.experiments.study.plan import FULL_TIMEOUT_S, QUICK_TIMEOUT_S
        from overlap_callbacks.experiments.study.view import study_data, study_document

        if given["retry"] and given["resume"] is None:
            raise click.UsageError("--retry is for a study that goes on: give its folder by --resume")
        with sentences(click.UsageError):
            study, machine = _begun(given) if given["resume"] is None else _continued(given)
            check_may_cap(study.settings)
            file = study.open()
        folder_is(study.folder)
        if machine.num_gpus == 1:
            click.echo("This host has one GPU, and NCCL takes one for each rank: the ranks train on the CPU.", err=True)
        study.retried = len(study.lines) if given["retry"] else 0
        if not is_given("quick"):
            given["quick"] = bool(study.start.options.get("quick", given["quick"]))
        timeout_s = given["timeout"] or (QUICK_TIMEOUT_S if given["quick"] else FULL_TIMEOUT_S)
        left_s = limit_s(given) - (time.monotonic() - began_s)
        ending = measure_all(study, study.trainer(machine), file, timeout_s=timeout_s, total_s=left_s)
        show(study_document(study), study_data(study), given["as_json"], study.folder / "study.html")
        finish(ending, study.folder, _COMMAND, measured=any([row.figures is not None for row in study.lines]))


def _begun(given: dict[str, Any]) -> tuple[Study, Machine]:
    """A new study. Raises a ``ValueError`` if it cannot be run as the user asked."""
    from overlap_callbacks.experiments.machine import find_machine
    from overlap_callbacks.experiments.study.plan import check, make_start
    from overlap_callbacks.experiments.study.sweep import Study

    asked = {
        "models": words(given["models"]),
        "batches": whole_numbers(given["batches"], "--batch"),
        "strategies": words(given["strategies"]),
        "precisions": words(given["precisions"]),
        "power_caps_w": caps(given["power_caps"], "--power-cap"),
        "clock_caps_mhz": caps(given["clock_caps"], "--clock-cap"),
        **{name: given[name] for name in ("ranks", "scale", "steps")},
    }
    check(asked)
    folder = new_folder(given["output"], "overlap_study", Study.FILE_NAME)
    machine = find_machine()
    return Study(folder, make_start(asked, machine, quick=given["quick"])), machine


def _continued(given: dict[str, Any]) -> tuple[Study, Machine]:
    """A resumed study. Raises a ``ValueError`` if it cannot be resumed."""
    from overlap_callbacks.experiments.machine import find_machine
    from overlap_callbacks.experiments.study.plan import difference
    from overlap_callbacks.experiments.study.sweep import Study

    refuse_with_resume(_WITH_RESUME)
    study = Study.read(given["resume"])
    machine = find_machine()
    other = difference(study.start, machine)
    if other:
        raise ValueError(f"--resume {given['resume']}: {other}")
    return study, machine
