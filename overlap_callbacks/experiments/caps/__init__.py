"""Power limits and clock caps for an experiment: set, verified, and put back whichever way the experiment ends.

Nothing in a training job imports this folder. It changes settings of the machine that outlive a process, needs root,
and is only reached where a person asks for a cap. ``capped`` is what an experiment uses.
"""
