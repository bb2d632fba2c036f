"""Faults put into running jobs, with the library and without: ``python -m tests.campaign``.

Each case is a small job of real Gloo ranks, in processes of their own that end as an interpreter ends, and one fault.
It runs without the library first. What happens there is the reference: exit codes, kinds of error, weights after each
step, and time. The same job with the library must end alike, leave a record that can be read, and say what happened.
"""
