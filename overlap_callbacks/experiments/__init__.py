"""Experiments as commands: the study's benchmarks, and runs that are started, supervised and compared."""
