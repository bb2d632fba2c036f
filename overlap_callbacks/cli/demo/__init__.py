"""The demo: several processes on one machine train a small GPT, and its overlap is measured."""
