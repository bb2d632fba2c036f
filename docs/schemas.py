#!/usr/bin/env python3
"""Writes the JSON Schema of what each command prints with ``--json``: ``python3 docs/schemas.py``.

They are made of the code's own types and lie in the package, in ``overlap_callbacks/cli/schemas``.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import msgspec.inspect
from msgspec import Meta

from overlap_callbacks.analysis.advice import Advice
from overlap_callbacks.analysis.bench import GemmFigures, TransferFigures
from overlap_callbacks.analysis.causal_findings import Fix
from overlap_callbacks.analysis.communication.link_peaks import Link
from overlap_callbacks.analysis.communication.predicted import CheckedRow
from overlap_callbacks.analysis.results.arm import ARM_DEVICE_FIGURES, ARM_FAMILIES, ARM_FIGURES
from overlap_callbacks.analysis.results.arrivals import SizeTransfer
from overlap_callbacks.analysis.results.bench import Failed, Start
from overlap_callbacks.analysis.results.catalogue import FIGURES, every_figure
from overlap_callbacks.analysis.results.causal import DelayedCall
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.environment import Finding, JobEnvironment
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import ExposedCollective, Exposure
from overlap_callbacks.analysis.results.figure import BOUNDS, Figure
from overlap_callbacks.analysis.results.messages import DimensionTraffic, MessageGroup
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.report import PipelineBubble, Throughput
from overlap_callbacks.analysis.results.request import JobAnswer
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.step_parts import Bound, StepParts, StepShare
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.analysis.stragglers import Straggler
from overlap_callbacks.analysis.study import BATCH, PRECISION, Configuration, Published, StudyRow, StudyStart
from overlap_callbacks.analysis.throughput import RunFigures, ScaledRun
from overlap_callbacks.analysis.trade_off import TradeOffRow
from overlap_callbacks.experiments.against import Answer, Part
from overlap_callbacks.experiments.check import State
from overlap_callbacks.experiments.ledger import Entry, Tally
from overlap_callbacks.experiments.study.factors import CAPS
from overlap_callbacks.report.views.predict import Prediction
from overlap_callbacks.traces.figures import Analysis, Comparison

FOLDER = Path(__file__).resolve().parent.parent / "overlap_callbacks" / "cli" / "schemas"


def made(name: str, /, *bases: Any, leave_out: tuple[str, ...] = (), **fields: Any) -> Any:
    """An object with the fields of some types and more."""
    found = {key: hint for base in bases for key, hint in typing.get_type_hints(base, include_extras=True).items()
             if key not in leave_out and "ClassVar" not in str(hint)}  # fmt: skip
    made_type = TypedDict(name, {**found, **fields})
    made_type.__doc__ = bases[0].__doc__ if bases else None
    return made_type


def named(figures: Iterable[Figure], *, by_key: bool = True) -> Any:
    """The names or keys of figures, with labels of the job and ends of intervals."""
    own = {re.sub(r"\\{\w+\\}", ".+", re.escape(f.key if by_key else f.name)): None for f in figures}
    ends = "|".join([f"_{bound}" for bound in BOUNDS])
    return Annotated[str, Meta(pattern=f"^({'|'.join(own)}){f'({ends})?' if by_key else ''}$")]


ESTIMATES = dict[named(FIGURES, by_key=False), Estimate]
METRIC_ESTIMATES = dict[named(every_figure().values()), Estimate]
METRICS = dict[named(every_figure().values()), float]
OF_ARMS = [figure for family in ARM_FAMILIES for figure in family.figures]

WindowFigures = made("WindowFigures", window=int, figures=ESTIMATES)
WindowMetrics = made("WindowMetrics", window=int, valid=bool, verified=bool, metrics=METRICS)
ArmWindow = made("ArmWindow", window=int, counts=bool, metrics=dict[named(OF_ARMS), float])
Arm = made(
    "Arm", arm=str, equal_results=bool, family=str, setting=float | None, energy_saving=float | None,
    on_front=bool | None, num_windows=int, problems=list[str], verdict=str, by_window=list[ArmWindow],
    figures=dict[named(ARM_FIGURES, by_key=False), Estimate],
    **{figure.name: float | None for figure in ARM_DEVICE_FIGURES},
)  # fmt: skip
Link_ = made("Link", Link)
Late = made("Late", Straggler, last_share=float, sure=bool)
Communication = made(
    "Communication", waiting_fraction=float | None, late_ranks=list[Late], late_hosts=list[Late],
    bandwidths=list[made("Bandwidth", SizeTransfer, mean_bytes=float, gb_s=float, peak_fraction=float | None)],
    link_peak=Link_ | None, network_peak=Link_ | None, exposure=Exposure | None,
    step_shares=list[made("StepShare", StepShare)],
    pipeline=made("Pipeline", PipelineBubble, expected_fraction=float | None, fraction=float | None) | None,
)  # fmt: skip
BottleneckOfRun = made(
    "Bottleneck", bound=Bound, runner_up=Bound | None, sentence=str, parts=made("StepParts", StepParts),
    late_rank=int | None, advice=list[made("Advice", Advice, link=str)],
)  # fmt: skip
Run = made(
    "Run", path=str, run=RunInfo, windows=int, valid_windows=int, verdict=str, state=str,
    bottleneck=BottleneckOfRun | None, figures=ESTIMATES, all_looks=bool, arms=list[Arm], decision=Decision | None,
    changes=list[Change], goodput=dict[str, float],
    race=RaceCheck | None,
    causal=list[made(
        "Delayed", members=tuple[DelayedCall, ...], delay_ms=float, slope=Estimate, slack_ms=Estimate | None,
        longer_ms=list[float], num_windows=int, verdict=str, removed_wins_at_most_ms=float | None,
        exposed_ms=float | None, hidden_ms=float | None, on_critical_path_ms=float | None,
        profile_is_of_same_windows=bool, profile_differs=str, fix=made("Fix", Fix) | None,
    )],
    throughput=Throughput | None, measuring_cost=Estimate | None, quick_cost=Estimate | None, sides=ESTIMATES,
    unfinished=WindowFigures | None,
    communication=Communication, by_window=list[WindowMetrics], environment=JobEnvironment | None,
    findings=list[Finding], problems=list[str],
)  # fmt: skip
ComparedRun = made(
    "ComparedRun",
    RunFigures,
    leave_out=("name", "bandwidths"),
    run=str,
    bandwidths_gb_s=dict[str, float],
    **{f"scaling_{name}": NotRequired[hint] for name, hint in ScaledRun.__annotations__.items()},
)
Against = made("Against", axis=str, work=str | None, runs=list[ComparedRun], without=list[str])
Report = made("Report", page=str, bytes=int, runs=list[Run], against=NotRequired[Against])
Mapping = made(
    "Mapping", mapping=str, as_run=bool, dimensions=list[DimensionTraffic], by=str, labels=list[str],
    sent_bytes=list[list[float]], unplaced_bytes=float,
)  # fmt: skip
Traffic = made(
    "Traffic", window=int, num_hosts=int | None, num_steps=int, num_alike=int, mappings=list[Mapping],
    groups=list[MessageGroup], communication=Communication,
)  # fmt: skip
Limit = made("Limit", option=str, figure=str, limit=float, state=State, measured=Estimate | None, doubt=str)
Compared = made(
    "Compared", answer=Answer, within=float, confidence=float, unit=Literal["run", "window"], step_ms=Estimate,
    baselines=list[made("Baseline", path=str, step_ms=Estimate)], change=Estimate | None, would_do=int | None,
    differs=list[made("Differing", name=str, run=str, baselines=list[str])],
    parts=list[made("ComparedPart", Part, is_slower=bool)],
)  # fmt: skip
Check = made(
    "Check", exit_code=Literal[0, 1, 3], limits=list[Limit], all_looks=bool, windows=int, valid_windows=int, state=str,
    against=Compared | None, dimensions=list[DimensionTime], collectives=list[ExposedCollective],
)  # fmt: skip
Ledger = made(
    "Ledger", Tally, topics=list[made("LedgerTopic", Tally, topic=str, is_bad=bool)],
    predictions=list[made("LedgerEntry", Entry, held=bool | None)],
)  # fmt: skip
TunedRow = made(
    "Combination", settings=dict[str, str], runs=int, step_ms=Estimate | None, change=Estimate | None,
    failure=str | None,
)  # fmt: skip
Tuning = made("Tuning", verdict=str, line=str | None, command=list[str], folder=str, rows=list[TunedRow])
BENCHES = [
    made(f"{name}Bench", start=Start, points=list[made(f"{name}Figures", of)], failed=list[Failed], left=int,
         notes=list[str], file=str)
    for name, of in (("Gemm", GemmFigures), ("Transfer", TransferFigures))
]  # fmt: skip
Extreme = made("Extreme", configuration=Configuration, figure=Estimate)
Pair = made("Pair", base=Configuration, other=Configuration, changes=METRIC_ESTIMATES)
Over = made(
    "OverConfigurations", configurations=int, mean=Estimate, largest=Extreme, smallest=Extreme,
    study=made("Published", Published) | None,
)  # fmt: skip
TradeOff = made("TradeOff", configuration=str, caps=list[TradeOffRow])
StudyResult = made(
    "Study", folder=str, verdict=str, notes=list[str], start=StudyStart,
    over_configurations=dict[named(every_figure().values()), Over],
    configurations=list[made("StudyRow", StudyRow)],
    pairs=made("Pairs", **dict.fromkeys((BATCH, PRECISION, *CAPS), list[Pair])),
    trade_offs=made("TradeOffs", **dict.fromkeys(CAPS, list[TradeOff])),
)  # fmt: skip
Workspace = made("Workspace", entity=str, project=str, name=str, spec=NotRequired[dict[str, Any]], url=NotRequired[str])
# Of these a key may be missing.
OPTIONAL = {"ComparedRun", "Report", "Workspace"}
# What a command prints; one of several where there are more.
COMMANDS: dict[str, tuple[Any, ...]] = {
    "show": (Run,), "report": (Report, Analysis), "check": (Check,), "analyze": (Analysis,), "compare": (Comparison,),
    "traffic": (Traffic,), "predict": (made("Predicted", Prediction, traffic=list[Mapping]),
                                       list[made("Checked", CheckedRow, equal=bool)], Ledger),
    "bench": tuple(BENCHES), "study": (StudyResult,), "tune": (Tuning,), "workspace": (Workspace,),
    "ask": (JobAnswer,),
}  # fmt: skip


def schema_of(command: str) -> dict[str, Any]:
    """The schema of what a command prints. It refuses keys that it does not name, and asks for those always there."""
    tops, parts = msgspec.json.schema_components(COMMANDS[command], ref_template="#/$defs/{name}")
    structs: set[Any] = set()
    structs_in(msgspec.inspect.multi_type_info(COMMANDS[command]), structs)
    short = {struct.__name__ for struct in structs if struct.__struct_config__.omit_defaults}
    for name, part in parts.items():
        strict(part, keeps_defaults=name in short)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"overlap {command} --json",
        **(tops[0] if len(tops) == 1 else {"anyOf": list(tops)}),
        "$defs": parts,
    }


def structs_in(found: Any, seen: set[Any]) -> None:
    """Collect the structs that types are made of, by msgspec's description of the types."""
    if isinstance(found, msgspec.inspect.StructType):
        if found.cls in seen:
            return
        seen.add(found.cls)
    parts = found if isinstance(found, (list, tuple)) else []
    if isinstance(found, msgspec.Struct):
        parts = [getattr(found, name) for name in found.__struct_fields__]
    for part in parts:
        structs_in(part, seen)


def strict(part: dict[str, Any], *, keeps_defaults: bool) -> None:
    """Refuse other keys. What has a default is printed all the same, but where defaults are left out."""
    if "description" in part:
        part["description"] = inspect.cleandoc(part["description"])
    if "properties" in part:
        part["additionalProperties"] = False
        for own in part["properties"].values():
            own.pop("default", None)
        if not keeps_defaults and part["title"] not in OPTIONAL:
            part["required"] = list(part["properties"])


def text_of(command: str) -> str:
    """The file, a line for each type."""
    schema = schema_of(command)
    parts = schema.pop("$defs")
    head = "".join([f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in schema.items()])
    lines = ",\n".join([f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items()])
    return f'{{\n{head} "$defs": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in COMMANDS:
        (FOLDER / f"{name}.json").write_text(text_of(name))
