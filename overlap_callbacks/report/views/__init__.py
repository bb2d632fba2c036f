"""The content of screens as plain data, one file per subject; ``html`` and ``terminal`` draw it."""
