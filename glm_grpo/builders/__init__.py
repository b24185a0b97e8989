"""Construct models, prompts, plain values and the trainer from a config; only this package does."""
