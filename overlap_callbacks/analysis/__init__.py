"""Computes figures from marks, profiles and readings: pure functions and plain data. Nothing here imports torch."""
