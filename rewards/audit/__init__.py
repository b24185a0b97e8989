"""What the scores say about a reward: shares of the advantage, correlations, canaries."""
