"""The library's own threads: the order check, measuring, reporting."""
