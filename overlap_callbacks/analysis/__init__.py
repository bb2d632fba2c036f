"""From marks to figures: pure functions and plain data. Nothing here imports torch."""
