"""Experiments as commands: whole runs that are started, supervised and compared."""
