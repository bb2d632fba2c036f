"""A job of two ranks in one process; rank 1 is a phantom with the same data. So one GPU is enough.

Collectives go through the real operators of ``c10d`` and the dispatcher. Instead of a backend, real work of known
length runs: on a GPU one kernel per collective, named and placed on streams as by NCCL, which moves the bytes once and
then holds a chosen number of thread blocks for as long as a link of chosen bandwidth would take; on a CPU the
collectives of Gloo, which a phantom on its own thread joins late.

Only one such job can be open in a process, and it needs the process for itself: see ``job.py``.
"""
