"""Observes every collective of the training thread, and serialises them in sequential steps."""
