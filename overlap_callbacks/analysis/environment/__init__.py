"""What a job runs on: which settings are kept, what the ranks have in common, and which settings are known traps."""
