"""Real machines: what sets a federation up, starts its processes and says how they are."""
