"""``overlap tune``: the step time of a job under every combination of settings."""
