"""The race check: one step is repeated, overlapped and sequential, and its gradients are compared bit by bit."""
