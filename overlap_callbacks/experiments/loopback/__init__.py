"""A job of two ranks in one process, of which rank 1 is a phantom that has the same data; so one GPU is enough.

Collectives pass the real operators of ``c10d`` and the dispatcher. Below them, in place of a backend, is real work of
known length: on a GPU one kernel for each collective, named and placed on streams as NCCL does it, which moves the
bytes once and then holds a chosen number of thread blocks until the time of a link of chosen bandwidth is over; on a
CPU the collectives of Gloo, which a phantom in a thread of its own joins late.

There can be one job at a time in a process, and it needs the process for itself: see ``job.py``.
"""
