"""Train the embedded Janus and its detector."""
