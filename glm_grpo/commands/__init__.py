"""What the commands do, from a validated config to an exit code; building is left to `build`."""
