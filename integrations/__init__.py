"""One adapter for each framework: it tells the monitor where optimizer steps begin and end."""
