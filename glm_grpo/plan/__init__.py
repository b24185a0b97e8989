"""Plan memory by phase and the minimum time of a step before a run starts."""
