"""Messages of a step: who sends what to whom, how long it should take, and what was measured. Pure."""
