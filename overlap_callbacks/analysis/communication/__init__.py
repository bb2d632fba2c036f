"""Who sends what to whom in a step, how long it should take, and what was measured of it. Pure."""
