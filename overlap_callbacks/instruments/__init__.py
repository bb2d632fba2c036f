"""Instruments that are read while steps run: clocks, the profiler, power. Nothing here blocks training."""
