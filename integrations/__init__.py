"""One adapter per framework: it tells the monitor where optimizer steps begin and end."""
