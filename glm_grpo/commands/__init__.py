"""Commands, from a validated config to an exit code; `build` constructs what they use."""
