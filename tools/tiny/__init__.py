"""Pre-train the embedded model."""
