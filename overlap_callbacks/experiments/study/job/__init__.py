"""A training job of the study: it adds the one line as a user does."""
