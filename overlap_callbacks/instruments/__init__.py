"""What is read while steps run: clocks, the profiler, power. Never blocks training."""
