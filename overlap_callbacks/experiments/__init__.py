"""Experiments run from the command line: the study's benchmarks, and jobs that are started, supervised and compared."""
