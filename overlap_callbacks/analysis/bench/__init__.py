"""The figures of ``overlap bench``: from blocks to estimates, and from a plan to its points. Pure."""
