"""Models that can be trained, one folder each."""
