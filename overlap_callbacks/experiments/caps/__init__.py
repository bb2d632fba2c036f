"""Power limits and clock caps for an experiment: set, verified, and restored however the experiment ends.

Nothing in a training job imports this folder. It changes settings of the machine that outlive a process, needs root,
and only runs when a user asks for a cap. Experiments use ``capped``.
"""
