"""The study's experiments as commands."""
