"""Power, energy and clocks per mode, computed from the readings of a power source."""
