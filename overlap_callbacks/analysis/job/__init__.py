"""What the ranks of a job measured in a window, as sums that can be added level by level."""
