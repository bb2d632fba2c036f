"""A training job of the study, with the one line that a user adds."""
