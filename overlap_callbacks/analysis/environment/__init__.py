"""A job's environment: the settings kept, what the ranks have in common, and settings that are known traps."""
