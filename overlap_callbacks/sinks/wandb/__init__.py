"""Weights & Biases: the sink, and a workspace that answers the questions in order."""

from overlap_callbacks.sinks.wandb.sink import WandbSink

__all__ = ["WandbSink"]
