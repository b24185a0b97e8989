"""Monitors of a run: reward hacking and cheap decoding."""
