"""Memory by phase and the least time of a step, before a run is started."""
