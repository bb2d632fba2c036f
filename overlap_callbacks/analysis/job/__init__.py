"""The ranks' measurements of a window, as sums that can be merged level by level."""
