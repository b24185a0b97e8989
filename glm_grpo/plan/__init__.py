"""What a run takes before it is started: memory by phase, and the least time of a step."""
