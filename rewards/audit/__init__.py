"""Audit a reward by its scores: shares of the advantage, correlations, canaries."""
