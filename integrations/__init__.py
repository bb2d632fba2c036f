"""Adapters: one thin file for each framework, which tells the monitor where an optimizer step begins and ends."""
