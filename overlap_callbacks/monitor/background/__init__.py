"""All that runs on threads of our own: the order check, measuring, reporting."""
