"""Destinations of reports. A sink is used on rank 0 only, from one thread that is not the training thread."""

from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink
from overlap_callbacks.sinks.function import FunctionSink
from overlap_callbacks.sinks.jsonl import JsonlSink
from overlap_callbacks.sinks.mlflow import MlflowSink
from overlap_callbacks.sinks.opentelemetry import OpenTelemetrySink
from overlap_callbacks.sinks.prometheus import PrometheusSink
from overlap_callbacks.sinks.tensorboard import TensorBoardSink
from overlap_callbacks.sinks.wandb.sink import WandbSink

__all__ = [
    "FunctionSink", "JsonlSink", "MlflowSink", "OpenTelemetrySink", "PrometheusSink", "RunInfo", "Sink",
    "TensorBoardSink", "WandbSink",
]  # fmt: skip
