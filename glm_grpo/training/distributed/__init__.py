"""Several processes: what they agree on, how gradients are joined."""
