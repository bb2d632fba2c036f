"""Where reports go. A sink is used on rank 0 only, from one thread that is not the training thread."""

from overlap_callbacks.sinks.base import RunInfo, Sink
from overlap_callbacks.sinks.jsonl import JsonlSink
from overlap_callbacks.sinks.wandb import WandbSink

__all__ = ["JsonlSink", "RunInfo", "Sink", "WandbSink"]
