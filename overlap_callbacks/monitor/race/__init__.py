"""The race check: repeats one step, overlapped and sequential, and compares the gradients bit by bit."""
