"""Power limits and clock caps: set, verified, and restored however an experiment or a job ends.

They are settings of the machine that outlive a process, and need root. So this only runs when a user asks for a cap:
for an experiment (``capped``), or for an arm of a job (``OwnDevice``).
"""
