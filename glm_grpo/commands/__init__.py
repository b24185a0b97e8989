"""Commands, from a validated config to an exit code; `builders` constructs what they use."""
