"""Kernels of a profile, and what is computed from them: times, losses, dimensions of parallelism, timelines."""
