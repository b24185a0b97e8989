"""The models that can be trained, one folder each."""
