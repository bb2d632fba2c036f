"""`overlap study`: the training experiments of arXiv 2507.03114, on the user's own hardware."""
