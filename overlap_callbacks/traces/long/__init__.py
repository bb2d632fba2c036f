"""Traces that are too long for memory: their events lie in files, in columns, and are worked on a part at a time.

Of a trace, first everything that is needed is written to files as it is read (``spill``). Then each kernel is joined
with its launch and with torch's range around that (``joining``, ``ranges``), all are put in order of time and in their
steps (``placing``), and each device's kernels are given out in pieces (``device``), which ``traces/analysis`` adds up.
The figures are those of the same trace in memory.
"""
