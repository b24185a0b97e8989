"""Commands, from a validated config to an exit code."""
