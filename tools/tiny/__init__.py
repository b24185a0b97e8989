"""Pre-training of the embedded model."""
