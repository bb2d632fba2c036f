"""Power, energy and clocks of the device that trains.

``find`` makes a source for a device (``nvml``, ``amd`` or ``rapl``), ``sampler`` reads it on a thread of its own,
``figures`` turns readings into watts and joules for each mode, ``trace`` into a curve, and ``verdict`` says what a
slowdown is due to. Nothing here ever changes a limit, a clock or a mode of a device.
"""
