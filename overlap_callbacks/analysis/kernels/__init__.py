"""Kernels in columns, and what follows from them: times, attribution, dimensions of parallelism."""
