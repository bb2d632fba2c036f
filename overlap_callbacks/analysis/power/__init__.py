"""From readings of a power sensor to watts, joules and clocks for each mode."""
